"""The keyed claimer: keeps the lines of one pool supplied, from the slots that this process owns.

It walks the ring of its keys, claim by claim, and goes on where the last walk ended. While there are many keys it takes one
job of each; when there are fewer keys than places it takes more of each, as many as run in about a tenth of a second. Slots
come and go (see `penstock.ownership.member`): a revoked one is drained, a lost one dropped.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol
from uuid import UUID

from penstock.errors import DatabaseUnavailable, NotFound, PenstockError
from penstock.job import ClaimedJob, Settlement
from penstock.logs import get_logger
from penstock.ownership.ending import Ending
from penstock.ownership.member import Member
from penstock.postgres import jobs, pools
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.waiting import happens
from penstock.worker.lines import Lines

log = get_logger("penstock.worker")
_QUIET_S = 0.1
_LOOKAHEAD_S = 0.1
_LONGEST_WAIT_S = 30.0
_STOP_S = 2.0
_CLAIM_S = 5.0
_AGAIN_S = 0.1
_SHORTEST_WAIT_S = 0.002


class Runs(Protocol):
    """What runs the jobs: the worker's runner, or a program that pulls them."""

    def room(self) -> int:
        """How many more it can start soon."""

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """Run a job that was claimed at this (monotonic) time, if it may start then; its result goes to `Lines.finished`.

        `ahead`: before those that wait for a place, since its key's turn goes on.
        """

    def cancel(self, id: UUID, reason: str) -> None:
        """Tell a job to stop."""

    def give_back(self, ids: Iterable[UUID]) -> None:
        """Hand back those that have not started."""

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """Stop jobs without settling them. Returns what still ends."""

    def leases(self) -> Iterable[int]:
        """Leases of the jobs that run."""


