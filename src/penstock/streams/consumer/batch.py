"""The arguments of handlers: a batch of events of one partition, or an iterator over the partition's events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, overload

from penstock.core.blocking import run_without_loop
from penstock.core.iteration import Iteration
from penstock.streams.group_queries import Commit, commit_as_json
from penstock.streams.models import Event
from penstock.streams.transactional import commit_through

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fence:
    """The member, epoch and revision under which a batch was delivered; the database accepts its commit only while they hold."""

    member: str
    epoch: int
    revision: int


class Batch(Sequence[Event[T]], Generic[T]):
    """One or more consecutive events of one partition.

    Attributes:
        stream: Name of the stream.
        group: Name of the consumer group.
        partition: Number of the partition.
        attempt: Number of the attempt at these events, from 1.
        fence: Member, epoch and revision under which the batch was delivered.
    """

    __slots__ = ("attempt", "committed", "events", "fence", "group", "partition", "stream", "tried")

    def __init__(self, stream: str, group: str, partition: int, events: list[Event[T]], fence: Fence) -> None:
        self.stream = stream
        self.group = group
        self.partition = partition
        self.events = events
        self.attempt = 1
        self.committed = False
        self.tried = False  # whether the handler called commit; only the database knows whether the transaction committed
        self.fence = fence

    @property
    def first_offset(self) -> int:
        """Offset of the first event."""
        return self.events[0].offset

    @property
    def next_offset(self) -> int:
        """Offset behind the last event."""
        return self.events[-1].offset + 1

    def records(self) -> list[T]:
        """Payloads of the events."""
        return [event.data for event in self.events]

    async def commit(self, connection: Any) -> None:
        """Commit these events in the transaction in which the handler writes its results.

        The commit and the writes take effect together, exactly once, or not at all. The connection is one of asyncpg, psycopg,
        SQLAlchemy or Django.

        Args:
            connection: Connection of the handler, with an open transaction.

        Raises:
            Conflict: This member no longer owns the partition, or an earlier attempt at these events did commit though its answer
                was lost. Let the transaction roll back, and the error leave the handler.
        """
        self.tried = True
        await commit_through(connection, self.stream, self._as_commit())
        self.committed = True

    def commit_blocking(self, connection: Any) -> None:
        """`commit` for connections that block (psycopg, SQLAlchemy, Django): in plain handlers and in `orders.sync.consume`."""
        run_without_loop(self.commit(connection))

    def _as_commit(self) -> str:
        commit = Commit(self.partition, self.fence.epoch, self.fence.revision, self.next_offset)
        return commit_as_json(self.group, self.fence.member, commit, self.first_offset)

    @overload
    def __getitem__(self, index: int) -> Event[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event[T]]: ...
    def __getitem__(self, index: int | slice) -> Event[T] | list[Event[T]]:
        return self.events[index]

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<Batch of {self.stream}[{self.partition}], {self.first_offset} to {self.next_offset - 1}>"


class Events(Generic[T]):
    """The events of one partition, for a handler that iterates itself and is called once for each partition of this process.

    Delivered events are done when the handler requests the next ones. The iteration ends when the partition is revoked; it goes
    on after a request that was cancelled, as by `asyncio.wait_for(anext(...), 5)`.

    Attributes:
        partition: Number of the partition.
    """

    def __init__(self, partition: int, next_batch: Callable[[int, float], Awaitable[Batch[T]]]) -> None:
        self.partition = partition
        self._next_batch = next_batch

    def __aiter__(self) -> AsyncIterator[Event[T]]:
        return Iteration(self._next)

    async def _next(self) -> Event[T]:
        return (await self._next_batch(1, 0.0))[0]

    def records(self) -> AsyncIterator[T]:
        """Payloads of the events."""

        async def record() -> T:
            return (await self._next()).data

        return Iteration(record)

    def take(self, max_batch_size: int, linger: timedelta = timedelta(0)) -> Taken[T]:
        """Batches of up to `max_batch_size` events that arrive within `linger` after the first.

        Args:
            max_batch_size: Largest number of events in a batch.
            linger: How long the first event of a batch waits for others.
        """
        return Taken(partial(self._next_batch, max_batch_size, linger.total_seconds()))


class Taken(Generic[T]):
    """Batches of a partition."""

    def __init__(self, next_batch: Callable[[], Awaitable[Batch[T]]]) -> None:
        self._next_batch = next_batch
        self._batches = Iteration(next_batch)

    def __aiter__(self) -> AsyncIterator[Batch[T]]:
        return self._batches

    def records(self) -> AsyncIterator[list[T]]:
        """Payloads of each batch."""

        async def records() -> list[T]:
            return (await self._next_batch()).records()

        return Iteration(records)
