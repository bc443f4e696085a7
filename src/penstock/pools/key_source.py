"""The keys of one pool as a source of its fetcher: it claims from the slots that the worker owns, and supplies the key queues.

The claims walk over the keys in a ring; each begins where the last one ended. While there are many keys, a claim takes one job of
each; when there are fewer keys than places, it takes more of each, as many as run in about a tenth of a second. The source drains
a slot that is revoked, and drops the jobs of a slot that is lost (see `penstock.groups.membership`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol
from uuid import UUID

from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import NotFound, PenstockError
from penstock.groups.draining import DrainingTasks
from penstock.groups.membership import Membership
from penstock.jobs import claim_queries
from penstock.jobs.claiming import FailedClaims
from penstock.jobs.fetcher import Look
from penstock.jobs.models import ClaimedJob
from penstock.pools import queries as pools
from penstock.pools.key_queues import KeyQueues
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification
from penstock.settings import Settings

log = get_logger("penstock.worker")
QUIET_S = 0.1
_LOOKAHEAD_S = 0.1
_STOP_S = 2.0
_CLAIM_S = 5.0
_NO_SLOTS_S = 1.0


class PoolExecutor(Protocol):
    """The role of an executor in a pool: it runs handlers, or gives jobs to a program."""

    def room(self, name: str) -> int:
        """How many more jobs of this type it can start soon."""

    def found(self, name: str, more: bool) -> None:
        """A claim for this type has ended, and its jobs are started; `more`: it may have left some in the database."""

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """Run a job that was claimed at this (monotonic) time, unless `may_start` then returns False.

        Its result goes to the key queues, through `Results`. `ahead`: it starts before the jobs that wait for a place, since the
        quantum of its key is not used up.
        """

    def cancel(self, id: UUID, reason: str) -> None:
        """Tell a job to stop."""

    def give_back(self, ids: Iterable[UUID]) -> None:
        """Release those of the jobs that have not started."""

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """Stop jobs without settling them. Returns the tasks that are still ending."""

    def leases(self) -> Iterable[int]:
        """Leases of the running jobs."""


class KeySource:
    """The keys of one pool in the slots of one member. A `Source` and a `RunsAlone`, and a `SlotUser`.

    Args:
        database: Database to claim from.
        name: Name of the pool.
        settings: Batch size, intervals, handover grace.
        member: Membership that owns the slots.
        executor: Runs the jobs.
        key_queues: Receive the claimed jobs.
        unsettled_leases: Leases of results that are not known to be written.
        wake: Wakes the fetcher.
        paused: Lock that the fetcher holds while it claims.
        prefetch_per_key: The largest number of jobs of a key to claim at once; 1: each job starts only when the result of the one
            before is written.
        keyring: Keys of encrypted payloads.
    """

    def __init__(
        self,
        database: Database,
        name: str,
        settings: Settings,
        member: Membership,
        executor: PoolExecutor,
        key_queues: KeyQueues,
        unsettled_leases: Callable[[], Iterable[int]],
        wake: Callable[[], None],
        paused: asyncio.Lock,
        prefetch_per_key: int,
        keyring: Keyring,
    ) -> None:
        self._keys = keyring.ids or None
        self.name = name
        self.grace_s = settings.handover_grace.total_seconds()
        self._recalls = asyncio.Event()
        self._database = database
        self._settings = settings
        self._member = member
        self._executor = executor
        self._key_queues = key_queues
        self._unsettled_leases = unsettled_leases
        self._wake = wake
        self._paused = paused
        self._prefetch_per_key = prefetch_per_key
        self._failed = FailedClaims(database, lambda: member.id, lambda: [name], self._known_leases, pool=name)
        self._depth = 1
        self._after: tuple[int, str] | None = None
        self._quantum_left: int | None = None
        self._stops_at: float | None = None
        self._kept: dict[int, int] = {}
        self._draining = DrainingTasks()

    # -- see `Source`

    def blocked_s(self) -> float | None:
        """See `Source`."""
        return None if self._member.owned else _NO_SLOTS_S

    async def look(self) -> Look:
        """See `Source`."""
        now, room = time.monotonic(), self._room()
        if room <= 0:
            return Look(full=True)
        member = self._member
        claim = await pools.claim(
            self._database,
            member.id,
            self.name,
            member.owned,
            room,
            self._depth,
            self._after,
            self._running_low(),
            self._quantum_left,
            self._keys,
        )
        if not claim.walked:
            self._executor.found(self.name, False)
            wanted = await claim_queries.wait_for_places(self._database, member.id, [self.name], {})
            return Look(wanted=wanted, only_wanted=wanted is not None, due_in_s=None if wanted is None else wanted.due_in_s)
        self._after, self._quantum_left = claim.at, claim.quantum_left
        if claim.lacking:
            member.lacks(claim.lacking)
        self._key_queues.submit(claim.jobs, now, claim.quanta)
        self._executor.found(self.name, bool(claim.jobs) and (len(claim.jobs) >= room or claim.at is not None))
        fast = max(1, int(_LOOKAHEAD_S / max(self._key_queues.duration_s, 1e-5)))
        most = min(self._prefetch_per_key, fast)
        if claim.at is not None:
            self._depth = max(1, min(self._depth // 2, most))
        elif claim.jobs and len(claim.jobs) < room:
            # One job of each key does not fill the places: take more of each.
            self._depth = min(self._depth * 2, most)
        return Look(len(claim.jobs), unfinished=claim.at is not None, due_in_s=claim.due_in_s)

    async def announce(self) -> None:
        """See `Source`."""
        try:
            await pools.wait_for_slots(self._database, self.name, self._member.id)
        except NotFound as error:
            await self.recover(error)
            raise

    async def recover(self, error: PenstockError) -> None:
        """See `Source`."""
        if isinstance(error, NotFound):
            # The member was evicted: its next heartbeat shows that, and it joins again.
            self._member.wake()
        else:
            await self._failed.recover(error)

    # -- see `RunsAlone`

    @property
    def empty(self) -> bool:
        """See `RunsAlone`."""
        return len(self._key_queues) == 0

    def types_apart(self) -> list[str]:
        """See `RunsAlone`: the type of this pool, as long as the member owns slots."""
        return [self.name] if self._member.owned else []

    async def next_alone(self) -> UUID | None:
        """See `RunsAlone`."""
        owned = self._member.owned
        return await claim_queries.next_alone(self._database, [self.name], list(owned), self._keys) if owned else None

    def hand_back(self) -> None:
        """See `RunsAlone`."""
        self._key_queues.release_waiting()
        self._executor.give_back(self._key_queues.running())

    async def claim_alone(self) -> list[ClaimedJob]:
        """See `RunsAlone`."""
        if not (owned := self._member.owned):
            return []
        now = time.monotonic()
        try:
            found = await claim_queries.claim_alone(self._database, self._member.id, [self.name], owned, self._keys)
        except PenstockError:
            await self._failed.release()
            raise
        if found:
            self._key_queues.submit(found, now)
        return [job for job, _ in found]

    # -- jobs that are recalled

    def cancelled(self, notification: Notification) -> None:
        """A job may have been cancelled: ask the database, since every role that may connect can send the notification."""
        with suppress(ValueError):
            if notification.kind is Kind.CONNECTED or self._key_queues.holds(UUID(notification.subject)):
                self._recalls.set()

    def key_paused(self) -> None:
        """A key may have been paused: ask the database for which."""
        self._recalls.set()

    async def watch_recalls(self) -> None:
        """Cancel the handlers of cancelled jobs, and release the jobs of paused keys that have not started.

        It also asks at intervals, since a notification may have been missed.
        """
        while True:
            await wait_for_event(self._recalls, self._settings.heartbeat_interval.total_seconds())
            self._recalls.clear()
            if len(self._key_queues):
                try:
                    for id in await pools.cancelled_of(self._database, self.name, self._member.id):
                        self._executor.cancel(id, "cancelled")
                    paused = await pools.paused_keys_held(self._database, self.name, self._member.id)
                    self._executor.give_back(self._key_queues.release_keys(paused))
                except PenstockError as error:
                    log.warning("recalls_unknown", pool=self.name, error=error)

    # -- the slots

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self._wake()

    def stop(self, grace_s: float) -> None:
        """Release the waiting jobs because the worker stops; running handlers have this many seconds until they are cancelled."""
        self.grace_s = grace_s
        self._stops_at = time.monotonic() + grace_s
        self._key_queues.stop()

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`: release the waiting jobs, and let running handlers finish.

        While this worker is alive, no other one needs the slot urgently enough to cut off a handler. When handlers take longer
        than the grace period, the slot stays for a while and its other keys continue. Each further time these wait twice as long,
        at most as long as the lease of the running jobs. A worker that stops cancels its handlers at the end of its own grace
        period.
        """
        self._key_queues.release_waiting(slot)
        self._executor.give_back(self._key_queues.running(slot))
        # A claim that is under way may still take jobs of the slot. If the slot were released first, they would lose an attempt.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLAIM_S), self._paused:
                pass
        if await self._drained(slot):
            self._kept.pop(slot, None)
            return True
        if self._stops_at is None and self._grace_of(slot) < self._key_queues.lease_s(slot):
            self._kept[slot] = self._kept.get(slot, 0) + 1
            return False
        self._kept.pop(slot, None)
        for id in self._key_queues.running(slot):
            self._executor.cancel(id, "moved")
        if not await self._key_queues.drained(slot, _STOP_S):
            # A handler does not stop, or its job cannot be settled. The release ends the attempt, and its result does not count.
            log.error(
                "handover_without_drain", pool=self.name, slot=slot, jobs=[str(id) for id in self._key_queues.running(slot)]
            )
            self.lost(slot, epoch)
        return True

    async def _drained(self, slot: int) -> bool:
        """Wait for running jobs. The grace period changes when the worker is told to stop meanwhile."""
        began = time.monotonic()
        while True:
            ends_at = began + self._grace_of(slot) if self._stops_at is None else self._stops_at
            left = ends_at - time.monotonic()
            if await self._key_queues.drained(slot, max(0.0, min(left, _STOP_S))):
                return True
            if left <= 0:
                return False

    def _grace_of(self, slot: int) -> float:
        return self.grace_s * float(2 ** min(self._kept.get(slot, 0), 30))

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for task in self._executor.abandon(self._key_queues.drop(slot)):
            self._draining.add(task, slot, self.grace_s + _STOP_S)

    def draining(self, slot: int) -> bool:
        """See `SlotUser`. Handlers have as long as before a handover to another worker."""
        return self._draining.holds(slot)

    def _running_low(self) -> list[str]:
        return self._key_queues.running_low() if self._depth > 1 else []

    def _room(self) -> int:
        # Key queues of slow keys hold jobs that the executor does not have; they must not grow without limit.
        claim_limit = self._settings.claim_limit
        return min(self._executor.room(self.name), claim_limit, 4 * claim_limit - len(self._key_queues))

    def _known_leases(self) -> list[int]:
        return [*self._key_queues.leases, *self._executor.leases(), *self._unsettled_leases()]
