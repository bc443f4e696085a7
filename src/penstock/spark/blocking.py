"""Calls to the database from Spark's Python processes, which have no loop: one connection, one private loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, TypeVar

from penstock.core.polling import happens
from penstock.history import queries as history
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.spark.connections import Connections
from penstock.spark.jobs.archive import EARLIEST, Archive
from penstock.spark.jobs.offsets import Position
from penstock.spark.scans import APPLICATION
from penstock.spark.streams.log import StreamLog
from penstock.spark.streams.offsets import Offsets
from penstock.streams import queries as streams

T = TypeVar("T")
_PATIENCE_S = 60.0
_ANNOUNCED_S = 20.0  # the database forgets after 30 s that a reader waits


class Blocking:
    """A database for code without a loop, and the archive in it.

    Args:
        url: Of the database.
    """

    def __init__(self, url: str) -> None:
        settings = Settings.read().model_copy(update={"pool_size": 1, "command_timeout": timedelta(minutes=5)})
        self.database = Database(url, settings, APPLICATION)
        self.archive = Archive(self.database)
        self._runner = asyncio.Runner()
        self._reader = f"spark-{secrets.token_hex(6)}"
        self._channel = f"penstock_spark_{secrets.token_hex(6)}"
        self._heard: asyncio.Event | None = None
        self._listening: asyncio.Task[None] | None = None
        self._announced_until = 0.0
        self._runner.run(self.database.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._runner.run(work)

    def keep_trying(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run what may be repeated; while the database is away (a restart, a failover) wait for it, at most a minute."""

        async def patiently() -> T:
            async with asyncio.timeout(_PATIENCE_S):
                return await self.database.retrying(work)

        try:
            return self._runner.run(patiently())
        except TimeoutError:
            # Once more, for the error that says why.
            return self._runner.run(work())

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._close())
        self._runner.close()

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    async def starting(self, where: str | datetime | Position | None) -> Position:
        """The position that an option names; a query begins at the latest one unless it says otherwise, as with Kafka."""
        if isinstance(where, Position):
            return where
        if isinstance(where, datetime):
            return await self.archive.since(where)
        return EARLIEST if where == "earliest" else await self.archive.now()

    async def next(self, start: Position, limit: int | None, until: Position | None, wait: timedelta) -> Position:
        """The end of the next batch; when nothing is there yet, waits for a notification, at most so long.

        A position that only passed transactions without jobs is not worth a batch: then it is `start` that is returned.
        """
        deadline = time.monotonic() + wait.total_seconds()
        while True:
            if await self.archive.waiting(start, until):
                return await self.archive.next(start, limit, until)
            left = deadline - time.monotonic()
            if until is not None or left <= 0:
                return start
            await self._notified(start, left)

    async def next_events(
        self, log: StreamLog, start: Offsets, limit: int | None, until: Offsets | None, wait: timedelta, least: int = 1
    ) -> Offsets:
        """The end of the next batch of streams; while fewer than `least` events exist, wait for notifications, at most `wait`."""

        async def there() -> Offsets:
            enough = least <= 1 or await log.lag(start) >= least
            return await log.next(start, limit, until) if enough else start

        deadline = time.monotonic() + wait.total_seconds()
        while True:
            # The reader listens before it reads, so that later events notify it.
            notified = self._listen(self._channel) if until is None else None
            end = await there()
            left = deadline - time.monotonic()
            if (
                notified is None
                or left <= 0
                or log.was_recreated
                or any(offset > start.get(place, 0) for place, offset in end.items())
            ):
                return end
            if (now := time.monotonic()) > self._announced_until:
                # One statement registers this reader for all streams; then it reads once more, for events that came in between.
                await streams.wait_for_events_of(self.database, [name for name, _ in log.seen], self._channel)
                self._announced_until = now + _ANNOUNCED_S
            elif not await happens(notified, min(left, self._announced_until - now)) and time.monotonic() >= deadline:
                return end

    async def events_found(self) -> None:
        """Remove the registration of this reader: appends would notify it needlessly while it has a batch to read."""
        if self._announced_until > 0:
            self._announced_until = 0.0
            await streams.stop_waiting(self.database, self._channel)

    async def _notified(self, start: Position, within: float) -> None:
        notified = self._listen(history.CHANNEL)
        await history.wait(self.database, self._reader, True)
        try:
            # The reader checks once more, since jobs may have been archived in between.
            if not await self.archive.waiting(start):
                await happens(notified, within)
        finally:
            await history.wait(self.database, self._reader, False)

    def _listen(self, channel: str) -> asyncio.Event:
        """Listen from now on; the event is set at the next notification."""
        if self._listening is None:
            self._heard = asyncio.Event()
            self._listening = asyncio.create_task(Listener(self.database, [channel], lambda _: self._wake()).run())
        assert self._heard is not None  # noqa: S101
        self._heard.clear()
        return self._heard

    def _wake(self) -> None:
        if self._heard is not None:
            self._heard.set()

    async def _close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._listening = None
        await self.database.close()


def _close(blocking: Blocking) -> None:
    blocking.close()


KEPT = Connections(Blocking, lambda _: True, _close)
"""Databases that Spark's Python processes keep from one task to the next; they mend their connections themselves."""
