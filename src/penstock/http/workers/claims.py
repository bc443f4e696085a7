"""Claims for workers over HTTP, with long polls.

Each request that waits has a fetcher, and stands in a queue by job type. The process announces once that it is idle for all of
them, and listens. A notification wakes the first of its type; who finds a job wakes the next. So a hundred waiting workers cost
one look for a job that comes, and a look at intervals for jobs whose notification was lost.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from penstock.core.logs import get_logger
from penstock.core.polling import Polling
from penstock.errors import InvalidInput, PenstockError
from penstock.jobs import claim_queries, worker_queries
from penstock.jobs.claiming import WatermarkedClaims, quarantine_unreadable
from penstock.jobs.fetcher import Fetcher, Look
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification, Notifications

log = get_logger("penstock.http")
_MOST_NAMES = 1_000
_ANNOUNCE_EVERY_S = 10.0
_POLL_S = 1.0
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
        self._waiting: dict[str, deque[LongPoll]] = {}
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
        for poll in self._waiting.get(notification.subject, ()):
            poll.fetcher.wake()

    def wake_all(self) -> None:
        """Jobs of any type may have come: wake the first who waits for each."""
        for name in list(self._waiting):
            self.wake(name)

    def wake(self, name: str) -> None:
        """A job of the type may have come: wake the first who waits."""
        waiting = self._waiting.get(name)
        if waiting:
            waiting[0].fetcher.wake()

    def stop(self) -> None:
        """End all waits."""
        for waiting in self._waiting.values():
            for poll in waiting:
                poll.end()

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
            if not await quarantine_unreadable(self._database, "", [name], list):
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
        waiting = self._waiting.setdefault(name, deque())
        poll = LongPoll(self, worker, name, limit, waiting)
        waiting.append(poll)
        gone.add_done_callback(lambda _: poll.end())
        if self._stopping.is_set():
            poll.end()
        fetching = asyncio.create_task(poll.fetcher.run(), name=f"penstock-long-poll-{name}")
        try:
            await asyncio.wait([poll.answer, fetching], timeout=within, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                fetching.result()  # it ends by itself only with an error
        finally:
            # A claim that is under way ends first.
            await poll.fetcher.stop(fetching)
            waiting.remove(poll)
            if not waiting:
                self._waiting.pop(name, None)
            elif poll.found or gone.done():
                self.wake(name)
            if gone.done():
                await self._give_back(poll.found)
        if poll.answer.done():
            poll.answer.result()
        return [] if gone.done() else poll.found

    async def _give_back(self, claimed: list[ClaimedJob]) -> None:
        if not claimed:
            return
        try:
            given = [Settlement(job.id, job.attempt, job.lease, Outcome.RELEASED) for job in claimed]
            await claim_queries.settle(self._database, given)
        except PenstockError as error:
            # They come back when their lease ends.
            log.warning("jobs_not_given_back", jobs=len(claimed), error=error)

    async def announce(self) -> None:
        """Ask for notifications about all types that are waited for."""
        names = frozenset(self._waiting)
        announced, at = self._announced
        if not names <= announced or time.monotonic() - at >= _ANNOUNCE_EVERY_S:
            await worker_queries.wait_for_jobs(self._database, self.id, sorted(names))
            self._announced = (names, time.monotonic())

    async def places(self, worker: str, name: str) -> claim_queries.PlacesWanted | None:
        """Register a worker for a place of a type; this process is told when there is one."""
        return await claim_queries.wait_for_places(self._database, worker, [name], {}, self.id)


class LongPoll:
    """A request that waits for jobs of one type. A `Source`.

    Args:
        claims: Claims for the request.
        worker: Who claims.
        name: Job type.
        limit: Most jobs.
        waiting: All requests that wait for this type.

    Attributes:
        found: The claimed jobs.
        answer: Done when the wait is over; it has the error when a claim was refused.
    """

    def __init__(self, claims: Claims, worker: str, name: str, limit: int, waiting: Sequence[LongPoll]) -> None:
        self.found: list[ClaimedJob] = []
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fetcher: Fetcher[LongPoll] = Fetcher(self, Polling(_POLL_S, announce_every_s=_ANNOUNCE_EVERY_S), asyncio.Lock())
        self._claims = claims
        self._worker = worker
        self._name = name
        self._limit = limit
        self._waiting = waiting

    def end(self) -> None:
        """End the wait."""
        if not self.answer.done():
            self.answer.set_result(None)

    def blocked_s(self) -> float | None:
        """See `Source`."""
        return None

    async def look(self) -> Look:
        """See `Source`."""
        if self.answer.done():
            return Look(full=True)
        self.found = await self._claims.claim(self._worker, self._name, self._limit)
        if self.found:
            self.end()
            return Look(len(self.found))
        # The more wait, the less often each looks by itself.
        self.fetcher.polling.poll_s = max(_POLL_S, len(self._waiting) / _WAITING_AT_FULL_PACE)
        wanted = await self._claims.places(self._worker, self._name)
        return Look(wanted=wanted, due_in_s=None if wanted is None else wanted.due_in_s)

    async def announce(self) -> None:
        """See `Source`."""
        await self._claims.announce()

    async def recover(self, error: PenstockError) -> None:
        """See `Source`: the client gets the error, and claims again."""
        if not self.answer.done():
            self.answer.set_exception(error)