class KeyedClaimer:
    """Claims the jobs of one pool for one member. A `SlotUser`.

    Args:
        database: Where.
        name: The pool.
        settings: Batch size, intervals, grace of a hand-over.
        runs: Runs the jobs.
        settle: Takes results.
        unsettled: Leases of results that are not known to be written.
        key_concurrency: Jobs of one key at once.
        blocking: Whether a job that is to be retried holds up its key.
        run_ahead: Most jobs of a key to claim at once; 1: each starts only when the result of the one before is written.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        settings: Settings,
        runs: Runs,
        settle: Callable[[Settlement], None],
        unsettled: Callable[[], set[int]],
        *,
        key_concurrency: int = 1,
        blocking: bool = True,
        run_ahead: int = 500,
    ) -> None:
        self.name = name
        self.progressed_at = time.monotonic()
        self._member: Member | None = None
        self._database = database
        self._settings = settings
        self._runs = runs
        self._unsettled = unsettled
        self._run_ahead = run_ahead
        self.lines = Lines(key_concurrency, blocking, runs.start, settle, self._may_work, self.wake)
        self._awake = asyncio.Event()
        self._room = asyncio.Event()
        self._depth = 1
        self.grace_s = settings.handover_grace.total_seconds()
        self._stops_at: float | None = None
        self._kept: dict[int, int] = {}
        self._after: tuple[int, str] | None = None
        self._turn_left: int | None = None
        self._ending = Ending()
        # Held from the look at the slots until the answer is in the lines, or what a lost answer took is handed back.
        self._claiming = asyncio.Lock()
        self.cancellations = asyncio.Event()

    def belongs_to(self, member: Member) -> None:
        """The member whose slots these are; before `run`."""
        self._member = member

    def wake(self) -> None:
        """A job may have come, or a key become free."""
        self._awake.set()

    def room_made(self) -> None:
        """A handler is done."""
        self._room.set()

    # -- isolation, see `Fetches`

    @property
    def paused(self) -> asyncio.Lock:
        """While this is held no claim is under way."""
        return self._claiming

    @property
    def empty(self) -> bool:
        """Whether nothing is in hand or unsettled."""
        return len(self.lines) == 0

    def types_apart(self) -> list[str]:
        """See `Fetches`: those of this pool, as long as it has slots."""
        return [self.name] if self._member is not None and self._member.owned else []

    async def claim_alone(self) -> ClaimedJob | None:
        """Claim one job that waits to run alone from the slots of this process, and start it."""
        if self._member is None or not (owned := self._member.owned):
            return None
        now = time.monotonic()
        try:
            found = await jobs.claim_alone(self._database, self._member.id, [self.name], owned)
        except PenstockError:
            await self._recover_claim()
            raise
        if found is None:
            return None
        self.lines.submit([found], now)
        return found[0]

    # -- the slots

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self.wake()

    def stop(self, grace_s: float) -> None:
        """The worker stops: what runs gets so many seconds from now on, then it is cancelled."""
        self.grace_s = grace_s
        self._stops_at = time.monotonic() + grace_s

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: hand back what waits, and let what runs finish.

        While this worker lives nobody needs the slot so much that handlers had to be cut off. When they take longer than the
        grace period the slot is kept for a while and its other keys go on; each further time these wait twice as long, up to the
        lease of what runs. A worker that stops cancels what runs at the end of its grace period.
        """
        self.lines.release_waiting(slot)
        self._runs.give_back(self.lines.running(slot))
        # A claim that is under way may still take jobs of the slot. Were it released first, they would lose an attempt.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLAIM_S), self._claiming:
                pass
        if await self._drained(slot):
            self._kept.pop(slot, None)
            return True
        if self._stops_at is None and self._grace_of(slot) < self.lines.lease_s(slot):
            self._kept[slot] = self._kept.get(slot, 0) + 1
            return False
        self._kept.pop(slot, None)
        for id in self.lines.running(slot):
            self._runs.cancel(id, "moved")
        if not await self.lines.drained(slot, _STOP_S):
            # It does not stop, or cannot be settled. The release ends its attempt, and its result will not count.
            log.error("handover_without_drain", pool=self.name, slot=slot, jobs=[str(id) for id in self.lines.running(slot)])
            self.lost(slot, epoch)
        return True

    async def _drained(self, slot: int) -> bool:
        """Wait for what runs; the grace period changes when the worker is told to stop meanwhile."""
        began = time.monotonic()
        while True:
            ends_at = began + self._grace_of(slot) if self._stops_at is None else self._stops_at
            left = ends_at - time.monotonic()
            if await self.lines.drained(slot, max(0.0, min(left, _STOP_S))):
                return True
            if left <= 0:
                return False

    def _grace_of(self, slot: int) -> float:
        return self.grace_s * float(2 ** min(self._kept.get(slot, 0), 30))

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for task in self._runs.abandon(self.lines.drop(slot)):
            self._ending.add(task, slot, self.grace_s + _STOP_S)

    def ending(self, slot: int) -> bool:
        """See `SlotUser`. Handlers get as long as before a hand-over to another worker."""
        return self._ending.holds(slot)

    # -- the claims

    async def run(self) -> None:
        """Claim until cancelled."""
        last_found = time.monotonic()
        idle = looked_again = False
        while True:
            self.progressed_at = time.monotonic()
            self._awake.clear()
            self._room.clear()
            try:
                member = self._member
                if member is None or not member.owned:
                    await happens(self._awake, 1.0)
                    continue
                if self._room_for() <= 0:
                    # Every place is taken. The time-out shows that this loop is alive.
                    await happens(self._room, 1.0)
                    continue
                claim = await self._claim(member)
                wanted = None
                if not claim.walked:
                    wanted = await jobs.wait_for_places(self._database, member.id, [self.name], {})
                if claim.jobs:
                    last_found, idle, looked_again = time.monotonic(), False, False
                elif wanted is not None and wanted.is_new and not looked_again:
                    looked_again = True
                elif wanted is not None:
                    # The next place comes at a known time, or is announced.
                    looked_again = False
                    due_s = self._pause() if wanted.due_in_s is None else min(wanted.due_in_s, self._pause())
                    await happens(self._awake, max(due_s, _SHORTEST_WAIT_S))
                elif claim.at is not None:
                    # The walk was cut short: go on, without keeping the database from others.
                    await happens(self._awake, 0.005)
                elif not idle and time.monotonic() - last_found < _QUIET_S:
                    await happens(self._awake, 0.002 + (time.monotonic() - last_found) / 8)
                elif not idle:
                    idle = await self._say_idle(member)
                else:
                    pause = self._pause()
                    if claim.due_in_s is not None and claim.due_in_s < pause:
                        await happens(self._awake, max(claim.due_in_s, 0.001))
                    elif not await happens(self._awake, pause):
                        # Idle still: say so again, since the word is only good for a while.
                        idle = False
            except DatabaseUnavailable:
                idle = False
            except NotFound:
                # Evicted: the member finds out by itself, and joins again.
                idle = False
                if self._member is not None:
                    self._member.wake()
                await happens(self._awake, 0.2)
            except PenstockError:
                idle = False
                await asyncio.sleep(self._pause())

    async def _say_idle(self, member: Member) -> bool:
        """Have jobs that come announced. Returns whether that is known to be so."""
        try:
            await pools.wait_for_slots(self._database, self.name, member.id)
        except NotFound:
            raise
        except PenstockError as error:
            log.warning("claimer_cannot_wait", pool=self.name, error=error)
            await happens(self._awake, _AGAIN_S)
            return False
        return True

    async def _quarantine(self, member: Member) -> None:
        """One job that cannot be read may be what a claim failed for: put such jobs aside."""
        try:
            done = await jobs.quarantine_unreadable(self._database, member.id, [self.name], self._known_leases)
        except PenstockError as error:
            log.warning("quarantine_failed", pool=self.name, error=error)
        else:
            if done:
                log.error("jobs_quarantined", pool=self.name, jobs=done)

    async def _recover_claim(self) -> None:
        """The answer to a claim was lost: hand back what it may have taken."""
        try:
            if self._member is not None:
                await jobs.release_unknown(self._database, self._member.id, self._known_leases)
        except PenstockError as error:
            log.warning("release_failed", pool=self.name, error=error)
            await asyncio.sleep(self._pause())

    async def watch_cancellations(self) -> None:
        """Tell handlers whose jobs were cancelled, until cancelled; the notification of it may have been missed."""
        while True:
            await happens(self.cancellations, self._settings.heartbeat_interval.total_seconds())
            self.cancellations.clear()
            if len(self.lines) and self._member is not None:
                try:
                    for id in await pools.cancelled_of(self._database, self.name, self._member.id):
                        self._runs.cancel(id, "cancelled")
                except PenstockError as error:
                    log.warning("cancellations_unknown", pool=self.name, error=error)

    async def _claim(self, member: Member) -> pools.KeyedClaim:
        async with self._claiming:
            try:
                return await self._claim_once(member)
            except NotFound:
                raise
            except DatabaseUnavailable as error:
                log.warning("claim_failed", pool=self.name, error=error)
                await self._recover_claim()
                raise
            except PenstockError as error:
                log.error("claim_refused", pool=self.name, error=error)
                await self._quarantine(member)
                await self._recover_claim()
                raise

    async def _claim_once(self, member: Member) -> pools.KeyedClaim:
        now, room = time.monotonic(), self._room_for()
        if room <= 0:
            # The places were taken while it waited for its turn to claim.
            return pools.KeyedClaim([], self._after, None, self._turn_left)
        claim = await pools.claim(
            self._database, member.id, self.name, member.owned, room, self._depth, self._after, self._in_hand(), self._turn_left
        )
        if claim.walked:
            self._after, self._turn_left = claim.at, claim.turn_left
        self.lines.submit(claim.jobs, now, claim.weights)
        fast = max(1, int(_LOOKAHEAD_S / max(self.lines.duration_s, 1e-5)))
        most = min(self._run_ahead, fast)
        if claim.at is None and claim.jobs and len(claim.jobs) < room:
            # All keys together do not fill the places: take more of each.
            self._depth = min(self._depth * 2, most)
        elif claim.at is not None:
            self._depth = max(1, min(self._depth // 2, most))
        return claim

    def _in_hand(self) -> list[str]:
        return self.lines.in_hand() if self._depth > 1 else []

    def _room_for(self) -> int:
        # Lines of slow keys hold jobs that the runner does not see; they are not to grow for ever.
        return min(self._runs.room(), self._settings.claim_limit, 4 * self._settings.claim_limit - len(self.lines))

    def _may_work(self, slot: int) -> bool:
        return self._member is not None and self._member.may_work(slot)

    def _known_leases(self) -> list[int]:
        return [*self.lines.leases, *self._runs.leases(), *self._unsettled()]

    def _pause(self) -> float:
        return min(self._settings.poll_interval.total_seconds(), _LONGEST_WAIT_S) * random.uniform(0.7, 1.0)
