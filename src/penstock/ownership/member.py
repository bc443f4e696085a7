"""A member of a group: the loop that makes what this process works on equal to what the database says it owns.

It beats, and does what the answer says: drains and releases what it is to give up, takes what is free and meant for it. A
notification makes it beat at once, so slots change hands in milliseconds. When the database does not answer for too long it
stops its own work (see `state`). It knows nothing of jobs or streams; whoever uses it gives it a `SlotUser`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.errors import Conflict, DatabaseUnavailable, NotFound, PenstockError
from penstock.logs import get_logger
from penstock.ownership import balance, heartbeat
from penstock.ownership.assign import KeyAssign
from penstock.ownership.state import Change, MemberState
from penstock.postgres import ownership
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.waiting import happens

log = get_logger("penstock.ownership")
T = TypeVar("T")
_ASK_AGAIN = timedelta(seconds=15)


monotonic: Callable[[], float] = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds of a clock that also runs while the machine is suspended, where there is one."""


def looks_every(members: int) -> float:
    """Seconds between two looks of one member for silent ones.

    The count includes the silent. Should all but one die at once, that one still has to be in time; and a look reads all members,
    so what all looks cost together grows with the square, which a large group has to make up for.
    """
    return max(1.0, min(members / 4, 3.0), 3.0 * (members / 1_000) ** 2)


class GroupGone(NotFound):
    """The group itself was dropped."""


class SlotUser(Protocol):
    """What works on slots. The calls come from the loop, one slot at a time, in the order in which things happen."""

    def gained(self, slot: int, epoch: int) -> None:
        """The slot is this member's: begin."""

    async def revoke(self, slot: int, epoch: int) -> bool:
        """The slot is to go to another member: drain it. When this returns True nothing works on it any more.

        False: handlers run that nobody has to cut off; the slot is worked on as before, and revoked again a while later.
        """

    def lost(self, slot: int, epoch: int) -> None:
        """The slot may be another member's already: stop at once, without settling. Ends a `revoke` that is under way."""

    def ending(self, slot: int) -> bool:
        """Whether work on a slot that was lost still ends here. It is not taken anew before that."""


