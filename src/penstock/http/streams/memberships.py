"""Members of consumer groups over HTTP, for languages without a driver.

The protocol is that of `penstock.groups`, and all of its state is in the database: any server process answers any call of a
member, and members survive the crash of a server. A read is a heartbeat: it releases revoked partitions, takes those that are
free for the member, and reads from the group's offsets. A member names the partitions on which it still works (`busy`), and has
the grace period to finish them before they are released.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import UUID

from penstock.core.meter import Meter
from penstock.core.polling import wait_for_event
from penstock.core.records import raw_list
from penstock.errors import NotFound, OffsetGone
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.http.streams.broadcaster import Broadcast, Broadcaster
from penstock.http.streams.events import Piece, for_group, piece_of
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.streams import group_queries
from penstock.streams import queries as streams
from penstock.streams.group_models import HeldPartitions, MemberBatch, Reading
from penstock.streams.group_queries import Begun, Commit, Committed
from penstock.streams.models import Chunk, OffsetReset, StreamRecord

_MOST_REMEMBERED = 10_000
_MOST_BYTES = 8 << 20
_EVICT_EVERY_S = 1.0
_LATER_S = 0.2
_BEATS_IN_DEAD_AFTER = 3
_MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Which member of which consumer group a path names."""

    stream: StreamRecord
    group: str
    id: str

    @property
    def group_name(self) -> str:
        """Name of the group whose slots are the partitions."""
        return f"{self.stream.name}/{self.group}"


@dataclass(slots=True)
class ReadRequest:
    """What a member asks for.

    Attributes:
        limit: Most events.
        busy: Partitions on which it still works: none of their events are returned, and they are not released yet.
        ahead: Where to read instead of at the group's offset, by partition, for one that fetches before it has committed.
        auto_offset_reset: What to do when retention dropped what comes next.
    """

    limit: int
    busy: Collection[int] = ()
    ahead: Mapping[int, int] = field(default_factory=dict)
    auto_offset_reset: OffsetReset = OffsetReset.ERROR


@dataclass(slots=True)
class _Found:
    """What there is to read.

    Attributes:
        batches: A batch for each partition that has something; their events are JSON already.
        events: How many events they have.
        at: Where each partition that may be read is.
        later: Whether some partitions have to wait for others.
    """

    batches: list[MemberBatch]
    events: int
    at: dict[int, int]
    later: bool


