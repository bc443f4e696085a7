"""What a statement costs the database: by the pages, rows and index entries that its transaction has looked at."""

from __future__ import annotations

import time
from typing import Any

from penstock.core.spending import spent_here

# To ask what a statement has read takes most of a millisecond, so it is asked for those only that took longer than this.
_DEAR_S = 0.005
# What it takes to run a statement that reads nothing, to look at a page, and to read a row or index entry of it: more than most
# statements need, less than some need that look into payloads.
_STATEMENT_S = 0.001
_PAGE_S = 8e-6
_ENTRY_S = 2e-6


async def counted(connection: Any, query: str, *args: Any, timeout: float | None) -> list[Any]:
    """The rows of a statement, whose cost is counted where `spending` asks for it.

    Args:
        connection: Connection within a transaction, since what was read is known until its end.
        query: SQL.
        args: Values of the parameters.
        timeout: Time limit in seconds; None: that of the connection.
    """
    spent, began = spent_here(), time.monotonic()
    rows = list(await connection.fetch(query, *args, timeout=timeout))
    if spent is not None:
        spent.add(await _cost_s(connection, time.monotonic() - began))
    return rows


async def _cost_s(connection: Any, took_s: float) -> float:
    if took_s <= _DEAR_S:
        return took_s
    [work] = await connection.fetch("select blocks, entries, pg_stat_force_next_flush() from penstock.work_of_transaction()")
    # A server that counts nothing (track_counts = off) says nothing of the cost.
    if not (work["blocks"] or work["entries"]):
        return took_s
    return float(min(took_s, _STATEMENT_S + _PAGE_S * work["blocks"] + _ENTRY_S * work["entries"]))
