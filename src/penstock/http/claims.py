"""Claims for workers over HTTP, with long polls.

Whoever waits stands in a line by job type. The process says once that it is idle for all of them, and listens. A
notification wakes the first in the line; who finds a job wakes the next. So a hundred waiting workers cost one look for a
job that comes, and a look now and then for what notifications miss.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections import OrderedDict, deque

from penstock.errors import DatabaseUnavailable, InvalidInput, PenstockError
from penstock.job import ClaimedJob, Outcome, Settlement
from penstock.logs import get_logger
from penstock.postgres import jobs
from penstock.postgres.database import Database
from penstock.waiting import happens
from penstock.worker.marks import Marks

log = get_logger("penstock.http")
_MOST_NAMES = 1_000
_REPEAT_S = 10.0
_SHORTEST_WAIT_S = 0.002


class Claims:
    """Claims jobs for workers over HTTP.

    Args:
        database: Where.
        stopping: Set when the server stops.
    """

    def __init__(self, database: Database, stopping: asyncio.Event) -> None:
        self.id = f"http.{os.getpid()}.{secrets.token_hex(4)}"
        self._database = database
        self._stopping = stopping
        self._marks: OrderedDict[str, Marks] = OrderedDict()
        self._lines: dict[str, deque[asyncio.Event]] = {}
        self._said: tuple[frozenset[str], float] = (frozenset(), 0.0)

    def heard(self, payload: str) -> None:
        """A notification came."""
        word, _, rest = payload.partition(" ")
        if word == "sweep" and rest in self._marks:
            self._marks[rest].sweep()
        if word == "place":
            # One of them has the ticket.
            for event in self._lines.get(rest, ()):
                event.set()
            return
        for name in list(self._lines):
            self.wake(name)

    def wake(self, name: str) -> None:
        """A job of the type may have come: wake the first who waits."""
        line = self._lines.get(name)
        if line:
            line[0].set()

    def stop(self) -> None:
        """End all waits."""
        for line in self._lines.values():
            for event in line:
                event.set()

    async def claim(self, worker: str, name: str, limit: int) -> list[ClaimedJob]:
        """Claim up to `limit` jobs of a type for a worker."""
        marks = self._marks.get(name)
        if marks is None:
            marks = self._marks[name] = Marks()
            while len(self._marks) > _MOST_NAMES:
                self._marks.popitem(last=False)
        now = time.monotonic()
        given = marks.for_claim(now)
        try:
            claim = await jobs.claim(self._database, worker, [name], limit, given)
        except InvalidInput:
            # One job that cannot be read makes a claim fail as a whole.
            if not await jobs.quarantine_unreadable(self._database, "", [name], list):
                raise
            claim = await jobs.claim(self._database, worker, [name], limit, given)
        if claim.jobs:
            marks.claimed(claim.jobs, claim.horizon, claim.ceiling, now)
        if not given:
            took = time.monotonic() - now
            marks.swept(time.monotonic(), took if len(claim.jobs) < limit else 0.0)
        return claim.jobs

    async def wait(self, worker: str, name: str, limit: int, within: float, gone: asyncio.Task[None]) -> list[ClaimedJob]:
        """Wait up to `within` seconds for jobs, and claim up to `limit`.

        Args:
            worker: Who claims.
            name: Job type.
            limit: Most jobs.
            within: Seconds to wait.
            gone: Done when nobody waits for the answer any more: then nothing is claimed, or it is given back.
        """
        deadline = time.monotonic() + within
        found: list[ClaimedJob] = []
        looked_again = False
        event = asyncio.Event()
        line = self._lines.setdefault(name, deque())
        line.append(event)
        gone.add_done_callback(lambda _: event.set())
        try:
            while True:
                await self._say_idle()
                event.clear()
                # Once more after the word: a job may have come in between.
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
                if wanted is not None and wanted.is_new and not looked_again:
                    looked_again = True
                    continue
                looked_again = False
                # The more wait, the less often each looks by itself.
                pause = max(1.0, len(line) / 8) * random.uniform(0.7, 1.0)
                if wanted is not None and wanted.due_in_s is not None:
                    pause = min(pause, max(wanted.due_in_s, _SHORTEST_WAIT_S))
                await happens(event, min(left, pause))
        finally:
            line.remove(event)
            if not line:
                self._lines.pop(name, None)
            elif found or gone.done():
                line[0].set()

    async def _give_back(self, claimed: list[ClaimedJob]) -> None:
        if not claimed:
            return
        try:
            given = [Settlement(job.id, job.attempts, job.lease, Outcome.RELEASED) for job in claimed]
            await jobs.settle(self._database, given)
        except PenstockError as error:
            # They come back when their lease ends.
            log.warning("jobs_not_given_back", jobs=len(claimed), error=error)

    async def _say_idle(self) -> None:
        """Ask for notifications about all types that somebody waits for."""
        names = frozenset(self._lines)
        said, at = self._said
        if names <= said and time.monotonic() - at < _REPEAT_S:
            return
        try:
            await jobs.wait_for_jobs(self._database, self.id, sorted(names))
            self._said = (names, time.monotonic())
        except DatabaseUnavailable as error:
            log.warning("wait_failed", error=error)
        except PenstockError as error:
            log.error("wait_refused", error=error)
