"""The claimer: one loop that keeps the runner supplied, and sleeps when there is nothing to do.

Under load it claims in batches and nobody notifies anybody. When nothing came for 20 ms it says that it is idle, looks once
more, and waits for a notification, with a poll now and then for what notifications miss.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping

from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.handler import Group
from penstock.job import ClaimedJob
from penstock.logs import get_logger
from penstock.postgres import jobs
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.waiting import happens
from penstock.worker.marks import Marks
from penstock.worker.runner import Runner
from penstock.worker.types import WorkedType

log = get_logger("penstock.worker")
_QUIET_S = 0.02
Admit = Callable[[list[str], int], tuple[list[str], int]]
_LONGEST_WAIT_S = 30.0
_SHORTEST_WAIT_S = 0.002
_PLACES_EVERY_S = 0.02


class Claimer:
    """Claims jobs for one process.

    Args:
        database: Where.
        types: The job types to claim.
        settings: Batch size and poll interval.
        runner: Takes the jobs.
        unsettled: Leases of jobs that are done and not settled yet.
        admit: Which of the job types may be claimed now, and at most how many jobs.
        may_claim: Whether nobody can have taken this worker for dead.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        runner: Runner,
        unsettled: Callable[[], set[int]],
        admit: Admit = lambda names, limit: (names, limit),
        may_claim: Callable[[], bool] = lambda: True,
    ) -> None:
        self._admit = admit
        self.worker = ""
        self._may_claim = may_claim
        self.progressed_at = time.monotonic()
        self._database = database
        self._settings = settings
        self._runner = runner
        self._unsettled = unsettled
        self._names: dict[Group, list[str]] = {}
        self._types: Mapping[str, WorkedType] = {}
        self._marks = Marks()
        self._places_at = 0.0
        self._waits_for_places = False
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._claiming = asyncio.Lock()
        self.work_on(types)

    def work_on(self, types: Mapping[str, WorkedType]) -> None:
        """Claim these types from now on."""
        names: dict[Group, list[str]] = {}
        for worked in types.values():
            names.setdefault(worked.group, []).append(worked.name)
        self._names = names
        self._types = types
        self._awake.set()
        self._room.set()

    def wake(self) -> None:
        """A job may have come."""
        self._awake.set()

    def room_made(self) -> None:
        """A handler is done."""
        self._room.set()

    def places_freed(self) -> None:
        """Results are in the database: a limited type may have a place again."""
        if self._waits_for_places:
            self._awake.set()

    def sweep(self) -> None:
        """A job came back to its old place in the line."""
        self._marks.sweep()
        self._awake.set()

    @property
    def empty(self) -> bool:
        """Whether nothing is in hand."""
        return self._runner.in_flight == 0

    def types_apart(self) -> list[str]:
        """See `Fetches`."""
        return [name for names in self._names.values() for name in names]

    async def claim_alone(self) -> ClaimedJob | None:
        """Claim one job that waits to run alone, and start it."""
        now = time.monotonic()
        try:
            found = await jobs.claim_alone(self._database, self.worker, self.types_apart())
        except PenstockError:
            await self._recover_claim()
            raise
        if found is None:
            return None
        self._runner.submit([found[0]], now)
        return found[0]

    @property
    def paused(self) -> asyncio.Lock:
        """While this is held no claim is under way: `worker` can change."""
        return self._claiming

    def known_leases(self) -> list[int]:
        """Leases of jobs in hand, and of those that are done and not settled yet."""
        return [*self._runner.leases, *self._unsettled()]

    async def run(self) -> None:
        """Claim until cancelled."""
        last_found = time.monotonic()
        idle = looked_again = False
        while True:
            self.progressed_at = time.monotonic()
            self._awake.clear()
            self._room.clear()
            try:
                if not self._may_claim():
                    # The next heartbeat that is answered tells what is still its own.
                    await happens(self._awake, 0.1)
                    continue
                async with self._claiming:
                    asked, found = await self._claim()
                    wanted = await self._wait_for_places(found) if found < asked else None
                self._waits_for_places = wanted is not None
                if asked == 0:
                    # Every place is taken. The time-out shows that this loop is alive.
                    await happens(self._room, 1.0)
                elif found:
                    last_found, idle, looked_again = time.monotonic(), False, False
                elif wanted is not None and wanted.is_new and not looked_again:
                    looked_again = True
                elif wanted is not None and (idle or len(wanted.names) == len(self._types)):
                    # The next place comes at a known time, or is announced.
                    looked_again = False
                    pause = self._pause()
                    if wanted.due_in_s is not None and wanted.due_in_s < pause:
                        await happens(self._awake, max(wanted.due_in_s, _SHORTEST_WAIT_S))
                    elif not await happens(self._awake, pause):
                        idle = False
                elif not idle and wanted is None and time.monotonic() - last_found < _QUIET_S:
                    await happens(self._awake, 0.002 + (time.monotonic() - last_found) / 8)
                elif not idle:
                    await jobs.wait_for_jobs(self._database, self.worker, [n for names in self._names.values() for n in names])
                    idle = True
                elif not await happens(self._awake, self._pause()):
                    # Idle still: say so again, since the word is only good for a while.
                    idle = False
            except DatabaseUnavailable as error:
                idle = False
                log.warning("claim_failed", error=error)
                await self._recover_claim()
            except PenstockError as error:
                idle = False
                log.error("claim_refused", error=error)
                # The refusal may be of the answer: jobs that it claimed are not to stay behind.
                if not await self._quarantine():
                    await asyncio.sleep(self._pause())
                await self._recover_claim()

    async def _wait_for_places(self, found: int) -> jobs.PlacesWanted | None:
        limited = [worked.name for worked in self._types.values() if worked.limited]
        # While other types keep it busy it says so only now and then.
        if not limited or (found and time.monotonic() < self._places_at):
            return None
        self._places_at = time.monotonic() + _PLACES_EVERY_S
        return await jobs.wait_for_places(self._database, self.worker, limited, self._marks.for_claim(time.monotonic()))

    async def _claim(self) -> tuple[int, int]:
        asked = found = 0
        for group, names in list(self._names.items()):
            limit = min(self._runner.room(group), self._settings.claim_limit)
            if limit <= 0:
                continue
            # Each type in turn comes first, so that a busy one does not keep the others waiting.
            names.append(names.pop(0))
            admitted, limit = self._admit(names, limit)
            if not admitted:
                continue
            now = time.monotonic()
            marks = self._marks.for_claim(now)
            asked += limit
            claim = await jobs.claim(self._database, self.worker, admitted, limit, marks)
            if claim.jobs:
                self._marks.claimed(claim.jobs, claim.horizon, claim.ceiling, now)
                self._runner.submit(claim.jobs, now)
                found += len(claim.jobs)
            if not marks and len(claim.jobs) < limit:
                self._marks.swept(time.monotonic(), time.monotonic() - now)
            elif not marks:
                self._marks.swept(now, 0.0)
        return asked, found

    def _pause(self) -> float:
        return min(self._settings.poll_interval.total_seconds(), _LONGEST_WAIT_S) * random.uniform(0.7, 1.0)

    async def _quarantine(self) -> int:
        """One job that cannot be read may be what a claim failed for: put such jobs aside. Returns how many there were."""
        names = [name for names in self._names.values() for name in names]
        try:
            done = await jobs.quarantine_unreadable(self._database, self.worker, names, self.known_leases)
        except PenstockError as error:
            log.warning("quarantine_failed", error=error)
            return 0
        if done:
            log.error("jobs_quarantined", jobs=done)
        return done

    async def _recover_claim(self) -> None:
        """The answer to a claim was lost: hand back what it may have taken."""
        try:
            await jobs.release_unknown(self._database, self.worker, self.known_leases)
        except PenstockError as error:
            log.warning("release_failed", error=error)
            await asyncio.sleep(self._pause())
