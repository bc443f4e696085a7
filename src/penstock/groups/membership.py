"""A membership of a group: the loop that reconciles the slots that this process works on with those that it owns.

The loop sends heartbeats and follows the answers: it drains and releases revoked slots, and takes free slots whose target is
this member. A notification makes it send a heartbeat at once, so slots move in milliseconds. When the database does not answer
for too long, the member stops its own work (see `state`). The module knows neither jobs nor streams; a `SlotUser` works on the
slots.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, Protocol, TypeVar

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, PenstockError
from penstock.groups import heartbeat
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.groups.assignors import KeyAssign
from penstock.groups.state import Change, MemberState
from penstock.postgres.database import Database
from penstock.settings import Settings

log = get_logger("penstock.groups")
T = TypeVar("T")
ASK_AGAIN_AFTER = timedelta(seconds=15)
"""How long a key is quarantined before its rule is asked about it again."""
_SAY_EVERY_S = 1.0
_MOST_SAID = 10_000
_SAY_AGAIN_S = 15.0


monotonic: Callable[[], float] = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Seconds of a clock that also runs while the machine is suspended, where the platform has one."""


def looks_every(members: int) -> float:
    """Seconds between two checks of one member for silent members.

    The number of members includes the silent ones. Should all members but one die at once, the last one must still evict them in
    time. A check reads all members, so the cost of all checks grows with the square of their number; a large group therefore
    checks less often.
    """
    return max(1.0, min(members / 4, 3.0), 3.0 * (members / 1_000) ** 2)


class GroupGone(NotFound):
    """The group was dropped."""


class SlotUser(Protocol):
    """Works on the slots of a member. The loop makes the calls, for one slot at a time, in the order of the changes."""

    def gained(self, slot: int, epoch: int) -> None:
        """Begin to work on a slot that this member has taken."""

    async def revoke(self, slot: int, epoch: int) -> bool:
        """Drain a slot whose target is another member. After True, nothing works on the slot any more.

        False means that handlers are running that need not be cut off: work on the slot continues, and a later heartbeat revokes
        it again.
        """

    def lost(self, slot: int, epoch: int) -> None:
        """Stop at once, without settling: another member may own the slot already. This ends a `revoke` that is under way."""

    def draining(self, slot: int) -> bool:
        """Whether work on a lost slot is still ending in this process. The member does not take the slot again before."""


