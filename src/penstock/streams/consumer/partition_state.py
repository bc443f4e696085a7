"""The state of a partition that this process owns: its fetched events and its offsets.

The positions from the end of the partition to its beginning: `fetched` (the next offset to fetch), the buffered events, the batch
that was delivered to the handler, `done` (all events before this offset are done), `committed`.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import Any, Generic, TypeVar

from penstock.core.polling import wait_for_event
from penstock.groups.trials import SUSPECT
from penstock.streams.codec import Encoding
from penstock.streams.consumer.batch import Batch
from penstock.streams.group_queries import Begun, Commit
from penstock.streams.models import Chunk, Event, has_events_for_others, is_for

T = TypeVar("T")
# The same values as in `penstock.lose_partitions`.
WIDEST_DOUBT = 1000
_CRASHING = 5


class PartitionState(Generic[T]):
    """One owned partition.

    Args:
        partition: Number of the partition.
        epoch: Epoch under which this process owns it.
        encoding: Decodes its events.
        prefetch: Number of events to buffer.
        group: Name of the consumer group; events that are for another group or erased are skipped.
        on_progress: Called when events were taken, skipped or done.
    """

    def __init__(
        self,
        partition: int,
        epoch: int,
        encoding: Encoding[T],
        prefetch: int,
        group: str,
        on_progress: Callable[[PartitionState[T]], None],
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
        self.delivered: Batch[T] | None = None
        self.attempts = 0
        # The offset up to which its events are on trial, how many at a time, whether that number grows, the offset of an event
        # that has crashed its workers and is not handled any more, and whether a trial is under way.
        self.suspect_until: int | None = None
        self.trial_size = 1
        self.trials_grow = False
        self.crashing_offset: int | None = None
        self.on_trial = False
        self._recorded_at = -inf
        self._record_gap_s = 1.0
        self.task: asyncio.Task[None] | None = None
        self._encoding = encoding
        self._prefetch = prefetch
        self._chunks: deque[tuple[Chunk, int]] = deque()  # each with its size in bytes
        self._current: Iterator[Event[Any]] = iter(())
        self._decoded = 0
        self._returned: deque[Event[Any]] = deque()
        self._buffered = 0
        self._group = group
        self._on_progress = on_progress
        self._gaps: list[tuple[int, int]] = []
        self._changed = asyncio.Event()
        self._flushed = asyncio.Event()

    def begin(self, begun: Begun) -> None:
        """Continue at the committed offset of the group."""
        self.begun = True
        self.revision = begun.revision
        self.paused = begun.paused
        self.fetched = self.done = self.committed = begun.next_offset
        self.attempts = 0
        self.delivered = None
        self.suspect_until = self.crashing_offset = None
        if begun.crashes >= SUSPECT and begun.crashed_at is not None and begun.next_offset < begun.crashed_at + begun.doubt:
            self.suspect_until = begun.crashed_at + begun.doubt
            self.trial_size, self.trials_grow = 1, begun.crashes == SUSPECT and begun.doubt >= WIDEST_DOUBT
            if begun.crashes >= _CRASHING and begun.next_offset == begun.crashed_at:
                self.crashing_offset = begun.crashed_at
        self._chunks.clear()
        self._current = iter(())
        self._decoded = begun.next_offset
        self._returned.clear()
        self._gaps.clear()
        self._buffered = self.bytes = 0

    @property
    def has_undecodable(self) -> bool:
        """Whether a payload of the stream did not match its type, so that events have to be checked for it."""
        return self._encoding.suspect

    def progressed(self) -> None:
        """Report that events were taken, skipped or done."""
        self._on_progress(self)

    @property
    def room(self) -> int:
        """Number of events to fetch now."""
        if not self.begun or self.paused or self.draining or self._buffered > self._prefetch // 2:
            return 0
        return self._prefetch - self._buffered

    def add(self, chunk: Chunk) -> None:
        """Buffer a fetched chunk, from `fetched` on."""
        if chunk.next_offset <= self.fetched:
            return
        self._buffered += chunk.events - (max(0, self.fetched - chunk.first_offset) if chunk.offsets is None else 0)
        size = _size(chunk)
        self._chunks.append((chunk, size))
        self.bytes += size
        self.fetched = chunk.next_offset
        self._changed.set()

    def skip(self, offset: int) -> None:
        """Continue to fetch at an offset before which retention dropped events. The gap is done when the events before it are."""
        insort(self._gaps, (self.fetched, offset))
        self.fetched = offset
        self.finished(self.done)

    def finished(self, next_offset: int) -> None:
        """Record that all events before an offset are done."""
        self.done = max(self.done, next_offset)
        while self._gaps and self._gaps[0][0] <= self.done:
            self.done = max(self.done, self._gaps.pop(0)[1])

    def changed(self) -> None:
        """Wake the waiting task, because the partition was paused or resumed, or is draining."""
        self._changed.set()

    async def take(self, max_batch_size: int, linger: float) -> list[Event[T]]:
        """Take up to `max_batch_size` events that arrive within `linger` seconds after the first; none when it is draining."""
        events: list[Event[T]] = []
        loop = asyncio.get_running_loop()
        until = 0.0
        while not self.draining:
            self._changed.clear()
            if not self.paused:
                had = len(events)
                events += self._ready(max_batch_size - had)
                if events and had == 0:
                    until = loop.time() + linger
            if len(events) >= max_batch_size or (events and loop.time() >= until):
                return events
            try:
                if events:
                    await wait_for_event(self._changed, until - loop.time())
                else:
                    await self._changed.wait()
            except asyncio.CancelledError:
                # The next request gets them.
                self.put_back(events)
                raise
        self.put_back(events)
        return []

    def put_back(self, events: list[Event[T]]) -> None:
        """Put back events that were taken and not handled, as the next ones to take."""
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
                chunk, size = self._chunks[0]
                try:
                    self._current = self._encoding.each(chunk, self._decoded)
                    if has_events_for_others(chunk):
                        self._current = self._own(self._current, self._decoded)
                except Exception:
                    # The chunk stays in the buffer, so no event is skipped: the next call fails again.
                    self._returned.extendleft(reversed(events))
                    raise
                self._chunks.popleft()
                self.bytes -= size
                self._decoded = chunk.next_offset
        self._buffered -= len(events)
        return events

    def _own(self, events: Iterator[Event[Any]], at: int) -> Iterator[Event[Any]]:
        """The events that are for this group; another event is done when the events before it are."""
        for event in events:
            if is_for(event.headers, self._group):
                yield event
            else:
                self._buffered -= 1
                insort(self._gaps, (at, event.offset + 1))
                self.finished(self.done)
                self.progressed()
            at = event.offset + 1

    async def sleep(self, seconds: float) -> None:
        """Wait for a time, or until the partition is draining."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while not self.draining and (left := until - loop.time()) > 0:
            self._changed.clear()
            if self.draining:
                return
            await wait_for_event(self._changed, left)

    # -- committing

    @property
    def commit(self) -> Commit | None:
        """The commit of what is done; None when all of it is committed."""
        if not self.begun or self.done <= self.committed:
            return None
        return Commit(self.partition, self.epoch, self.revision, self.done)

    def should_record_failure(self, now: float) -> bool:
        """Whether to record a failure in the database: the first of an event, and the later ones less and less often.

        At most one failure is recorded in a second; those of one event after 1, 2, 4, ... 60 seconds.
        """
        if self.attempts == 1:
            self._record_gap_s = 1.0
        if now - self._recorded_at < self._record_gap_s:
            return False
        self._recorded_at = now
        self._record_gap_s = min(self._record_gap_s * 2, 60.0) if self.attempts > 1 else 1.0
        return True

    def was_committed(self, next_offset: int) -> None:
        """Record that the database has committed all events before an offset."""
        self.committed = max(self.committed, next_offset)
        if self.commit is None:
            self._flushed.set()

    async def wait_until_committed(self) -> None:
        """Wait until all that is done is committed."""
        while self.commit is not None:
            self._flushed.clear()
            await self._flushed.wait()


def _size(chunk: Chunk) -> int:
    return sum(map(len, filter(None, chunk.data or chunk.bytes or ())))
