"""A database that is only read, by statements that take a bounded time: what a dashboard looks through.

Both bounds hold in the transaction of each statement, since a pooler gives each transaction another connection, and refuses
settings at the start of a connection.

What the statements cost the database is counted, for whom it may be too much: see `spending`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from penstock.postgres.database import Database
from penstock.postgres.translation import StatementCancelled
from penstock.settings import Settings

# To ask what a statement has read takes most of a millisecond, so it is asked for those only that took longer than this.
_DEAR_S = 0.005
# What it takes to run a statement that reads nothing, to look at a page, and to read a row or index entry of it: more than most
# statements need, less than some need that look into payloads.
_STATEMENT_S = 0.001
_PAGE_S = 8e-6
_ENTRY_S = 2e-6


@dataclass(slots=True)
class Spent:
    """What statements cost the database.

    Attributes:
        statements: How many there were.
        cost_s: Seconds of a processor: as long as they took, but no longer than what they have read can take, so that the time
            for which they waited, for a processor, a disk or a lock, is not counted.
    """

    statements: int = 0
    cost_s: float = 0.0


_spent: ContextVar[Spent | None] = ContextVar("penstock_spent", default=None)


@contextmanager
def spending() -> Iterator[Spent]:
    """Count what the statements of this task cost in the block."""
    spent = Spent()
    token = _spent.set(spent)
    try:
        yield spent
    finally:
        _spent.reset(token)


class ReadOnlyDatabase(Database):
    """A pool of connections whose statements cannot write, and end after `time_limit_s`.

    Args:
        url: URL or DSN of libpq.
        settings: Settings of the pool.
        application: Name of the connections in `pg_stat_activity`.
    """

    time_limit_s = 2.0

    def __init__(self, url: str, settings: Settings, application: str = "penstock") -> None:
        super().__init__(url, settings, application)
        self._limit = f"set local statement_timeout = {math.ceil(self.time_limit_s * 1000)}"

    async def fetch(self, query: str, *args: Any, retry: bool = False, timeout: float | None = None) -> list[Any]:
        """See `Database.fetch`, without repetitions. Raises `StatementCancelled` for a statement that takes too long."""
        began = math.inf
        try:
            async with self._translating(), self._acquire() as connection, self._begun(connection, self._limit, read_only=True):
                began = time.monotonic()
                rows = list(await connection.fetch(query, *args, timeout=timeout))
                await _count(connection, time.monotonic() - began)
                return rows
        except StatementCancelled as error:
            if time.monotonic() - began < self.time_limit_s:
                raise
            raise self._took_too_long() from error.__cause__

    def _took_too_long(self) -> StatementCancelled:
        if (spent := _spent.get()) is not None:
            spent.statements += 1
            spent.cost_s += self.time_limit_s
        return StatementCancelled(
            f"a statement was cancelled after {self.time_limit_s:g} s, the longest that one may take here",
            hint="Try again, or ask for less: one job type, a shorter time. The database answers, but is slow.",
        )


async def _count(connection: Any, took_s: float) -> None:
    """Add what a statement cost, at the end of its transaction."""
    spent = _spent.get()
    if spent is None:
        return
    cost_s = took_s
    if took_s > _DEAR_S:
        [work] = await connection.fetch("select blocks, entries, pg_stat_force_next_flush() from penstock.work_of_transaction()")
        # A server that counts nothing (track_counts = off) says nothing of the cost.
        if work["blocks"] or work["entries"]:
            cost_s = min(took_s, _STATEMENT_S + _PAGE_S * work["blocks"] + _ENTRY_S * work["entries"])
    spent.statements += 1
    spent.cost_s += cost_s
