"""Transactional enqueue: jobs that exist when the caller's transaction commits."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from penstock.core.transactional import fetch, fetch_document, in_callers_task, is_asyncpg
from penstock.jobs import queries
from penstock.jobs.models import Admission

_ENQUEUE = "select ordinal, id, outcome from penstock.enqueue_json({0}, cast({1} as jsonb)) where outcome <> 'queued'"


@in_callers_task
async def enqueue_through(connection: Any, batch: queries.Batch) -> dict[int, tuple[UUID, Admission]]:
    """Enqueue a batch through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    Raises:
        InvalidInput: A job is not valid, or the connection is of no supported kind.
    """
    if is_asyncpg(connection):
        return queries.exceptions_by_place(await fetch(connection, *queries.enqueue_call(batch)))
    return _by_place(await fetch_document(connection, _ENQUEUE, batch.name, queries.as_json(batch)))


def _by_place(rows: Any) -> dict[int, tuple[UUID, Admission]]:
    return {row[0] - 1: (row[1] if isinstance(row[1], UUID) else UUID(str(row[1])), Admission(row[2])) for row in rows}
