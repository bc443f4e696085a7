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
    select
        pg_current_xact_id()::text,
        penstock.finish(cast({0} as uuid), given.attempt, given.lease, given.result, given.lines, given.ages)
    from jsonb_to_record(cast({1} as jsonb))
        as given (attempt smallint, lease bigint, result jsonb, lines text[], ages double precision[])
"""

# Some drivers take the parameters in the order in which they stand here.
_WRITE_STEP = """
    select written.outcome, pg_current_xact_id()::text
    from (select cast({0} as uuid) as id) as job
    cross join jsonb_to_record(cast({1} as jsonb)) as given (lease bigint, name text, result jsonb)
    cross join lateral penstock.write_steps(
        array[job.id], array[given.lease], array[given.name], array[given.result]
    ) as written
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
) -> str:
    """Finish a claimed job through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Args:
        connection: Connection or session whose transaction ends the job.
        id: Id of the job.
        attempt: Its attempt.
        lease: The lease under which it is held.
        result: Its result as it is stored, JSON text; None: it has none.
        lines: The last lines of its log, each with its age in seconds.

    Returns:
        The id of the transaction.

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
    rows = await fetch_document(connection, _FINISH, str(id), orjson.dumps(document).decode())
    return str(rows[0][0])


@in_callers_task
async def write_step_through(connection: Any, id: UUID, lease: int, name: str, result: str) -> tuple[str, str]:
    """Keep the result of a durable step through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Args:
        connection: Connection or session whose transaction keeps the step.
        id: Id of the job.
        lease: The lease under which it is held.
        name: Name of the step.
        result: Its result as it is stored, JSON text.

    Returns:
        "written", "known" or "stale", as `penstock.write_steps` does, and the id of the transaction.

    Raises:
        InvalidInput: The connection is of no supported kind, or has no transaction.
    """
    check_transaction(connection)
    document = {"lease": lease, "name": name, "result": orjson.Fragment(result)}
    rows = await fetch_document(connection, _WRITE_STEP, str(id), orjson.dumps(document).decode())
    return str(rows[0][0]), str(rows[0][1])


def _by_index(rows: Any) -> dict[int, tuple[UUID, EnqueueOutcome]]:
    return {row[0] - 1: (row[1] if isinstance(row[1], UUID) else UUID(str(row[1])), EnqueueOutcome(row[2])) for row in rows}
