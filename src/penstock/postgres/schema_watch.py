"""Watches whether this version can still use the schema, since a migration may leave running processes behind."""

from __future__ import annotations

import asyncio

from penstock.core.polling import wait_for_event
from penstock.errors import PenstockError, SchemaMismatch
from penstock.postgres import migrate
from penstock.postgres.database import Database

_LOOK_S = 60.0
_MOST_MISSING = 5


async def left_behind(database: Database) -> SchemaMismatch:
    """Wait until this version cannot use the schema any more. Returns the error.

    The schema is checked after the notification of a migration, once a minute, and after each call that misses an object.
    """
    unanswered = 0
    while True:
        await wait_for_event(database.schema_changed, _LOOK_S)
        database.schema_changed.clear()
        error, database.mismatch = database.mismatch, None
        try:
            await migrate.check(database)
        except SchemaMismatch as found:
            return found
        except PenstockError:
            # The database is unavailable; the worker's own calls report it.
            continue
        # The version number matches. A function that is still missing after several calls will not appear any more.
        unanswered = 0 if error is None or not _lacks_function(error) else unanswered + 1
        if error is not None and unanswered >= _MOST_MISSING:
            return error
        await asyncio.sleep(1.0)


def _lacks_function(error: SchemaMismatch) -> bool:
    return getattr(error.__cause__, "sqlstate", None) in ("42883", "42703")
