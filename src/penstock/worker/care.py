"""Care: what every worker does for the whole queue, so that nothing else has to be run or scheduled.

Each worker does it often when there are few of them and seldom when there are many, so that the database sees about the
same number of these calls whatever the size of the fleet.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary

from penstock.errors import PenstockError
from penstock.logs import get_logger
from penstock.postgres import jobs, streams, topics
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.waiting import happens

log = get_logger("penstock.care")
_WORKERS_AT_FULL_PACE = 4
_PRUNE_EVERY_S = 600.0
_TEND_EVERY_S = 5.0


class Care:
    """Promotes due jobs, recovers lost ones, ends subscriptions, expires and prunes.

    Args:
        database: Where.
        settings: Intervals, and how long the archive is kept.
        wake: Called when jobs became ready.
    """

    def __init__(self, database: Database, settings: Settings, wake: Callable[[], None]) -> None:
        self.workers = 1
        self._database = database
        self._settings = settings
        self._wake = wake
        self._look = asyncio.Event()
        self._more_messages = False

    def look(self) -> None:
        """A job may be due sooner than was known."""
        self._look.set()

    async def run_promotion(self) -> None:
        """Put due jobs into the ready line, until cancelled."""
        while True:
            self._look.clear()
            started = time.monotonic()
            due_in: float | None = None
            try:
                promoted, due_in = await jobs.due_in(self._database)
                if promoted:
                    self._wake()
            except PenstockError as error:
                log.warning("promotion_failed", error=error)
            took = time.monotonic() - started
            longest = self._settings.care_interval.total_seconds()
            wait = longest if due_in is None else min(max(due_in, 0.0), longest)
            # Never more than a tenth of the time, and shared among the workers.
            await asyncio.sleep(min(max(0.01, took * 10), 5.0) * self._share())
            await happens(self._look, max(wait - took, 0.0) * random.uniform(0.95, 1.0))

    async def run_recovery(self) -> None:
        """Take back the jobs of dead workers and ended leases, expire and prune, until cancelled."""
        pruned_at = tended_at = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.care_interval.total_seconds() * self._share() * random.uniform(0.7, 1.3))
            await self._try(self._recover())
            await self._try(self._expire())
            if (
                time.monotonic() - tended_at
                > min(_TEND_EVERY_S, self._settings.care_interval.total_seconds() * 5) * self._share()
            ):
                tended_at = time.monotonic()
                await self._try(self._tend())
            keep = self._settings.archive_retention
            if keep is not None and time.monotonic() - pruned_at > _PRUNE_EVERY_S * self._share():
                pruned_at = time.monotonic()
                self._more_messages = True
                await self._try(self._prune(keep))
            if keep is not None and self._more_messages:
                # A batch in each turn, so that recovery does not wait.
                self._more_messages = False
                await self._try(self._prune_messages(keep))

    async def run_streams(self) -> None:
        """Begin new segments of streams, apply retention and compaction, until cancelled."""
        while True:
            pause = min(_TEND_EVERY_S, self._settings.care_interval.total_seconds() * 5)
            await asyncio.sleep(pause * self._share() * random.uniform(0.7, 1.3))
            await self._try(self.tend_streams())

    async def tend_streams(self) -> None:
        """Do it once; what cannot be done for one stream is no matter to the others."""
        for stream in await streams.to_tend(self._database):
            await self._try(self._tend_stream(stream))
        await streams.drop_retired(self._database)

    async def _tend_stream(self, stream: str) -> None:
        rolled, retired, compacted = await streams.tend(self._database, stream)
        if rolled or retired or compacted:
            log.info("stream_tended", stream=stream, rolled=rolled, retired=retired, compacted=compacted)

    async def _recover(self) -> None:
        if recovered := await jobs.recover(self._database):
            log.warning("jobs_recovered", jobs=recovered)
            self._wake()

    async def _expire(self) -> None:
        while await jobs.expire(self._database) == 1000:
            await asyncio.sleep(0)

    async def _prune(self, keep: timedelta) -> None:
        for partition, count in (await jobs.prune(self._database, keep)).items():
            log.info("archive_pruned", partition=partition, jobs=count)

    async def _prune_messages(self, keep: timedelta) -> None:
        if messages := await topics.prune_messages(self._database, keep):
            self._more_messages = True
            log.info("messages_pruned", messages=messages)

    async def _tend(self) -> None:
        ended, removed = await topics.tend(self._database)
        if ended or removed:
            log.info("subscriptions_ended", ended=ended, queues_removed=removed)

    async def _try(self, call: Awaitable[None]) -> None:
        try:
            await call
        except PenstockError as error:
            log.warning("care_failed", error=error)

    def _share(self) -> float:
        return max(1.0, self.workers / _WORKERS_AT_FULL_PACE)


class SharedCare:
    """The care that all pull workers on one database in this process take together, however many they are."""

    _of: ClassVar[WeakKeyDictionary[Database, SharedCare]] = WeakKeyDictionary()

    def __init__(self, database: Database, settings: Settings) -> None:
        self._care = Care(database, settings, self._wake)
        self._members: dict[Callable[[], None], Callable[[], int]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def of(cls, database: Database, settings: Settings) -> SharedCare:
        """The one of a database, which has the settings of its first."""
        if (found := cls._of.get(database)) is None:
            found = cls._of[database] = cls(database, settings)
        return found

    def join(self, wake: Callable[[], None], workers: Callable[[], int]) -> None:
        """Take part: `wake` is called when jobs became ready; `workers` says how many there are that take care."""
        self._members[wake] = workers
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._care.run_promotion(), name="penstock-promotion"),
                asyncio.create_task(self._care.run_recovery(), name="penstock-recovery"),
            ]

    async def leave(self, wake: Callable[[], None]) -> None:
        """Take part no longer. The last one ends it."""
        self._members.pop(wake, None)
        if not self._members:
            tasks, self._tasks = self._tasks, []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """A job may be due sooner than was known."""
        self._care.workers = max((workers() for workers in self._members.values()), default=1)
        self._care.look()

    def _wake(self) -> None:
        self._care.workers = max((workers() for workers in self._members.values()), default=1)
        for wake in list(self._members):
            wake()
