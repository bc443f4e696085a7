"""A database that is only read, by statements that take a bounded time: what a dashboard looks through.

Both bounds hold in the transaction of each statement, since a pooler gives each transaction another connection, and refuses
settings at the start of a connection.
"""

from __future__ import annotations

import math
import time
from typing import Any

from penstock.core.spending import spent_here
from penstock.postgres.counting import counted
from penstock.postgres.database import Database
from penstock.postgres.translation import StatementCancelled
from penstock.settings import Settings


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
                return await counted(connection, query, *args, timeout=timeout)
        except StatementCancelled as error:
            if time.monotonic() - began < self.time_limit_s:
                raise
            raise self._took_too_long() from error.__cause__

    def _took_too_long(self) -> StatementCancelled:
        if (spent := spent_here()) is not None:
            spent.add(self.time_limit_s)
        return StatementCancelled(
            f"a statement was cancelled after {self.time_limit_s:g} s, the longest that one may take here",
            hint="Try again, or ask for less: one job type, a shorter time. The database answers, but is slow.",
        )
