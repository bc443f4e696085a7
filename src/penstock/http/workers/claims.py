"""Claims for workers over HTTP, with long polls.

Those who wait stand in a queue by job type. The process announces once that it is idle for all of them, and listens. A
notification wakes the first of its type; who finds a job wakes the next. So a hundred waiting workers cost one look for a
job that comes, and a look at intervals for jobs whose notification was lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import OrderedDict, deque

from penstock.core.logs import get_logger
from penstock.core.polling import Polling
from penstock.errors import DatabaseUnavailable, InvalidInput, PenstockError
from penstock.jobs import queries as jobs
from penstock.jobs.claiming import WatermarkedClaims
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification, Notifications

log = get_logger("penstock.http")
_MOST_NAMES = 1_000
_ANNOUNCE_EVERY_S = 10.0
_WAITING_AT_FULL_PACE = 8


class Claims:
    """Claims jobs for workers over HTTP.

    Args:
        database: Database to claim from.
        stopping: Set when the server stops.
    """

    def __init__(self, database: Database, stopping: asyncio.Event) -> None:
        self.id = f"http.{os.getpid()}.{secrets.token_hex(4)}"
        self._database = database
        self._stopping = stopping
        self._claims: OrderedDict[str, WatermarkedClaims] = OrderedDict()
        self._waiting: dict[str, deque[Polling]] = {}
        self._announced: tuple[frozenset[str], float] = (frozenset(), 0.0)

    def subscribe(self, notifications: Notifications) -> None:
        """Be told of what this process listens to."""
        notifications.wake(self.wake_all, Kind.JOBS, Kind.CONNECTED)
        notifications.subscribe(self._full_scan, Kind.FULL_SCAN)
        notifications.subscribe(self._place_freed, Kind.PLACE)

    def _full_scan(self, notification: Notification) -> None:
        if notification.subject in self._claims:
            self._claims[notification.subject].full_scan()
        self.wake(notification.subject)

    def _place_freed(self, notification: Notification) -> None:
        # One of them has the ticket.
        for polling in self._waiting.get(notification.subject, ()):
            polling.wake()

    def wake_all(self) -> None:
        """Jobs of any type may have come: wake the first who waits for each."""
        for name in list(self._waiting):
            self.wake(name)

    def wake(self, name: str) -> None:
        """A job of the type may have come: wake the first who waits."""
        waiting = self._waiting.get(name)
        if waiting:
            waiting[0].wake()

    def stop(self) -> None:
        """End all waits."""
        for waiting in self._waiting.values():
            for polling in waiting:
                polling.wake()

    async def claim(self, worker: str, name: str, limit: int) -> list[ClaimedJob]:
        """Claim up to `limit` jobs of a type for a worker."""
        claims = self._claims.get(name)
        if claims is None:
            claims = self._claims[name] = WatermarkedClaims(self._database)
            while len(self._claims) > _MOST_NAMES:
                self._claims.popitem(last=False)
        try:
            return await claims.claim(worker, [name], limit)
        except InvalidInput:
            # One job that cannot be read makes a claim fail as a whole.
            if not await jobs.quarantine_unreadable(self._database, "", [name], list):
                raise
            return await claims.claim(worker, [name], limit)

    async def wait(self, worker: str, name: str, limit: int, within: float, gone: asyncio.Task[None]) -> list[ClaimedJob]:
        """Wait up to `within` seconds for jobs, and claim up to `limit`.

        Args:
            worker: Who claims.
            name: Job type.
            limit: Most jobs.
            within: Seconds to wait.
            gone: Done when the client no longer waits for the answer: then nothing is claimed, or it is given back.
        """
        deadline = time.monotonic() + within
        found: list[ClaimedJob] = []
        looked_for_place = False
        polling = Polling(1.0)
        waiting = self._waiting.setdefault(name, deque())
        waiting.append(polling)
        gone.add_done_callback(lambda _: polling.wake())
        try:
            while True:
                await self._announce()
                polling.begin()
                # After the announcement: a job may have come in between.
                if self._stopping.is_set() or gone.done():
                    return []
                found = await self.claim(worker, name, limit)
                if gone.done():
                    await self._give_back(found)
                    return []
                left = deadline - time.monotonic()
                if found or left <= 0:
                    return found
                wanted = await jobs.wait_for_places(self._database, worker, [name], {}, self.id)
                looked_for_place = wanted is not None and wanted.is_new and not looked_for_place
                if looked_for_place:
                    continue
                # The more wait, the less often each looks by itself.
                polling.poll_s = max(1.0, len(waiting) / _WAITING_AT_FULL_PACE)
                await polling.rest(due_in_s=None if wanted is None else wanted.due_in_s, at_most_s=left)
        finally:
            waiting.remove(polling)
            if not waiting:
                self._waiting.pop(name, None)
            elif found or gone.done():
                waiting[0].wake()

    async def _give_back(self, claimed: list[ClaimedJob]) -> None:
        if not claimed:
            return
        try:
            given = [Settlement(job.id, job.attempt, job.lease, Outcome.RELEASED) for job in claimed]
            await jobs.settle(self._database, given)
        except PenstockError as error:
            # They come back when their lease ends.
            log.warning("jobs_not_given_back", jobs=len(claimed), error=error)

    async def _announce(self) -> None:
        """Ask for notifications about all types that are waited for."""
        names = frozenset(self._waiting)
        announced, at = self._announced
        if names <= announced and time.monotonic() - at < _ANNOUNCE_EVERY_S:
            return
        try:
            await jobs.wait_for_jobs(self._database, self.id, sorted(names))
            self._announced = (names, time.monotonic())
        except DatabaseUnavailable as error:
            log.warning("wait_failed", error=error)
        except PenstockError as error:
            log.error("wait_refused", error=error)
