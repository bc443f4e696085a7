"""In the caller's transaction: jobs that exist when it commits, and jobs that end when it commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import orjson

from penstock.core.transactional import check_transaction, fetch, fetch_document, in_callers_task, is_asyncpg
from penstock.jobs import queries
from penstock.jobs.models import EnqueueOutcome

_ENQUEUE = "select ordinal, id, outcome from penstock.enqueue_json({0}, cast({1} as jsonb)) where outcome <> 'queued'"

_FINISH = """
    select penstock.finish(cast({0} as uuid), given.attempt, given.lease, given.result, given.lines, given.ages)
    from jsonb_to_record(cast({1} as jsonb))
        as given (attempt smallint, lease bigint, result jsonb, lines text[], ages double precision[])
"""


@in_callers_task
async def enqueue_through(connection: Any, batch: queries.JobColumns) -> dict[int, tuple[UUID, EnqueueOutcome]]:
    """Enqueue a batch through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Raises:
        InvalidInput: A job is not valid, or the connection is of no supported kind.
    """
    if is_asyncpg(connection):
        return queries.exceptions_by_index(await fetch(connection, *queries.enqueue_call(batch)))
    return _by_index(await fetch_document(connection, _ENQUEUE, batch.name, queries.as_json(batch)))


@in_callers_task
async def finish_through(
    connection: Any, id: UUID, attempt: int, lease: int, result: str | None, lines: Sequence[tuple[str, float]] = ()
) -> None:
    """Finish a claimed job through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Args:
        connection: Connection or session whose transaction ends the job.
        id: Id of the job.
        attempt: Its attempt.
        lease: The lease under which it is held.
        result: Its result as it is stored, JSON text; None: it has none.
        lines: The last lines of its log, each with its age in seconds.

    Raises:
        Conflict: The job is not held under this lease: the transaction has to be rolled back.
        InvalidInput: The connection is of no supported kind, or has no transaction.
    """
    check_transaction(connection)
    document = {
        "attempt": attempt,
        "lease": lease,
        **({"result": orjson.Fragment(result)} if result is not None else {}),
        **({"lines": [line for line, _ in lines], "ages": [age for _, age in lines]} if lines else {}),
    }
    await fetch_document(connection, _FINISH, str(id), orjson.dumps(document).decode())


def _by_index(rows: Any) -> dict[int, tuple[UUID, EnqueueOutcome]]:
    return {row[0] - 1: (row[1] if isinstance(row[1], UUID) else UUID(str(row[1])), EnqueueOutcome(row[2])) for row in rows}