class Membership:
    """One membership of this process.

    Args:
        database: Database of the group.
        group: Name of an existing group.
        id: Id of the member, unique among the live members of the group.
        user: Works on the slots.
        settings: Heartbeat interval, and the silence after which other members evict this one.
        assign: Function that places the keys of a group with the assignor "custom".
        metadata: Metadata that the member publishes.
        keep_s: Seconds for which it is kept alive while the event loop makes no progress; None: `settings.wedged_after`.
        key_ids: Ids of the keys of encryption that it has; None: what it works on is never encrypted.
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
        key_ids: Sequence[str] | None = None,
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
        self._key_ids = key_ids
        self._lacking: set[tuple[int, str]] = set()
        self._lacks = asyncio.Event()
        self._state = MemberState()
        self._members = 1
        self._balanced = False
        self._session = uuid.uuid4()
        self._rejoining = False
        self._publishing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._joined = asyncio.Event()
        self._drains: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def owned(self) -> dict[int, int]:
        """Slots to work on at this moment, with their epochs; none when the database has not answered for too long."""
        return self._state.owned if monotonic() < self._state.fence_at else {}

    @property
    def settled(self) -> bool:
        """Whether this member has all slots that it can take; no, while the database has not answered for too long."""
        return self._balanced and not self._state.available and monotonic() < self._state.fence_at

    async def lacks_slots(self) -> bool:
        """Whether the group gives this member slots that it does not have, such as those of a member that has crashed."""
        slots = await ownership.slots(self._database, self.group)
        return any(slot.target == self.id and slot.owner != self.id for slot in slots)

    def may_work(self, slot: int) -> bool:
        """Whether this process may begin work on a slot at this moment."""
        return self._state.holds(slot) and monotonic() < self._state.fence_at

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that the member publishes."""
        return dict(self._metadata)

    @property
    def members(self) -> int:
        """Number of members at the last heartbeat."""
        return self._members

    def wake(self) -> None:
        """Send a heartbeat now, because something may have changed."""
        self._wake.set()

    def lacks(self, found: Iterable[tuple[int, str]]) -> None:
        """Work in slots waits for keys of encryption (slot and id) which this member lacks: another one shall have the slots."""
        self._lacking.update(found)
        if self._lacking:
            self._lacks.set()

    def stop(self) -> None:
        """Drain and release all slots and leave the group; `run` ends then."""
        self._stopping.set()
        self._wake.set()

    async def join(self) -> None:
        """Join the group; waits while the database is unreachable. Raises `Conflict` when a live member has this id."""
        await self._database.retrying(self._join)
        self._joined.set()

    async def _join(self) -> None:
        await balance.join(
            self._database, self.group, self.id, self._session, self._dead_after, self._metadata, self._assign, self._key_ids
        )

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Publish other metadata; a group with the assignor "custom" is rebalanced at once."""
        self._metadata = dict(metadata)
        if not self._joined.is_set():
            return
        # Concurrent calls write one after the other, each the latest metadata, so that no earlier call overwrites a later one.
        async with self._publishing:
            with suppress(NotFound):  # it was just evicted, and joins again with this metadata
                await balance.set_metadata(self._database, self.group, self.id, self._metadata, self._assign)

    async def run(self) -> None:
        """Take part in the group until `stop`. Joins first unless `join` was called.

        Raises:
            Conflict: Another member has this id.
            GroupGone: The group was dropped.
        """
        if not self._joined.is_set():
            await self.join()
        threaded = heartbeat.of(self._database, self._settings)
        threaded.keep(self)
        services = [
            asyncio.create_task(self._watch_fence(), name="penstock-fence"),
            asyncio.create_task(self._evict_silent_members(), name="penstock-eviction"),
            asyncio.create_task(self._say_what_it_lacks(), name="penstock-lacking"),
        ]
        try:
            await self._reconcile()
        finally:
            threaded.leave(self)
            for task in [*services, *self._drains.values(), *self._abandoned]:
                task.cancel()
            await asyncio.gather(*services, *self._drains.values(), return_exceptions=True)
            self._apply(self._state.answered(_UNKNOWN, 0.0, 0.0))

    # -- the heartbeat's thread calls these, see `heartbeat.Kept`

    def pulse(self) -> tuple[str, str, uuid.UUID] | None:
        """See `Kept`."""
        return None if self._rejoining else (self.group, self.id, self._session)

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """See `Kept`."""
        self._state.kept(sent_at, dead_after_s)

    def unknown(self) -> None:
        """See `Kept`: the loop learns it from its next heartbeat."""

    async def _reconcile(self) -> None:
        leaving = False
        while True:
            self._wake.clear()
            try:
                if self._stopping.is_set() and not leaving:
                    self._apply(self._state.stop())
                    leaving = True
                    # The other members take each slot when it is drained, not when all slots are.
                    with suppress(NotFound):
                        await self._call(balance.hand_over(self._database, self.group, self.id, self._session, self._assign))
                await self._beat()
                if leaving and self._state.empty:
                    with suppress(NotFound):  # the group was dropped
                        await self._call(balance.leave(self._database, self.group, self.id, self._session, self._assign))
                    return
            except GroupGone:
                raise
            except NotFound:
                # The member was evicted between two calls; the next heartbeat reports it.
                continue
            except Conflict:
                # Another member has this id: both would evict each other in turn.
                raise
            except PenstockError as error:
                log.warning("ownership_call_failed", group=self.group, member=self.id, error=error)
                if leaving and monotonic() >= self._state.fence_at:
                    return
                await wait_for_event(self._wake, random.uniform(0.2, 0.6))
                continue
            await wait_for_event(self._wake, self._interval * random.uniform(0.9, 1.0))

    async def _beat(self) -> None:
        sent_at = monotonic()
        beat = await self._call(ownership.heartbeat(self._database, self.group, self.id, self._session))
        self._apply(self._state.answered(beat, sent_at, monotonic()))
        self._balanced = beat.known and beat.balanced
        if not beat.known:
            if self._stopping.is_set():
                return
            log.error("member_was_evicted", group=self.group, member=self.id)
            if not self._rejoining:
                # The answer to the join may be lost: the join is repeated under the same session.
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
            # Some of them may be for this member again, which the next heartbeat says.
            self._balanced = False
            await self._call(ownership.release(self._database, self.group, self.id, releasing))
            self._state.released(releasing)
            self._wake.set()
        if available := self._state.available:
            free = [slot for slot in sorted(available) if not self._user.draining(slot)]
            taken = await self._call(ownership.take(self._database, self.group, self.id, self._session, free)) if free else {}
            self._apply(self._state.took(taken, monotonic()))
            if len(taken) < len(available):
                # Work on a slot is still ending: check again soon.
                asyncio.get_running_loop().call_later(0.1, self._wake.set)

    def _apply(self, changes: list[Change]) -> None:
        if changes:
            kinds = Counter(str(change.kind) for change in changes)
            log.debug("slots_changed", group=self.group, member=self.id, **kinds)
            if (meter := measuring.meter) is not None:
                for kind, slots in kinds.items():
                    meter.moved(self.group, kind, slots)
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
            # A slot that cannot be drained is stopped; its release ends what it has in progress.
            log.exception("drain_failed", group=self.group, slot=slot)
            self._user.lost(slot, epoch)
        self._drains.pop((slot, epoch), None)
        self._state.drained(slot, epoch)
        self._wake.set()

    async def _watch_fence(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if lost := self._state.tick(monotonic()):
                self._balanced = False
                log.error("member_fenced_itself", group=self.group, member=self.id, slots=len(lost))
                self._apply(lost)

    async def _evict_silent_members(self) -> None:
        """Evict silent members, and have `assign` called again for the keys for which it failed."""
        asked_at = monotonic()
        while True:
            await asyncio.sleep(looks_every(self._members) * random.uniform(0.7, 1.3))
            try:
                if self._assign is not None and monotonic() - asked_at > ASK_AGAIN_AFTER.total_seconds():
                    asked_at = monotonic()
                    await ownership.release_keys(self._database, self.group, None, ASK_AGAIN_AFTER)
                if await balance.evict(self._database, self.group, self._assign):
                    self._wake.set()
            except PenstockError as error:
                log.warning("evict_failed", group=self.group, error=error)

    async def _say_what_it_lacks(self) -> None:
        """Have slots given to members with the keys that this one lacks, and say it again while work in them waits."""
        said: set[tuple[int, str]] = set()
        said_at = 0.0
        while True:
            await self._lacks.wait()
            self._lacks.clear()
            # What does not fit into one call is found again.
            lacking, self._lacking = set(islice(self._lacking, _MOST_SAID)), set()
            if not lacking <= said or monotonic() - said_at > _SAY_AGAIN_S:
                try:
                    if await balance.need_keys(self._database, self.group, self.id, sorted(lacking), self._assign):
                        log.warning("slots_lack_keys", group=self.group, member=self.id, keys=sorted({key for _, key in lacking}))
                        self._wake.set()
                    said, said_at = lacking, monotonic()
                except PenstockError as error:
                    log.warning("keys_not_said", group=self.group, member=self.id, error=error)
            await asyncio.sleep(_SAY_EVERY_S)

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        """Make one call, and abandon it when it takes too long: a hanging connection must not delay the next heartbeat."""
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
