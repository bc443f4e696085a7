"""A partition that this process owns: what was fetched of it, and what is done.

Positions, from the end of the partition to its beginning: `fetched` (the next offset to fetch), then what is buffered, then the
batch that a handler has in hand, then `done` (all before it is done), then `committed`.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Any, Generic, TypeVar

from penstock.consuming.batch import Batch
from penstock.encoding import Encoding
from penstock.event import Chunk, Event, is_for, may_be_replayed
from penstock.ownership.trials import SUSPECT
from penstock.postgres.streams import Begun, Commit
from penstock.waiting import happens

T = TypeVar("T")
# As `penstock.lose_partitions` has them.
WIDEST_DOUBT = 1000
_CONDEMNED = 4


class Part(Generic[T]):
    """One owned partition.

    Args:
        partition: The partition.
        epoch: The epoch under which this process owns it.
        encoding: Decodes its events.
        prefetch: How many events to have ready.
        group: The consumer group; events that are for another one are passed over.
        passed: Called when events were passed over.
    """

    def __init__(
        self,
        partition: int,
        epoch: int,
        encoding: Encoding[T],
        prefetch: int,
        group: str,
        passed: Callable[[Part[T]], None],
    ) -> None:
        self.partition = partition
        self.epoch = epoch
        self.begun = False
        self.paused = False
        self.draining = False
        self.revision = 0
        self.fetched = 0
        self.bytes = 0
        self.done = 0
        self.committed = 0
        self.in_hand: Batch[T] | None = None
        self.attempts = 0
        # Up to which offset its events are on trial, how many at a time, the one that is not handled any more, and whether
        # some are on trial now.
        self.suspect_until: int | None = None
        self.trial_size = 1
        self.trials_grow = False
        self.condemned: int | None = None
        self.alone = False
        self._noted_at = -inf
        self._note_gap_s = 1.0
        self.task: asyncio.Task[None] | None = None
        self._encoding = encoding
        self._prefetch = prefetch
        self._chunks: deque[Chunk] = deque()
        self._current: Iterator[Event[Any]] = iter(())
        self._decoded = 0
        self._returned: deque[Event[Any]] = deque()
        self._buffered = 0
        self._group = group
        self._passed = passed
        self._gaps: list[tuple[int, int]] = []
        self._changed = asyncio.Event()
        self._flushed = asyncio.Event()

    def begin(self, begun: Begun) -> None:
        """Go on from where the group is."""
        self.begun = True
        self.revision = begun.revision
        self.paused = begun.paused
        self.fetched = self.done = self.committed = begun.next_offset
        self.attempts = 0
        self.in_hand = None
        self.suspect_until = self.condemned = None
        if begun.crashes >= SUSPECT and begun.crashed_at is not None and begun.next_offset < begun.crashed_at + begun.doubt:
            self.suspect_until = begun.crashed_at + begun.doubt
            self.trial_size, self.trials_grow = 1, begun.crashes == SUSPECT and begun.doubt >= WIDEST_DOUBT
            if begun.crashes >= _CONDEMNED and begun.next_offset == begun.crashed_at:
                self.condemned = begun.crashed_at
        self._chunks.clear()
        self._current = iter(())
        self._decoded = begun.next_offset
        self._returned.clear()
        self._gaps.clear()
        self._buffered = self.bytes = 0

    @property
    def room(self) -> int:
        """How many events to fetch now."""
        if not self.begun or self.paused or self.draining or self._buffered > self._prefetch // 2:
            return 0
        return self._prefetch - self._buffered

    def feed(self, chunk: Chunk) -> None:
        """Take what was fetched, from `fetched` on."""
        if chunk.next_offset <= self.fetched:
            return
        self._buffered += chunk.events - (max(0, self.fetched - chunk.first_offset) if chunk.offsets is None else 0)
        self._chunks.append(chunk)
        self.bytes += _size(chunk)
        self.fetched = chunk.next_offset
        self._changed.set()

    def skip(self, offset: int) -> None:
        """Go on fetching at an offset: retention dropped what is before it. It counts as done when what was fetched is."""
        insort(self._gaps, (self.fetched, offset))
        self.fetched = offset
        self.finished(self.done)

    def finished(self, next_offset: int) -> None:
        """All before an offset is done."""
        self.done = max(self.done, next_offset)
        while self._gaps and self._gaps[0][0] <= self.done:
            self.done = max(self.done, self._gaps.pop(0)[1])

    def changed(self) -> None:
        """Something else changed: it is paused, resumed, or to be drained."""
        self._changed.set()

    async def take(self, size: int, within: float) -> list[Event[T]]:
        """Up to `size` events, of what comes within so many seconds after the first; none when it is to be drained."""
        events: list[Event[T]] = []
        loop = asyncio.get_running_loop()
        until = 0.0
        while not self.draining:
            self._changed.clear()
            if not self.paused:
                had = len(events)
                events += self._ready(size - had)
                if events and had == 0:
                    until = loop.time() + within
            if len(events) >= size or (events and loop.time() >= until):
                return events
            if events:
                await happens(self._changed, until - loop.time())
            else:
                await self._changed.wait()
        self.give_back(events)
        return []

    def give_back(self, events: list[Event[T]]) -> None:
        """Events that were taken and not handled come next again."""
        self._returned.extendleft(reversed(events))
        self._buffered += len(events)

    def _ready(self, most: int) -> list[Event[Any]]:
        events: list[Event[Any]] = []
        while self._returned and len(events) < most:
            events.append(self._returned.popleft())
        while len(events) < most:
            more = list(islice(self._current, most - len(events)))
            events += more
            if not more:
                if not self._chunks:
                    self._buffered = len(events)
                    break
                chunk = self._chunks[0]
                try:
                    self._current = self._encoding.each(chunk, self._decoded)
                    if may_be_replayed(chunk):
                        self._current = self._own(self._current, self._decoded)
                except Exception:
                    # Nothing is passed over: it fails again, and is seen to.
                    self._returned.extendleft(reversed(events))
                    raise
                self._chunks.popleft()
                self.bytes -= _size(chunk)
                self._decoded = chunk.next_offset
        self._buffered -= len(events)
        return events

    def _own(self, events: Iterator[Event[Any]], at: int) -> Iterator[Event[Any]]:
        """Those of the events that are for this group; others count as done when what is before them is."""
        for event in events:
            if is_for(event.headers, self._group):
                yield event
            else:
                self._buffered -= 1
                insort(self._gaps, (at, event.offset + 1))
                self.finished(self.done)
                self._passed(self)
            at = event.offset + 1

    async def nap(self, seconds: float) -> None:
        """Wait, unless the partition is to be drained."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self.draining and (left := until - loop.time()) > 0:
            self._changed.clear()
            if self.draining:
                return
            await happens(self._changed, left)

    # -- committing

    @property
    def commit(self) -> Commit | None:
        """What is to be committed, if anything."""
        if not self.begun or self.done <= self.committed:
            return None
        return Commit(self.partition, self.epoch, self.revision, self.done)

    def to_note(self, now: float) -> bool:
        """Whether to note a failure in the database: the first of an event, and then more and more seldom.

        At most one in a second, whatever fails how often; of one event after 1, 2, 4, ... 60 seconds.
        """
        if self.attempts == 1:
            self._note_gap_s = 1.0
        if now - self._noted_at < self._note_gap_s:
            return False
        self._noted_at = now
        self._note_gap_s = min(self._note_gap_s * 2, 60.0) if self.attempts > 1 else 1.0
        return True

    def was_committed(self, next_offset: int) -> None:
        """All before an offset is in the database as done."""
        self.committed = max(self.committed, next_offset)
        if self.commit is None:
            self._flushed.set()

    async def flushed(self) -> None:
        """Wait until everything that is done is committed."""
        while self.commit is not None:
            self._flushed.clear()
            await self._flushed.wait()


def _size(chunk: Chunk) -> int:
    return sum(map(len, filter(None, chunk.data or chunk.bytes or ())))