class Member:
    """One membership of this process.

    Args:
        database: Where.
        group: Name of the group, which exists.
        id: Unique in the group among the living.
        user: What works on the slots.
        settings: Heartbeat interval, and the silence after which others evict it.
        assign: The rule of a group with the assignor custom.
        metadata: What the member says of itself.
        keep_s: Seconds for which it is kept alive while the event loop makes no progress; None: `settings.wedged_after`.
    """

    def __init__(
        self,
        database: Database,
        group: str,
        id: str,
        user: SlotUser,
        settings: Settings,
        assign: KeyAssign | None = None,
        metadata: Mapping[str, Any] | None = None,
        keep_s: float | None = None,
    ) -> None:
        self.keep_s = settings.wedged_after.total_seconds() if keep_s is None else keep_s
        self._settings = settings
        self.group = group
        self.id = id
        self._database = database
        self._user = user
        self._interval = settings.heartbeat_interval.total_seconds()
        self._dead_after: timedelta = settings.dead_after
        self._assign = assign
        self._metadata: dict[str, Any] = dict(metadata or {})
        self._state = MemberState()
        self._members = 1
        self._session = uuid.uuid4()
        self._rejoining = False
        self._saying = asyncio.Lock()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._joined = asyncio.Event()
        self._drains: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def owned(self) -> dict[int, int]:
        """Slots to work on at this moment, with their epochs; none when this process has lost touch for too long."""
        return self._state.owned if monotonic() < self._state.fence_at else {}

    def may_work(self, slot: int) -> bool:
        """Whether a slot is this process's to begin work on at this moment."""
        return self._state.holds(slot) and monotonic() < self._state.fence_at

    @property
    def metadata(self) -> dict[str, Any]:
        """What the member says of itself."""
        return dict(self._metadata)

    @property
    def members(self) -> int:
        """How many there were at the last heartbeat."""
        return self._members

    def wake(self) -> None:
        """Something may have changed: beat now."""
        self._wake.set()

    def stop(self) -> None:
        """Drain all slots, hand them over and leave; `run` ends then."""
        self._stopping.set()
        self._wake.set()

    async def join(self) -> None:
        """Join the group; waits while the database is away. Raises `Conflict` when a live member has this id."""
        await self._database.retrying(self._join)
        self._joined.set()

    async def _join(self) -> None:
        await balance.join(self._database, self.group, self.id, self._session, self._dead_after, self._metadata, self._assign)

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Say something else of itself; a group with a rule of its own is balanced anew at once."""
        self._metadata = dict(metadata)
        if not self._joined.is_set():
            return
        # One after the other, each with the latest: of calls at once the last must not be overtaken by an earlier one.
        async with self._saying:
            with suppress(NotFound):  # evicted a moment ago: it joins again, with this
                await balance.set_metadata(self._database, self.group, self.id, self._metadata, self._assign)

    async def run(self) -> None:
        """Take part until `stop`. Joins first unless `join` was called.

        Raises:
            Conflict: Another has this id.
            GroupGone: Somebody dropped the group.
        """
        if not self._joined.is_set():
            await self.join()
        beside = heartbeat.of(self._database, self._settings)
        beside.keep(self)
        helpers = [
            asyncio.create_task(self._watch_fence(), name="penstock-fence"),
            asyncio.create_task(self._care(), name="penstock-ownership-care"),
        ]
        try:
            await self._reconcile()
        finally:
            beside.leave(self)
            for task in [*helpers, *self._drains.values(), *self._abandoned]:
                task.cancel()
            await asyncio.gather(*helpers, *self._drains.values(), return_exceptions=True)
            self._apply(self._state.heard(_UNKNOWN, 0.0, 0.0))

    # -- what the heartbeat's thread calls, see `heartbeat.Kept`

    def pulse(self) -> tuple[str, str, uuid.UUID] | None:
        """See `Kept`."""
        return None if self._rejoining else (self.group, self.id, self._session)

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """See `Kept`."""
        self._state.kept(sent_at, dead_after_s)

    def unknown(self) -> None:
        """See `Kept`: the next heartbeat of the loop says so."""

    async def _reconcile(self) -> None:
        said_so = False
        while True:
            self._wake.clear()
            try:
                if self._stopping.is_set() and not said_so:
                    self._apply(self._state.stop())
                    said_so = True
                    # The others take each slot when it is drained, not when all are.
                    with suppress(NotFound):
                        await self._call(balance.drain(self._database, self.group, self.id, self._assign))
                await self._beat()
                if said_so and self._state.empty:
                    with suppress(NotFound):  # the group was dropped
                        await self._call(balance.leave(self._database, self.group, self.id, self._session, self._assign))
                    return
            except GroupGone:
                raise
            except NotFound:
                # Evicted between two calls; the next heartbeat says so.
                continue
            except Conflict:
                # Another member has this id: going on would take turns with it.
                raise
            except PenstockError as error:
                log.warning("ownership_call_failed", group=self.group, member=self.id, error=error)
                if said_so and monotonic() >= self._state.fence_at:
                    return
                await happens(self._wake, random.uniform(0.2, 0.6))
                continue
            await happens(self._wake, self._interval * random.uniform(0.9, 1.0))

    async def _beat(self) -> None:
        sent_at = monotonic()
        beat = await self._call(ownership.heartbeat(self._database, self.group, self.id, self._session))
        self._apply(self._state.heard(beat, sent_at, monotonic()))
        if not beat.known:
            if self._stopping.is_set():
                return
            log.error("member_was_evicted", group=self.group, member=self.id)
            if not self._rejoining:
                # The answer to the join may be lost: it is repeated under the same session.
                self._session, self._rejoining = uuid.uuid4(), True
            try:
                await self._call(self._join())
            except NotFound as error:
                raise GroupGone(f"group {self.group} was dropped", hint=error.hint) from error
            self._rejoining = False
            self._wake.set()
            return
        self._members = beat.members
        if not beat.balanced and await self._call(balance.rebalance(self._database, self.group, self._assign)) > 0:
            self._wake.set()
        if releasing := self._state.releasing:
            await self._call(ownership.release(self._database, self.group, self.id, releasing))
            self._state.released(releasing)
            self._wake.set()
        if available := self._state.available:
            free = [slot for slot in sorted(available) if not self._user.ending(slot)]
            taken = await self._call(ownership.take(self._database, self.group, self.id, self._session, free)) if free else {}
            self._apply(self._state.took(taken, monotonic()))
            if len(taken) < len(available):
                # Something still ends there: look again soon.
                asyncio.get_running_loop().call_later(0.1, self._wake.set)

    def _apply(self, changes: list[Change]) -> None:
        if changes:
            kinds = Counter(str(change.kind) for change in changes)
            log.debug("slots_changed", group=self.group, member=self.id, **kinds)
        for change in changes:
            place = (change.slot, change.epoch)
            if change.kind == "gained":
                self._user.gained(change.slot, change.epoch)
            elif change.kind == "revoked":
                self._drains[place] = asyncio.create_task(self._drain(change.slot, change.epoch), name="penstock-drain")
            else:
                self._user.lost(change.slot, change.epoch)
                if (draining := self._drains.pop(place, None)) is not None:
                    draining.cancel()

    async def _drain(self, slot: int, epoch: int) -> None:
        try:
            if not await self._user.revoke(slot, epoch):
                self._drains.pop((slot, epoch), None)
                self._state.resumed(slot, epoch)
                self._user.gained(slot, epoch)
                return
        except Exception:
            # What could not be drained is stopped; the release ends what it has in progress.
            log.exception("drain_failed", group=self.group, slot=slot)
            self._user.lost(slot, epoch)
        self._drains.pop((slot, epoch), None)
        self._state.drained(slot, epoch)
        self._wake.set()

    async def _watch_fence(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if lost := self._state.tick(monotonic()):
                log.error("member_fenced_itself", group=self.group, member=self.id, slots=len(lost))
                self._apply(lost)

    async def _care(self) -> None:
        """Evict members that fell silent; have the rule asked again about keys for which it failed."""
        asked_at = monotonic()
        while True:
            await asyncio.sleep(looks_every(self._members) * random.uniform(0.7, 1.3))
            try:
                if self._assign is not None and monotonic() - asked_at > _ASK_AGAIN.total_seconds():
                    asked_at = monotonic()
                    await ownership.release_keys(self._database, self.group, None, _ASK_AGAIN)
                if await balance.evict(self._database, self.group, self._assign):
                    self._wake.set()
            except PenstockError as error:
                log.warning("evict_failed", group=self.group, error=error)

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Make one call, and give it up when it takes too long: a connection that hangs must not hold up the next heartbeat."""
        task = asyncio.create_task(call)
        try:
            done, _ = await asyncio.wait([task], timeout=max(1.0, self._interval * 0.5))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            self._abandoned.add(task)
            task.add_done_callback(self._forget)
            raise DatabaseUnavailable(f"the database did not answer member {self.id} of {self.group} in time")
        return task.result()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()


class _Unknown:
    known = False
    dead_after_s = 0.0
    owned: Mapping[int, int] = {}
    revoked: frozenset[int] = frozenset()
    available: frozenset[int] = frozenset()


_UNKNOWN = _Unknown()
