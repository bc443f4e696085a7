"""What other sessions of the server do at this moment."""

from __future__ import annotations

from typing import Any

import asyncpg


async def seen_now(sql: asyncpg.Connection[Any], query: str, *args: Any) -> Any:
    """The value of a query of `pg_stat_activity` and other statistics, as they are now.

    Without this, a transaction sees them for its whole time as it saw them first.
    """
    await sql.execute("select pg_stat_clear_snapshot()")
    return await sql.fetchval(query, *args)
