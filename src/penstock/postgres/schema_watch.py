"""Watches whether the schema stays one that this version can use: a migration may leave running processes behind."""

from __future__ import annotations

import asyncio

from penstock.errors import PenstockError, SchemaMismatch
from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.waiting import happens

_LOOK_S = 60.0
_MOST_MISSING = 5


async def left_behind(database: Database) -> SchemaMismatch:
    """Wait until the schema is one that this version cannot use. Returns what is wrong with it.

    It is looked at when a migration says that it was there, once a minute, and after each call that found something missing.
    """
    unanswered = 0
    while True:
        await happens(database.schema_changed, _LOOK_S)
        database.schema_changed.clear()
        error, database.mismatch = database.mismatch, None
        try:
            await migrate.check(database)
        except SchemaMismatch as found:
            return found
        except PenstockError:
            # Away; whoever works says so.
            continue
        # It fits by its numbers. A function that is missing all the same, again and again, does not come back.
        unanswered = 0 if error is None or not _lacks_function(error) else unanswered + 1
        if error is not None and unanswered >= _MOST_MISSING:
            return error
        await asyncio.sleep(1.0)


def _lacks_function(error: SchemaMismatch) -> bool:
    return getattr(error.__cause__, "sqlstate", None) in ("42883", "42703")
