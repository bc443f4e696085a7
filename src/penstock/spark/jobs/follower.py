"""Waits for finished jobs. It lives in the process of a streaming query, over a connection that stays with the query."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from penstock.core.polling import wait_for_event
from penstock.history import queries as history
from penstock.spark.blocking import Blocking
from penstock.spark.jobs.archive import Archive
from penstock.spark.jobs.offsets import Position


class ArchiveFollower:
    """The archive for one streaming reader, with the reader's registration for notifications.

    Args:
        database: A database that the reader keeps.
    """

    def __init__(self, database: Blocking) -> None:
        self.archive = Archive(database.database)
        self._database = database
        self._reader = f"spark-{secrets.token_hex(6)}"

    async def next(self, start: Position, limit: int | None, until: Position | None, wait: timedelta) -> Position:
        """The end of the next batch. While no job is there, it waits for a notification, for at most `wait`.

        Returns `start` when no job came. A position that only passes transactions without jobs is not worth a batch.
        """
        deadline = time.monotonic() + wait.total_seconds()
        while True:
            if await self.archive.waiting(start, until):
                return await self.archive.next(start, limit, until)
            left = deadline - time.monotonic()
            if until is not None or left <= 0:
                return start
            await self._wait(start, left)

    async def _wait(self, start: Position, within: float) -> None:
        notified = self._database.listen(history.CHANNEL)
        await history.wait(self._database.database, self._reader, True)
        try:
            # The reader checks once more, since jobs may have been archived before it was registered.
            if not await self.archive.waiting(start):
                await wait_for_event(notified, within)
        finally:
            await history.wait(self._database.database, self._reader, False)
