"""Members of consumer groups over HTTP, for languages without a driver.

The protocol is that of `penstock.groups`, and all of its state is in the database: any server process answers any call of a
member, and a server that dies takes no member with it. A read beats for the member, gives up what is to go to others, takes what
is meant for it, and reads from where the group is. What a member still works on it names (`busy`); it has the grace period to
finish that before it is taken away.
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

from penstock.core.polling import happens
from penstock.errors import NotFound, OffsetGone
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.http.streams.broadcaster import Broadcaster, Feed
from penstock.http.streams.events import Piece, for_group, piece_of
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.streams import queries as streams
from penstock.streams.models import Chunk, OffsetReset, StreamRecord
from penstock.streams.queries import Begun

_MOST_REMEMBERED = 10_000
_MOST_BYTES = 8 << 20
_EVICT_EVERY_S = 1.0
_LATER_S = 0.2
_BEATS_IN_DEAD_AFTER = 3
_MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Seat:
    """Which member of which group."""

    stream: StreamRecord
    group: str
    member: str

    @property
    def group_name(self) -> str:
        """Name of the group whose slots are the partitions."""
        return f"{self.stream.name}/{self.group}"


@dataclass(slots=True)
class EventBatch:
    """Events of one partition for a member, with what it has to give back to commit them."""

    partition: int
    epoch: int
    revision: int
    events: list[bytes] = field(default_factory=list)
    first: int = 0
    next: int = 0


@dataclass(slots=True)
class Held:
    """What a member has: its partitions with their epochs, and which of them it is to finish and give up."""

    owned: dict[int, int]
    revoked: list[int]
    dead_after_s: float


@dataclass(slots=True)
class Reading:
    """What a member asks for.

    Attributes:
        limit: Most events.
        busy: Partitions that it still works on: none of their events now, and they are not given up yet.
        ahead: Where to read instead of at the group's offset, by partition, for one that fetches before it has committed.
        auto_offset_reset: What to do when retention dropped what comes next.
    """

    limit: int
    busy: Collection[int] = ()
    ahead: Mapping[int, int] = field(default_factory=dict)
    auto_offset_reset: OffsetReset = OffsetReset.ERROR


class Memberships:
    """What members over HTTP ask for.

    Args:
        database: Where.
        feeds: Tell when events came.
        listener: Listens for this process.
        stopping: Set when the server stops.
        grace_s: Seconds that a member has to finish a partition that is to go to another.
    """

    def __init__(
        self, database: Database, feeds: Broadcaster, listener: Listener, stopping: asyncio.Event, grace_s: float
    ) -> None:
        self._database = database
        self._feeds = feeds
        self._listener = listener
        self._stopping = stopping
        self._grace_s = grace_s
        self._waiting: dict[str, set[_Waiter]] = {}
        self._revoked_at: OrderedDict[tuple[str, str, int, int], float] = OrderedDict()
        self._evicted_at: OrderedDict[str, float] = OrderedDict()

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

    async def beat(self, seat: Seat, session: UUID, busy: Collection[int] | None = None) -> Held:
        """Keep a member alive; give up what it has to and take what it may.

        Args:
            seat: The member.
            session: Of its membership.
            busy: What it still works on; None: everything that it has.

        Raises:
            NotFound: It is no member, or no longer.
        """
        database, group = self._database, seat.group_name
        await self._evict(group)
        for _ in range(_MOST_ROUNDS):
            beat = await ownership.heartbeat(database, group, seat.member, session)
            if not beat.known:
                if await streams.find_stream(database, seat.stream.name) is None:
                    raise NotFound(f"no such stream: {seat.stream.name}", hint="It was dropped.")
                raise NotFound(
                    f"{seat.member} is no member of consumer group {seat.group} of stream {seat.stream.name}",
                    hint="It was silent for too long, or left: join again.",
                )
            moved = not beat.balanced and await balance.rebalance(database, group, None) > 0
            ended = {slot: beat.owned[slot] for slot in beat.revoked if self._is_over(seat, slot, beat.owned[slot], busy)}
            if ended:
                await ownership.release(database, group, seat.member, ended)
            taken = {}
            if beat.available:
                taken = await ownership.take(database, group, seat.member, session, sorted(beat.available))
            if not moved and not ended and not taken:
                break
        return Held(beat.owned, sorted(beat.revoked), beat.dead_after_s)

    async def read(
        self, seat: Seat, session: UUID, reading: Reading, within: float, gone: Callable[[], Awaitable[bool]]
    ) -> tuple[Held, list[EventBatch]]:
        """The next events of what a member has; when there are none, wait up to `within` seconds.

        Args:
            seat: The member.
            session: Of its membership.
            reading: What it asks for.
            within: Seconds to wait.
            gone: Whether the client has left.

        Raises:
            NotFound: It is no member, or no longer.
            OffsetGone: Retention dropped what comes next.
        """
        deadline = time.monotonic() + within
        waiter = _Waiter()
        known: set[int] = set()
        async with self._listening(seat, waiter), self._feeds.waiting(seat.stream, waiter.event) as feed:
            while True:
                waiter.stirred = False
                held = await self.beat(seat, session, reading.busy)
                batches, at, later = await self._batches(seat, held, reading)
                left = deadline - time.monotonic()
                # One that waits hears at once what it has to finish.
                told = not known.issuperset(held.revoked)
                if batches or told or left <= 0 or self._stopping.is_set() or await gone():
                    return held, batches
                known = set(reading.busy) & set(held.revoked)
                pause = _LATER_S if later else held.dead_after_s / _BEATS_IN_DEAD_AFTER * random.uniform(0.7, 1.0)
                await waiter.wait(feed, at, min(left, pause), self._stopping)

    async def _batches(self, seat: Seat, held: Held, reading: Reading) -> tuple[list[EventBatch], dict[int, int], bool]:
        """Batches; where each partition that may be read is; whether some have to wait for others."""
        wanted = {slot: epoch for slot, epoch in held.owned.items() if slot not in held.revoked and slot not in reading.busy}
        if not wanted:
            return [], {}, False
        begun = await streams.begin_partitions(self._database, seat.stream.name, seat.group, seat.member, wanted)
        at = {
            partition: max(found.next_offset, reading.ahead.get(partition, 0))
            for partition, found in begun.items()
            if not found.paused and not found.waits
        }
        batches = [
            _batch(partition, wanted[partition], begun[partition], pieces)
            for partition, pieces in (await self._pieces(seat, at, reading)).items()
        ]
        return batches, at, any(found.waits for found in begun.values())

    async def _pieces(self, seat: Seat, at: dict[int, int], reading: Reading) -> dict[int, list[Piece]]:
        """Up to so many events, shared by the partitions; what some do not need the others get."""
        found: dict[int, list[Piece]] = {}
        size = 0
        left, rest = reading.limit, list(at)
        random.shuffle(rest)
        while left > 0 and rest and size < _MOST_BYTES:
            share = max(1, left // len(rest))
            some = rest[:left]
            chunks = await self._chunks(
                seat, {partition: at[partition] for partition in some}, share, reading.auto_offset_reset, at
            )
            full: list[int] = []
            for partition in some:
                taken = 0
                for chunk in chunks.get(partition, ()):
                    if size >= _MOST_BYTES:
                        # Compressed ones may become large: what is behind is for the next call.
                        break
                    whole = piece_of(seat.stream, chunk, at[partition])
                    piece = for_group(whole, chunk, seat.group).first_of(share - taken)
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
        self, seat: Seat, wanted: dict[int, int], limit: int, auto_offset_reset: OffsetReset, at: dict[int, int]
    ) -> dict[int, list[Chunk]]:
        try:
            rows = await streams.read_chunks(self._database, seat.stream.name, wanted, limit, _MOST_BYTES // len(wanted))
        except OffsetGone:
            if auto_offset_reset is OffsetReset.ERROR:
                raise
            bounds = await streams.bounds(self._database, seat.stream.name)
            for partition, offset in wanted.items():
                if offset < bounds[partition].first:
                    at[partition] = (
                        bounds[partition].first if auto_offset_reset is OffsetReset.EARLIEST else bounds[partition].next
                    )
            again = {partition: at[partition] for partition in wanted}
            rows = await streams.read_chunks(self._database, seat.stream.name, again, limit, _MOST_BYTES // len(wanted))
        chunks: dict[int, list[Chunk]] = {}
        for chunk in rows:
            chunks.setdefault(chunk.partition, []).append(chunk)
        return chunks

    def _is_over(self, seat: Seat, slot: int, epoch: int, busy: Collection[int] | None) -> bool:
        """Whether a partition that is to go to another member is to be given up now."""
        place = (seat.group_name, seat.member, slot, epoch)
        now = time.monotonic()
        since = self._revoked_at.setdefault(place, now)
        while len(self._revoked_at) > _MOST_REMEMBERED:
            self._revoked_at.popitem(last=False)
        if (busy is not None and slot not in busy) or now - since >= self._grace_s:
            del self._revoked_at[place]
            return True
        return False

    async def _evict(self, group: str) -> None:
        """Evict silent members of the group, now and then."""
        now = time.monotonic()
        if now - self._evicted_at.get(group, 0.0) < _EVICT_EVERY_S:
            return
        self._evicted_at[group] = now
        self._evicted_at.move_to_end(group)
        while len(self._evicted_at) > _MOST_REMEMBERED:
            self._evicted_at.popitem(last=False)
        await balance.evict(self._database, group, None)

    @asynccontextmanager
    async def _listening(self, seat: Seat, waiter: _Waiter) -> AsyncIterator[None]:
        channel = f"penstock_{seat.member}"
        self._listener.add(channel)
        waiters = self._waiting.setdefault(seat.group_name, set())
        waiters.add(waiter)
        try:
            yield
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiting.get(seat.group_name) is waiters:
                del self._waiting[seat.group_name]
            self._listener.remove(channel)


class _Waiter:
    """A read that waits: for events, or for something about its group."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.stirred = False

    def stir(self) -> None:
        self.stirred = True
        self.event.set()

    async def wait(self, feed: Feed, at: Mapping[int, int], within: float, stopping: asyncio.Event) -> None:
        until = time.monotonic() + within
        while (rest := until - time.monotonic()) > 0:
            self.event.clear()
            came = any(feed.ends.get(partition, 0) > offset for partition, offset in at.items())
            if came or self.stirred or stopping.is_set():
                return
            await happens(self.event, rest)


def _batch(partition: int, epoch: int, begun: Begun, pieces: Sequence[Piece]) -> EventBatch:
    events = [event for piece in pieces for event in piece.events]
    return EventBatch(partition, epoch, begun.revision, events, pieces[0].first, pieces[-1].next)
