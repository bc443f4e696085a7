"""The audit: who changed what, logged in and out, through the dashboard and the API.

A row is written before a change, and completed with what became of it, so that a change whose process is lost is there too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import orjson

from penstock.errors import PenstockError
from penstock.postgres.database import Database


async def begin_change(database: Database, user: str, action: str, filter: Mapping[str, Any]) -> int:
    """Note who is about to change what. Returns the number of the change."""
    text = orjson.dumps(filter, default=str).decode()
    return int(await database.fetchval("select penstock.begin_change($1, $2, $3::jsonb)", user, action, text))


async def end_change(database: Database, id: int, changed: int | None = None, error: str | None = None) -> None:
    """Note what became of a change."""
    await database.fetch("select penstock.end_change($1, $2, $3)", id, changed, error)


@asynccontextmanager
async def changing(database: Database, user: str, action: str, filter: Mapping[str, Any]) -> AsyncIterator[list[int]]:
    """Around a change: notes it before, and what became of it after. Gives the list to which the numbers of changed objects go.

    Args:
        database: Database of the audit.
        user: The user.
        action: What is done.
        filter: To what: ids, names, conditions. No payload belongs here.
    """
    id = await begin_change(database, user, action, filter)
    changed: list[int] = []
    try:
        yield changed
    except PenstockError as error:
        await end_change(database, id, None, type(error).__name__ if error.foreign else error.message)
        raise
    else:
        await end_change(database, id, sum(changed) if changed else 1)
