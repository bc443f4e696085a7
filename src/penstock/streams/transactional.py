"""Appends and commits of offsets in the caller's transaction: they take effect when it commits."""

from __future__ import annotations

from typing import Any

from penstock.core.transactional import fetch, fetch_document, in_callers_task, is_asyncpg
from penstock.streams import queries
from penstock.streams.models import Appended, Columns

_APPEND = "select * from penstock.append_each_json({0}, cast({1} as jsonb))"
_COMMIT = "select penstock.commit_json({0}, cast({1} as jsonb))"


@in_callers_task
async def append_through(connection: Any, name: str, columns: Columns) -> Appended:
    """Append events through a connection or session of asyncpg, psycopg, SQLAlchemy or Django.

    The database routes their keys, because a stream that has grown would otherwise make the caller's transaction fail.
    """
    if is_asyncpg(connection):
        return _appended(await fetch(connection, *queries.append_each_call(name, columns)))
    return _appended(await fetch_document(connection, _APPEND, name, queries.as_json(columns)))


@in_callers_task
async def commit_through(connection: Any, name: str, document: str) -> None:
    """Commit an offset (`group_queries.commit_as_json`) through the caller's connection. Raises `Conflict` when it is refused."""
    await fetch_document(connection, _COMMIT, name, document)


def _appended(rows: Any) -> Appended:
    return Appended([row[0] for row in rows], [row[1] for row in rows])
