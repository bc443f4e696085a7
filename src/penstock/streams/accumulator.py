"""The accumulator of one stream: it sends one statement at a time, and appends that arrive meanwhile form the next one.

Concurrent appends share a statement and a commit, and a single append waits for nothing. The order of calls is the order of
events. Keys are routed here, the same way as in SQL (see `partitioner`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import DatabaseUnavailable, Outgrown
from penstock.streams.models import Appended, Columns, chunked
from penstock.streams.partitioner import Router
from penstock.streams.queries import Routed

_MOST_AT_ONCE = 10_000
_MOST_PARTITIONS = 1_024
_MOST_BYTES = 8 * 1024 * 1024
Send = Callable[[Routed], Awaitable[Sequence[Any]]]


@dataclass(slots=True)
class _Waiting:
    columns: Columns
    done: asyncio.Future[Appended]
    size: int


class Accumulator:
    """Groups the appends of one stream in this process.

    Args:
        send: Appends routed events and returns the first offsets of their chunks.
        width: Returns the number of partitions.
    """

    def __init__(self, send: Send, width: Callable[[], Awaitable[int]]) -> None:
        self._send = send
        self._width = width
        self._router: Router | None = None
        # A random start: short programs would otherwise all append to the first partition.
        self._turns = itertools.count(random.randrange(_MOST_PARTITIONS))
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def append(self, columns: Columns) -> Appended:
        """Append events, together with those of other calls. Raises the database's error about them."""
        if not columns.payloads:
            return Appended([], [])
        waiting = _Waiting(columns, asyncio.get_running_loop().create_future(), _size(columns.payloads))
        self._waiting.append(waiting)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._run(), name="penstock-accumulator")
        return await waiting.done

    async def append_through(self, columns: Columns, send: Send) -> Appended:
        """Append events alone through another function, such as under the number of a producer."""
        while True:
            router = await self._routed()
            routed, order = route(columns, router, next(self._turns) % router.partitions)
            try:
                return appended(await send(routed), order, len(columns))
            except Outgrown:
                self._router = None

    async def _routed(self) -> Router:
        if self._router is None:
            self._router = Router(await self._width())
        return self._router

    async def _run(self) -> None:
        # The other callers of this iteration of the event loop join the first batch.
        await asyncio.sleep(0)
        while self._waiting:
            batch = [self._waiting.popleft()]
            events, size = len(batch[0].columns), batch[0].size
            while self._waiting and _fits(self._waiting[0], events, size):
                batch.append(self._waiting.popleft())
                events, size = events + len(batch[-1].columns), size + batch[-1].size
            await self._send_batch(batch)

    async def _send_batch(self, batch: list[_Waiting]) -> None:
        batch = [waiting for waiting in batch if not waiting.done.done()]
        if not batch:
            return
        columns = batch[0].columns if len(batch) == 1 else joined([waiting.columns for waiting in batch])
        try:
            receipts = await self.append_through(columns, self._send)
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable):
                # One of the appends is invalid: send each alone, so that it does not fail the others.
                for waiting in batch:
                    await self._send_batch([waiting])
                return
            for waiting in batch:
                if not waiting.done.done():
                    waiting.done.set_exception(error)
            return
        except BaseException:
            for waiting in [*batch, *self._waiting]:
                if not waiting.done.done():
                    waiting.done.set_exception(DatabaseUnavailable("the append was cancelled"))
            self._waiting.clear()
            raise
        if len(batch) == 1:
            if not batch[0].done.done():
                batch[0].done.set_result(receipts)
            return
        first = 0
        for waiting in batch:
            last = first + len(waiting.columns)
            if not waiting.done.done():
                waiting.done.set_result(receipts.sliced(first, last))
            first = last


def _fits(waiting: _Waiting, events: int, size: int) -> bool:
    return events + len(waiting.columns) <= _MOST_AT_ONCE and size + waiting.size <= _MOST_BYTES


def route(columns: Columns, router: Router, turn: int) -> tuple[Routed, list[int] | None]:
    """Sort events by partition. Returns them, and their indexes before (None: unchanged).

    Args:
        columns: Events to route.
        router: Maps their keys to partitions.
        turn: Partition for events without a key.
    """
    keys = columns.keys
    if keys is None or router.partitions == 1:
        partition = turn if keys is None else 0
        counts = list(chunked(len(columns)))
        return Routed(router.partitions, [partition] * len(counts), counts, columns), None
    by_partition: dict[int, list[int]] = {}
    for index, partition in enumerate(router.partitions_of(keys, turn)):
        indexes = by_partition.get(partition)
        if indexes is None:
            by_partition[partition] = [index]
        else:
            indexes.append(index)
    partitions: list[int] = []
    counts = []
    order: list[int] = []
    for partition in sorted(by_partition):
        indexes = by_partition[partition]
        order += indexes
        for count in chunked(len(indexes)):
            partitions.append(partition)
            counts.append(count)

    def sort(column: list[Any] | None) -> list[Any] | None:
        return None if column is None else [column[index] for index in order]

    payloads = columns.payloads
    ordered = Columns(
        [payloads[index] for index in order],
        [keys[index] for index in order],
        sort(columns.headers),
        sort(columns.times),
        columns.bytes,
    )
    return Routed(router.partitions, partitions, counts, ordered), order


def appended(rows: Sequence[Any], order: list[int] | None, events: int) -> Appended:
    """Positions of the events, from the first offsets of the chunks and the indexes of the events before they were sorted."""
    partitions: list[int] = []
    offsets: list[int] = []
    # Chunks of one partition come in order; sorting by partition makes the result independent of the order of partitions.
    for partition, first, count in sorted((row[0], row[1], row[2]) for row in rows):
        partitions += [partition] * count
        offsets += range(first, first + count)
    if order is None or len(offsets) != events:
        return Appended(partitions, offsets)
    partitions_before = [0] * events
    offsets_before = [0] * events
    for at, index in enumerate(order):
        partitions_before[index] = partitions[at]
        offsets_before[index] = offsets[at]
    return Appended(partitions_before, offsets_before)


def joined(parts: Sequence[Columns]) -> Columns:
    """Join several groups of events."""

    def column(name: str) -> list[Any] | None:
        columns = [getattr(part, name) for part in parts]
        if all(values is None for values in columns):
            return None
        return [
            value
            for part, values in zip(parts, columns, strict=True)
            for value in (values if values is not None else [None] * len(part))
        ]

    payloads = [payload for part in parts for payload in part.payloads]
    return Columns(payloads, column("keys"), column("headers"), column("times"), parts[0].bytes)


def _size(payloads: Sequence[Any]) -> int:
    try:
        return sum(map(len, payloads))
    except TypeError:  # tombstones
        return sum(len(payload) for payload in payloads if payload is not None)