class Memberships:
    """What members over HTTP ask for.

    Args:
        database: Database of the streams.
        broadcaster: Tells when events came.
        listener: Listens for this process.
        stopping: Set when the server stops.
        grace_s: Seconds that a member has to finish a partition that is to go to another.
        meter: Counts partitions that move, and events that are committed.
    """

    def __init__(
        self,
        database: Database,
        broadcaster: Broadcaster,
        listener: Listener,
        stopping: asyncio.Event,
        grace_s: float,
        meter: Meter,
    ) -> None:
        self._meter = meter
        self._database = database
        self._broadcaster = broadcaster
        self._listener = listener
        self._stopping = stopping
        self._grace_s = grace_s
        self._waiting: dict[str, set[_Waiter]] = {}
        self._revoked_at: OrderedDict[tuple[str, str, int, int], float] = OrderedDict()
        self._evicted_at: OrderedDict[str, float] = OrderedDict()
        # Where a group was when its member read last, by group and partition: a commit does not say what it was before.
        self._reached: OrderedDict[tuple[str, int], int] = OrderedDict()

    def subscribe(self, notifications: Notifications) -> None:
        """Be told of what this process listens to."""
        notifications.subscribe(self._group_changed, Kind.SLOTS, Kind.MOVED)
        notifications.wake(self._stir_all, Kind.LISTENING, Kind.CONNECTED)

    def _group_changed(self, notification: Notification) -> None:
        for waiter in self._waiting.get(notification.subject, ()):
            waiter.stir()

    def _stir_all(self) -> None:
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.stir()

    def stop(self) -> None:
        """End all waits."""
        self._stir_all()

    async def commit(self, member: GroupMember, commits: Sequence[Commit]) -> dict[int, Committed]:
        """Commit offsets, one for each partition."""
        done = await group_queries.commit_offsets(self._database, member.stream.name, member.group, member.id, commits)
        for commit in commits:
            if done[commit.partition].done:
                reached = self._reached.get((member.group_name, commit.partition))
                if reached is not None and commit.next_offset > reached:
                    self._meter.handled(member.stream.name, member.group, commit.next_offset - reached)
                self._note_reached(member, commit.partition, commit.next_offset)
        return done

    def _note_reached(self, member: GroupMember, partition: int, offset: int) -> None:
        place = (member.group_name, partition)
        self._reached[place] = offset
        self._reached.move_to_end(place)
        while len(self._reached) > _MOST_REMEMBERED:
            self._reached.popitem(last=False)

    async def beat(self, member: GroupMember, session: UUID) -> HeldPartitions:
        """Keep a member alive that still works on everything that it has; take what it may.

        Raises:
            NotFound: It is no member, or no longer.
        """
        held, _ = await self._beat(member, session, None)
        return held

    async def _beat(self, member: GroupMember, session: UUID, busy: Collection[int] | None) -> tuple[HeldPartitions, float]:
        """Keep a member alive, release its revoked partitions, except those in `busy`, and take the ones that are free for it.

        Returns its partitions, and the seconds of silence after which it is dead.
        """
        database, group = self._database, member.group_name
        await self._evict(group)
        for _ in range(_MOST_ROUNDS):
            beat = await ownership.heartbeat(database, group, member.id, session)
            if not beat.known:
                if await streams.find_stream(database, member.stream.name) is None:
                    raise NotFound(f"no such stream: {member.stream.name}", hint="It was dropped.")
                raise NotFound(
                    f"{member.id} is no member of consumer group {member.group} of stream {member.stream.name}",
                    hint="It was silent for too long, or left: join again.",
                )
            moved = not beat.balanced and await balance.rebalance(database, group, None) > 0
            ended = {slot: beat.owned[slot] for slot in beat.revoked if self._is_over(member, slot, beat.owned[slot], busy)}
            if ended:
                await ownership.release(database, group, member.id, ended)
                self._meter.moved(group, "revoked", len(ended))
            taken = {}
            if beat.available:
                taken = await ownership.take(database, group, member.id, session, sorted(beat.available))
                self._meter.moved(group, "gained", len(taken))
            if not moved and not ended and not taken:
                break
        return HeldPartitions(beat.owned, sorted(beat.revoked)), beat.dead_after_s

    async def read(
        self, member: GroupMember, session: UUID, asked: ReadRequest, within: float, gone: Callable[[], Awaitable[bool]]
    ) -> tuple[Reading, int]:
        """The next events of what a member has, and their number; when there are none, wait up to `within` seconds.

        Args:
            member: The member.
            session: Session of its membership.
            asked: What it asks for.
            within: Seconds to wait.
            gone: Whether the client has left.

        Raises:
            NotFound: It is no member, or no longer.
            OffsetGone: Retention dropped what comes next.
        """
        deadline = time.monotonic() + within
        waiter = _Waiter()
        known: set[int] = set()
        async with self._listening(member, waiter), self._broadcaster.waiting(member.stream, waiter.event) as broadcast:
            while True:
                waiter.stirred = False
                held, dead_after_s = await self._beat(member, session, asked.busy)
                found = await self._find(member, held, asked)
                left = deadline - time.monotonic()
                # A waiting member learns at once which partitions it has to finish.
                told = not known.issuperset(held.revoked)
                if found.batches or told or left <= 0 or self._stopping.is_set() or await gone():
                    return Reading(held.partitions, held.revoked, found.batches), found.events
                known = set(asked.busy) & set(held.revoked)
                pause = _LATER_S if found.later else dead_after_s / _BEATS_IN_DEAD_AFTER * random.uniform(0.7, 1.0)
                await waiter.wait(broadcast, found.at, min(left, pause), self._stopping)

    async def _find(self, member: GroupMember, held: HeldPartitions, asked: ReadRequest) -> _Found:
        wanted = {slot: epoch for slot, epoch in held.partitions.items() if slot not in held.revoked and slot not in asked.busy}
        if not wanted:
            return _Found([], 0, {}, later=False)
        begun = await group_queries.begin_partitions(self._database, member.stream.name, member.group, member.id, wanted)
        for partition, found in begun.items():
            self._note_reached(member, partition, found.next_offset)
        at = {
            partition: max(found.next_offset, asked.ahead.get(partition, 0))
            for partition, found in begun.items()
            if not found.paused and not found.waits
        }
        read = await self._pieces(member, at, asked)
        return _Found(
            batches=[_batch(partition, wanted[partition], begun[partition], pieces) for partition, pieces in read.items()],
            events=sum(len(piece.events) for pieces in read.values() for piece in pieces),
            at=at,
            later=any(found.waits for found in begun.values()),
        )

    async def _pieces(self, member: GroupMember, at: dict[int, int], asked: ReadRequest) -> dict[int, list[Piece]]:
        """Up to so many events, shared by the partitions; what some do not need the others get."""
        found: dict[int, list[Piece]] = {}
        size = 0
        left, rest = asked.limit, list(at)
        random.shuffle(rest)
        while left > 0 and rest and size < _MOST_BYTES:
            share = max(1, left // len(rest))
            some = rest[:left]
            chunks = await self._chunks(
                member, {partition: at[partition] for partition in some}, share, asked.auto_offset_reset, at
            )
            full: list[int] = []
            for partition in some:
                taken = 0
                for chunk in chunks.get(partition, ()):
                    if size >= _MOST_BYTES:
                        # Compressed ones may become large: what is behind is for the next call.
                        break
                    whole = piece_of(member.stream, chunk, at[partition])
                    piece = for_group(whole, chunk, member.group).first_of(share - taken)
                    taken += len(piece.events)
                    size += sum(map(len, piece.events))
                    found.setdefault(partition, []).append(piece)
                    at[partition] = piece.next
                    if whole.next < chunk.next_offset:
                        break
                    if taken >= share:
                        full.append(partition)
                        break
                left -= taken
            rest = [*full, *rest[len(some) :]]
        return found

    async def _chunks(
        self, member: GroupMember, wanted: dict[int, int], limit: int, auto_offset_reset: OffsetReset, at: dict[int, int]
    ) -> dict[int, list[Chunk]]:
        try:
            rows = await streams.read_chunks(self._database, member.stream.name, wanted, limit, _MOST_BYTES // len(wanted))
        except OffsetGone:
            if auto_offset_reset is OffsetReset.ERROR:
                raise
            bounds = await streams.bounds(self._database, member.stream.name)
            for partition, offset in wanted.items():
                if offset < bounds[partition].first:
                    at[partition] = (
                        bounds[partition].first if auto_offset_reset is OffsetReset.EARLIEST else bounds[partition].next
                    )
            again = {partition: at[partition] for partition in wanted}
            rows = await streams.read_chunks(self._database, member.stream.name, again, limit, _MOST_BYTES // len(wanted))
        chunks: dict[int, list[Chunk]] = {}
        for chunk in rows:
            chunks.setdefault(chunk.partition, []).append(chunk)
        return chunks

    def _is_over(self, member: GroupMember, slot: int, epoch: int, busy: Collection[int] | None) -> bool:
        """Whether to release a revoked partition now."""
        place = (member.group_name, member.id, slot, epoch)
        now = time.monotonic()
        since = self._revoked_at.setdefault(place, now)
        while len(self._revoked_at) > _MOST_REMEMBERED:
            self._revoked_at.popitem(last=False)
        if (busy is not None and slot not in busy) or now - since >= self._grace_s:
            del self._revoked_at[place]
            return True
        return False

    async def _evict(self, group: str) -> None:
        """Evict silent members of the group, at intervals."""
        now = time.monotonic()
        if now - self._evicted_at.get(group, 0.0) < _EVICT_EVERY_S:
            return
        self._evicted_at[group] = now
        self._evicted_at.move_to_end(group)
        while len(self._evicted_at) > _MOST_REMEMBERED:
            self._evicted_at.popitem(last=False)
        await balance.evict(self._database, group, None)

    @asynccontextmanager
    async def _listening(self, member: GroupMember, waiter: _Waiter) -> AsyncIterator[None]:
        channel = f"penstock_{member.id}"
        self._listener.add(channel)
        waiters = self._waiting.setdefault(member.group_name, set())
        waiters.add(waiter)
        try:
            yield
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiting.get(member.group_name) is waiters:
                del self._waiting[member.group_name]
            self._listener.remove(channel)


class _Waiter:
    """A read that waits: for events, or for something about its group."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.stirred = False

    def stir(self) -> None:
        self.stirred = True
        self.event.set()

    async def wait(self, broadcast: Broadcast, at: Mapping[int, int], within: float, stopping: asyncio.Event) -> None:
        until = time.monotonic() + within
        while (rest := until - time.monotonic()) > 0:
            self.event.clear()
            came = any(broadcast.ends.get(partition, 0) > offset for partition, offset in at.items())
            if came or self.stirred or stopping.is_set():
                return
            await wait_for_event(self.event, rest)


def _batch(partition: int, epoch: int, begun: Begun, pieces: Sequence[Piece]) -> MemberBatch:
    events = raw_list(event for piece in pieces for event in piece.events)
    return MemberBatch(partition, epoch, begun.revision, pieces[0].first, pieces[-1].next, events)
