"""What handlers get: a batch of events of one partition, or the partition's events one after another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from penstock.callers import commit_through, commit_through_blocking
from penstock.event import Event
from penstock.postgres.streams import Commit, commit_as_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fence:
    """Under what a batch was handed out: a commit counts only while that holds."""

    member: str
    epoch: int
    revision: int


class Batch(Sequence[Event[T]], Generic[T]):
    """Events of one partition that follow each other; at least one.

    Attributes:
        stream: Name of the stream.
        group: Name of the consumer group.
        partition: The partition.
        attempt: Which attempt at these events this is, from 1.
    """

    __slots__ = ("_fence", "attempt", "committed", "events", "group", "partition", "stream", "tried")

    def __init__(self, stream: str, group: str, partition: int, events: list[Event[T]], fence: Fence) -> None:
        self.stream = stream
        self.group = group
        self.partition = partition
        self.events = events
        self.attempt = 1
        self.committed = False
        self.tried = False  # to commit; whether the transaction did is for the database to say
        self._fence = fence

    @property
    def first_offset(self) -> int:
        """Offset of the first event."""
        return self.events[0].offset

    @property
    def next_offset(self) -> int:
        """The offset behind the last event."""
        return self.events[-1].offset + 1

    def records(self) -> list[T]:
        """The payloads."""
        return [event.data for event in self.events]

    async def commit(self, connection: Any) -> None:
        """Commit these events in the transaction of a connection, in which the handler writes what it makes of them.

        Both happen, exactly once, or neither does. The connection is one of asyncpg, psycopg, SQLAlchemy or Django.

        Raises:
            Conflict: The partition is no longer this member's, or an earlier attempt at these events did commit though its answer
                was lost; let the transaction roll back, and the error out of the handler.
        """
        self.tried = True
        await commit_through(connection, self.stream, self._as_commit())
        self.committed = True

    def commit_blocking(self, connection: Any) -> None:
        """`commit` for connections that block (psycopg, SQLAlchemy, Django): in plain handlers and in `app.sync.consume`."""
        self.tried = True
        commit_through_blocking(connection, self.stream, self._as_commit())
        self.committed = True

    def _as_commit(self) -> str:
        commit = Commit(self.partition, self._fence.epoch, self._fence.revision, self.next_offset)
        return commit_as_json(self.group, self._fence.member, commit, self.first_offset)

    @overload
    def __getitem__(self, place: int) -> Event[T]: ...
    @overload
    def __getitem__(self, place: slice) -> list[Event[T]]: ...
    def __getitem__(self, place: int | slice) -> Event[T] | list[Event[T]]:
        return self.events[place]

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"<Batch of {self.stream}[{self.partition}], {self.first_offset} to {self.next_offset - 1}>"


class Events(Generic[T]):
    """The events of one partition, for a handler that iterates itself: called once for each partition that this process owns.

    What was handed out is done when the handler asks for more. The iteration ends when the partition goes to another member.
    """

    def __init__(self, partition: int, batches: Callable[[int, float], AsyncIterator[Batch[T]]]) -> None:
        self.partition = partition
        self._batches = batches

    async def __aiter__(self) -> AsyncIterator[Event[T]]:
        async for batch in self._batches(1, 0.0):
            yield batch[0]

    async def records(self) -> AsyncIterator[T]:
        """The payloads."""
        async for batch in self._batches(1, 0.0):
            yield batch[0].data

    def take(self, size: int, within: float = 0.0) -> Taken[T]:
        """Batches of up to `size` events, of what comes within so many seconds after the first."""
        return Taken(self._batches(size, within))


class Taken(Generic[T]):
    """Batches of a partition."""

    def __init__(self, batches: AsyncIterator[Batch[T]]) -> None:
        self._batches = batches

    def __aiter__(self) -> AsyncIterator[Batch[T]]:
        return self._batches

    async def records(self) -> AsyncIterator[list[T]]:
        """The payloads of each batch."""
        async for batch in self._batches:
            yield batch.records()
