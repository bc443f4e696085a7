"""Streams, for threads without an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from penstock.callers import append_through_blocking
from penstock.consuming.batch import Batch
from penstock.consuming.pull import Consumption
from penstock.event import Appended, Event, Gone, HeldBack, Lag, NewEvent, Position
from penstock.streams import Stream
from penstock.sync.loop import OnLoop
from penstock.tail import Start

T = TypeVar("T")


class SyncStreams(OnLoop):
    """Append, read, follow, consume, steer. A stream is given as it was declared."""

    def append(
        self,
        stream: Stream[T],
        data: T,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        time: datetime | None = None,
        connection: Any = None,
    ) -> Position:
        """Append one event. See `penstock.streams.Stream.append`."""
        return self.append_many(stream, [NewEvent(data, key, headers, time)], connection=connection)[0]

    def append_many(self, stream: Stream[T], items: Iterable[NewEvent[T] | T], *, connection: Any = None) -> Appended:
        """Append events, all or none. See `penstock.streams.Stream.append_many`.

        With `connection` the stream has to exist: declare it before, for example with `declare`.
        """
        if connection is None:
            return self._call(stream.append_many(items))
        return append_through_blocking(connection, stream.name, stream.encoding.columns(items))

    def load(self, stream: Stream[T], items: Iterable[NewEvent[T] | T], *, timeout: timedelta = timedelta(hours=1)) -> int:
        """Append any number of events by COPY, all or none. See `penstock.streams.Stream.load`."""
        return self._call(stream.load(items), timeout)

    def declare(self, stream: Stream[Any]) -> None:
        """Create the stream in the database, or change its options. See `penstock.streams.Stream.declare`."""
        self._call(stream.declare())

    def read_events(self, stream: Stream[T], partition: int, offset: int = 0, limit: int = 100) -> list[Event[T]]:
        """Up to `limit` events of a partition from an offset on. See `penstock.streams.Stream.read`."""
        return self._call(stream.read(partition, offset, limit))

    def tail(
        self,
        stream: Stream[T],
        start: Start = "latest",
        *,
        partitions: Iterable[int] | None = None,
        gone: Gone | str = Gone.ERROR,
        patience: timedelta | None = None,
    ) -> Iterator[Event[T]]:
        """Follow the stream without a group. See `penstock.streams.Stream.tail`.

        Args:
            stream: The stream.
            start: "earliest", "latest", a time, or the offset of each partition.
            partitions: Only these; None: all.
            gone: What to do when retention overtakes it.
            patience: Ends when nothing came for so long; None: never.
        """
        following = stream.tail(start, partitions=partitions, gone=gone)
        try:
            while (event := self._call(_next(following, patience), forever=True)) is not None:
                yield event
        finally:
            self._call(following.aclose())

    def consume(
        self,
        stream: Stream[T],
        group: str,
        *,
        size: int = 100,
        within: float = 0.0,
        start: Literal["earliest", "latest"] = "earliest",
        gone: Gone | str = Gone.ERROR,
        id: str | None = None,
        patience: timedelta | None = None,
    ) -> SyncConsumption[T]:
        """Consume as a member of a group, pulling batches. See `penstock.streams.Stream.consume`.

            with app.sync.consume(orders, "billing") as batches:
                for batch in batches:
                    ...

        A batch is done when the next one is asked for, or `batches.done()` is called; `batch.commit_blocking(connection)` commits
        it in a transaction of yours.

        Args:
            stream: The stream.
            group: Name of the group.
            size: Most events in a batch.
            within: Seconds to wait after the first event for more.
            start: Where a new group starts.
            gone: What to do when retention dropped what comes next.
            id: Unique in the group; None: a new one.
            patience: The iteration ends when no batch came for so long; None: never.
        """
        pulling = stream.consume(group, size=size, within=within, start=start, gone=gone, id=id)
        return SyncConsumption(self, pulling, patience)

    def lag(self, stream: Stream[Any], group: str | None = None) -> list[Lag]:
        """How far a group (None: each) is in each partition. See `penstock.streams.Stream.lag`."""
        return self._call(stream.lag(group))

    def seek(self, stream: Stream[Any], group: str, to: Start) -> None:
        """Move a group. See `penstock.streams.Stream.seek`."""
        self._call(stream.seek(group, to))

    def pause_group(
        self, stream: Stream[Any], group: str, partitions: Sequence[int] | None = None, *, because: str | None = None
    ) -> int:
        """Give a group no more events of partitions. See `penstock.streams.Stream.pause`."""
        return self._call(stream.pause(group, partitions, because=because))

    def resume_group(self, stream: Stream[Any], group: str, partitions: Sequence[int] | None = None) -> int:
        """End a pause or quarantine. See `penstock.streams.Stream.resume`."""
        return self._call(stream.resume(group, partitions))

    def drop_stream(self, stream: Stream[Any] | str, *, force: bool = False) -> None:
        """Drop a stream, given as it was declared or by its name. See `penstock.streams.Stream.drop`."""
        self._call(self._app.drop_stream(stream, force=force) if isinstance(stream, str) else stream.drop(force=force))

    def held_back(self, stream: Stream[Any], group: str | None = None) -> list[HeldBack]:
        """What a growth waits for in vain. See `penstock.streams.Stream.held_back`."""
        return self._call(stream.held_back(group))

    def drop_group(self, stream: Stream[Any], group: str) -> None:
        """Forget a group. See `penstock.streams.Stream.drop_group`."""
        self._call(stream.drop_group(group))


class SyncConsumption(Generic[T]):
    """A member of a consumer group whose batches are pulled by a thread. Made by `SyncStreams.consume`."""

    def __init__(self, loop: OnLoop, pulling: Consumption[T], patience: timedelta | None) -> None:
        self._loop = loop
        self._pulling = pulling
        self._patience = patience

    @property
    def partitions(self) -> list[int]:
        """The partitions that are this member's at this moment."""
        return self._pulling.partitions

    def __enter__(self) -> SyncConsumption[T]:
        self._loop._call(self._pulling.open())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop._call(self._pulling.close())

    def done(self) -> None:
        """The batch in hand is done, though no other one is asked for. See `penstock.consuming.pull.Consumption.done`."""
        self._loop._call(self._done())

    async def _done(self) -> None:
        self._pulling.done()

    def __iter__(self) -> Iterator[Batch[T]]:
        while (batch := self._loop._call(_next(self._pulling, self._patience), forever=True)) is not None:
            yield batch


async def _next(items: AsyncIterator[T], patience: timedelta | None) -> T | None:
    """The next one; None when there is none, or none comes in time."""
    try:
        async with asyncio.timeout(None if patience is None else patience.total_seconds()):
            return await anext(items, None)
    except TimeoutError:
        return None
