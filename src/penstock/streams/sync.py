"""The blocking half of penstock.streams.stream.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from penstock.streams.models import OffsetReset

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
    from datetime import datetime
    from typing import Any, Literal

    from penstock.core.blocking import BackgroundLoop
    from penstock.streams.consumer.sync import SyncConsumption
    from penstock.streams.group_models import Lag
    from penstock.streams.models import Appended, Bounds, Event, HeldBack, NewEvent, Position, Segment, Start, StreamRecord
T = TypeVar("T")


class SyncStream(Generic[T]):
    """The blocking half of `Stream`, for threads without an event loop: `Stream.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def append(
        self,
        data: T,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        time: datetime | None = None,
        connection: Any = None,
    ) -> Position:
        """Append one event.

        Concurrent appends are committed together. When this returns, the event is on disk.

        Args:
            data: Payload.
            key: Key of the event; events of one key keep their order. None: the stream's own rule for keys, or no key.
            headers: Headers, a mapping that is stored as JSON.
            time: Time at which the event happened.
            connection: Connection through which to append, in its transaction (see `Penstock.enqueue`). The partition is locked
                until the transaction ends, so keep it short.

        Returns:
            Position of the event.

        Raises:
            InvalidInput: The payload is not valid or too large; nothing was written.
            DatabaseUnavailable: It is not known whether the event was written; see `producer` for appends that can be repeated.
        """
        return self._loop.run(
            self._of.append(data, key=key, headers=headers, time=time, connection=connection), connection=connection
        )

    def append_many(self, items: Iterable[NewEvent[T] | T], *, connection: Any = None) -> Appended:
        """Append at most 100,000 events atomically. For more events see `load`.

        Args:
            items: Payloads, or `NewEvent`s for events with a key, headers or a time.
            connection: See `append`. A blocking call through a connection does not declare the stream, which must exist.

        Returns:
            Positions of the events, in the given order.
        """
        return self._loop.run(self._of.append_many(items, connection=connection), connection=connection)

    def producer(self, id: str | None = None, *, sequence: int | None = None) -> SyncProducer[T]:
        """A producer whose appends can be repeated without duplicates.

        Args:
            id: Name of the producer, one for each writer; None: a new one.
            sequence: Number of the last batch that is known to be appended, for a producer that restarts and repeats the batches
                after it. None: the producer continues after the last batch under its name.
        """
        return self._of.producer(id, sequence=sequence).sync

    def load(self, items: Iterable[NewEvent[T] | T] | AsyncIterable[NewEvent[T] | T]) -> int:
        """Append any number of events by COPY, atomically.

        The stream is locked only at the end, while the copied events are appended.

        Args:
            items: Payloads, or `NewEvent`s for events with more than a payload.

        Returns:
            Number of events.

        Raises:
            InvalidInput: An event is not valid, or is larger than `max_event_bytes`; nothing was appended.
            Outgrown: The stream grew meanwhile; nothing was appended, repeat the call.
        """
        return self._loop.run(self._of.load(items), unlimited=True)

    def read(self, partition: int, offset: int = 0, limit: int = 100) -> list[Event[T]]:
        """Read up to `limit` events of a partition from an offset on; none when the partition ends there.

        Args:
            partition: Number of the partition.
            offset: Offset of the first event.
            limit: Largest number of events.

        Raises:
            OffsetGone: Retention dropped the event at the offset.
            NotFound: The partition does not exist.
            Unreadable: The first event cannot be read; `offset + 1` skips it. A later unreadable event ends the result before it.
        """
        return self._loop.run(self._of.read(partition, offset, limit))

    def tail(
        self,
        start: Start = "latest",
        *,
        partitions: Iterable[int] | None = None,
        auto_offset_reset: OffsetReset | str = OffsetReset.ERROR,
        idle_timeout: timedelta | None = None,
    ) -> SyncStreamReader[T]:
        """Follow the stream without a group: an endless iterator over events, in order within each partition.

        Args:
            start: "earliest", "latest", a time, or the offset of each partition.
            partitions: Partitions to follow; None: all, including those that are added later.
            auto_offset_reset: Action when retention dropped the next events.
            idle_timeout: Time without an event after which the iteration ends; None: it does not end.
        """
        return self._of.tail(start, partitions=partitions, auto_offset_reset=auto_offset_reset, idle_timeout=idle_timeout).sync

    def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        return self._loop.run(self._of.segments())

    def consume(
        self,
        group: str,
        *,
        max_batch_size: int = 100,
        linger: timedelta = timedelta(0),
        start: Literal["earliest", "latest"] = "earliest",
        auto_offset_reset: OffsetReset | str = OffsetReset.ERROR,
        id: str | None = None,
        idle_timeout: timedelta | None = None,
    ) -> SyncConsumption[T]:
        """Consume as a member of a group, pulling batches.

            with orders.consume("billing") as batches:
                for batch in batches:
                    ...

        A batch is done when the program requests the next one or calls `batches.done()`; the current batch at `break` is not.

        Args:
            group: Name of the group.
            max_batch_size: Maximum number of events in a batch.
            linger: How long to wait for more events after the first one of a batch.
            start: Position at which a new group starts.
            auto_offset_reset: Action when retention dropped the next events; "error": the iteration raises `OffsetGone`.
            id: Id of the member, unique in the group; None: a new one.
            idle_timeout: Time without a batch after which the iteration ends; None: it does not end.
        """
        return self._of.consume(
            group,
            max_batch_size=max_batch_size,
            linger=linger,
            start=start,
            auto_offset_reset=auto_offset_reset,
            id=id,
            idle_timeout=idle_timeout,
        ).sync

    def lag(self, group: str | None = None) -> list[Lag]:
        """The lag of a group (None: of all groups) in each partition. Raises `NotFound` for an unknown group or stream.

        Args:
            group: Name of the consumer group; None: all groups.
        """
        return self._loop.run(self._of.lag(group))

    def held_back(self, group: str | None = None) -> list[HeldBack]:
        """Paused partitions that keep a group (None: each group) from beginning the partitions of a later growth.

        Args:
            group: Name of the consumer group; None: all groups.
        """
        return self._loop.run(self._of.held_back(group))

    def seek(self, group: str, to: Start) -> None:
        """Move a group to "earliest", "latest", a time, or to offsets by partition. Its consumers continue from there.

        Args:
            group: Name of the consumer group.
            to: "earliest", "latest", a time, or offsets by partition.

        Raises:
            NotFound: The group does not exist.
            InvalidInput: An offset is outside of the stored range.
        """
        self._loop.run(self._of.seek(group, to))

    def pause(self, group: str, partitions: Sequence[int] | None = None, *, reason: str | None = None) -> int:
        """Pause partitions (None: all) of a group until `resume`. Returns how many were not paused before.

        Args:
            group: Name of the consumer group.
            partitions: Numbers of the partitions; None: all.
            reason: Reason for people, shown beside the partition.
        """
        return self._loop.run(self._of.pause(group, partitions, reason=reason))

    def resume(self, group: str, partitions: Sequence[int] | None = None) -> int:
        """End the pause or quarantine of partitions (None: all). Returns how many were paused.

        Args:
            group: Name of the consumer group.
            partitions: Numbers of the partitions; None: all.
        """
        return self._loop.run(self._of.resume(group, partitions))

    def drop_group(self, group: str) -> None:
        """Drop a group. Raises `Conflict` while it has members.

        Args:
            group: Name of the consumer group.
        """
        self._loop.run(self._of.drop_group(group))

    def replay_dead(self, *, offsets: Mapping[int, int] | None = None, limit: int = 1000) -> int:
        """Append dead letters to the stream again, for the consumer group in which they failed; other groups skip them.

        Replayed letters are not replayed again: the group `penstock.replay` of the stream `<name>.dead` records the position.

        Args:
            offsets: Offsets to replay from, by partition of the dead letters, including replayed ones; None: letters that were
                not replayed.
            limit: Maximum number of letters; fewer are replayed when they are large.

        Returns:
            Number of replayed letters. 0: none are left.
        """
        return self._loop.run(self._of.replay_dead(offsets=offsets, limit=limit))

    def declare(self) -> StreamRecord:
        """Create the stream in the database, or change its options when this declaration differs from the last one.

        Every call that writes does so implicitly, once for each database: call this to have the stream again that another program
        has dropped. An existing stream keeps its number of partitions: see `grow`. A declaration without options leaves all
        options of an existing stream unchanged.

        Raises:
            Conflict: The stream exists and stores its payloads in another format.
            InvalidInput: The name or an option is not valid.
        """
        return self._loop.run(self._of.declare())

    def ready(self) -> StreamRecord:
        """The record of the stream, declared if the role may do so. Raises `NotFound` when it does not exist otherwise."""
        return self._loop.run(self._of.ready())

    def grow(self, partitions: int) -> StreamRecord:
        """Give the stream more partitions while it is in use.

        The order of each key is kept: a group begins the new partitions when it has finished what the old ones contain now.

        Args:
            partitions: Number of partitions that the stream gets.

        Raises:
            InvalidInput: The stream has more partitions already.
            DatabaseUnavailable: An append in a long transaction blocked the change; try again.
        """
        return self._loop.run(self._of.grow(partitions))

    def change(self, **options: Any) -> StreamRecord:
        """Change options of the stream in the database, by their names in SQL.

        Args:
            options: Options of `StreamOptions` to change.
        """
        return self._loop.run(self._of.change(**options))

    def drop(self, *, force: bool = False) -> None:
        """Drop the stream with its events, groups and producers.

        Its readers and consumers get `NotFound`. Its dead letters are a separate stream and remain. A later use of this object
        creates the stream again, as does an application that declares it when it starts.

        Args:
            force: Whether to drop the stream also while it has consumers, which then end.

        Raises:
            NotFound: The stream does not exist.
            Conflict: A group has live members.
            DatabaseUnavailable: An append in a long transaction blocked the drop; try again.
        """
        self._loop.run(self._of.drop(force=force))

    def bounds(self) -> dict[int, Bounds]:
        """The stored range of offsets of each partition."""
        return self._loop.run(self._of.bounds())

    def offsets_at(self, start: Start) -> dict[int, int]:
        """The offset in each partition of a starting position.

        Args:
            start: "earliest", "latest", a time, or offsets by partition.
        """
        return self._loop.run(self._of.offsets_at(start))


class SyncProducer(Generic[T]):
    """The blocking half of `Producer`, for threads without an event loop: `Producer.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def append(
        self, data: T, *, key: str | None = None, headers: Mapping[str, Any] | None = None, time: datetime | None = None
    ) -> Position | None:
        """Append one event, and repeat the call until the database has answered. See `Stream.append`.

        Returns:
            Position of the event; None when it is a batch before the last one under this name: it is appended, at a position
            that is not known.
        """
        return self._loop.run(self._of.append(data, key=key, headers=headers, time=time))

    def append_many(self, items: Iterable[NewEvent[T] | T], *, retry: bool = True) -> Appended:
        """Append events atomically and exactly once.

        Args:
            items: At most 1,000 events for each partition.
            retry: Whether to repeat until the database has answered. Otherwise repeat the call with the same events after an
                error.

        Returns:
            Positions of the events; none when they are a batch before the last one under this name, which is appended already.

        Raises:
            Conflict: Another writer uses this id; or the call before was cancelled, so that it is not known whether its events
                were appended, and these events are different ones.
        """
        return self._loop.run(self._of.append_many(items, retry=retry))

    @property
    def id(self) -> str:
        """See `Producer`."""
        return self._of.id

    @property
    def sequence(self) -> int | None:
        """See `Producer`."""
        return self._of.sequence


class SyncStreamReader(Generic[T]):
    """The blocking half of `StreamReader`, for threads without an event loop: `StreamReader.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop
        self._items = loop.each(of, lambda item: item)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event[T]:
        return next(self._items)

    def __enter__(self) -> Self:
        self._loop.run(self._of.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._loop.run(self._of.__aexit__(*error))

    def close(self) -> None:
        """Stop following."""
        self._loop.run(self._of.aclose())
