"""Streams: ordered, partitioned logs of events, shared by groups of consumers.

    orders = app.stream("orders", Order, partitions=16, key="customer")

    await orders.append(Order(customer="acme", total=3))

    @app.consumer(orders, group="billing")
    async def bill(event: Event[Order]) -> None: ...

Events of one key are in one partition, in the order in which they were appended.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from penstock.appender import Appender, route
from penstock.callers import append_through
from penstock.checks import check_flag, check_number, check_time
from penstock.consuming.options import ConsumerOptions
from penstock.consuming.pull import Consumption
from penstock.encoding import Encoding, Undecodable, unreadable
from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.event import (
    Appended,
    Bounds,
    Event,
    Gone,
    HeldBack,
    Lag,
    NewEvent,
    Position,
    Retention,
    Segment,
    StreamOptions,
    StreamRecord,
    held_back,
)
from penstock.keys import KeyOf, check_key
from penstock.postgres import streams
from penstock.postgres.database import lacks_rights
from penstock.postgres.streams import Routed
from penstock.producer import Producer
from penstock.routing import Router
from penstock.tail import Start, Tail

if TYPE_CHECKING:
    from penstock.app import Penstock

T = TypeVar("T")
_LOAD_ROUND = 100_000
_GROUP = re.compile(r"(?![.]{1,2}$)[A-Za-z0-9_.-]{1,90}")


class Stream(Generic[T]):
    """A declared stream. Made by `Penstock.stream`."""

    def __init__(
        self,
        app: Penstock,
        name: str,
        payload: Any,
        partitions: int,
        key: str | KeyOf | None,
        options: StreamOptions,
        key_optional: bool = False,
    ) -> None:
        self.app = app
        self.name = name
        self.partitions = partitions
        self.options = options
        self.encoding: Encoding[T] = Encoding(
            name, payload, key, options.format == "bytes", options.compression is not None, key_optional
        )
        # One for each loop: handlers in threads may append through `Penstock.sync`, and loops end.
        self._appenders: dict[asyncio.AbstractEventLoop, Appender] = {}
        # Of a stream that was looked up: it is as it is, and nothing is declared.
        self._found: StreamRecord | None = None

    # -- declaring

    async def declare(self) -> StreamRecord:
        """Create the stream in the database, or change its options when this declaration is a new one.

        Every call that writes does it by itself, once for each database. The partitions of a stream that exists are left alone:
        see `grow`. A declaration without options leaves all options of a stream that exists as they are.

        Raises:
            Conflict: There is one that stores its payloads in another way.
            InvalidInput: The name or an option is not valid.
        """
        if self._found is not None:
            return self._found
        database = await self.app.database()
        record: StreamRecord | None = database.declared.get(("stream", self.name))
        if record is None:
            record = await streams.declare_stream(database, self.name, self.partitions, self.options.declaration())
            database.declared["stream", self.name] = record
        self.encoding.largest = record.options.max_event_bytes
        return record

    async def ready(self) -> StreamRecord:
        """The stream in the database, declared if the role may. Raises `NotFound` when it is not there and the role may not."""
        try:
            return await self.declare()
        except PenstockError as error:
            if not lacks_rights(error):
                raise
        record = await streams.find_stream(await self.app.database(), self.name)
        if record is None:
            raise NotFound(f"no such stream: {self.name}", hint="Declare it: penstock declare MODULE:APP, with a role that may.")
        return await self._now(record)

    @classmethod
    async def found(cls, app: Penstock, name: str, payload: Any = Any) -> Stream[Any]:
        """A stream that exists, as it is. Raises `NotFound`."""
        record = await streams.find_stream(await app.database(), name)
        if record is None:
            raise NotFound(f"no such stream: {name}", hint=f"Create it first: penstock streams create {name}")
        raw = record.options.format == "bytes" and payload is Any
        stream: Stream[Any] = Stream(app, name, bytes if raw else payload, record.partitions, None, record.options)
        stream._found = record
        stream.encoding.largest = record.options.max_event_bytes
        return stream

    async def grow(self, partitions: int) -> StreamRecord:
        """Give the stream more partitions while it is in use.

        The order of each key is kept: a group begins with the new partitions when it has finished what the old ones hold now.

        Raises:
            InvalidInput: It has as many or more already.
            DatabaseUnavailable: An append in a long transaction held it up; try again.
        """
        await self.ready()
        return await self._now(await streams.grow_stream(await self.app.database(), self.name, partitions))

    async def change(self, **options: Any) -> StreamRecord:
        """Change options of the stream in the database, by their names in SQL."""
        await self.ready()
        return await self._now(await streams.change_stream(await self.app.database(), self.name, options))

    async def drop(self, *, force: bool = False) -> None:
        """Drop the stream with its events, groups and producers.

        Whoever reads or consumes it gets `NotFound`. Its dead letters are a stream of their own and stay. Used again after that,
        this object makes the stream anew, as does an application that declares it when it starts.

        Args:
            force: Also while consumers of it run; they end.

        Raises:
            NotFound: There is no such stream.
            Conflict: A group has live members.
            DatabaseUnavailable: An append in a long transaction held it up; try again.
        """
        database = await self.app.database()
        await streams.drop_stream(database, self.name, force=force)
        database.declared.pop(("stream", self.name), None)
        self._found = None
        self._appenders.clear()

    async def _now(self, record: StreamRecord) -> StreamRecord:
        """Remember what the stream has become."""
        self.encoding.largest = record.options.max_event_bytes
        if self._found is not None:
            self._found = record
        (await self.app.database()).declared["stream", self.name] = record
        return record

    # -- appending

    async def append(
        self,
        data: T,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        time: datetime | None = None,
        connection: Any = None,
    ) -> Position:
        """Append one event.

        Appends that are made at the same time are committed together. When this returns the event is on disk.

        Args:
            data: The payload.
            key: Events of one key keep their order; None: the stream's own rule, or none.
            headers: Anything beside the payload, as JSON.
            time: When it happened.
            connection: Append through this connection, in its transaction (see `Penstock.enqueue`); the partition is locked until
                it ends, so keep it short.

        Returns:
            Where the event is.

        Raises:
            InvalidInput: The payload does not fit, or is too large; nothing was written.
            DatabaseUnavailable: Not known whether it was written; see `producer` for appends that can be repeated.
        """
        return (await self.append_many([NewEvent(data, key, headers, time)], connection=connection))[0]

    async def append_many(self, items: Iterable[NewEvent[T] | T], *, connection: Any = None) -> Appended:
        """Append events, all or none: payloads, or `NewEvent` for what else an event can have. At most 100,000; see `load`.

        Args:
            items: The events.
            connection: See `append`.

        Returns:
            Where the events are, in the order in which they were given.
        """
        columns = self.encoding.columns(items)
        await self.ready()
        if connection is None:
            return await self.appender().append(columns)
        return await append_through(connection, self.name, columns)

    def producer(self, id: str | None = None, *, sequence: int | None = None) -> Producer[T]:
        """A producer whose appends can be repeated without being there twice.

        Args:
            id: Name of the producer, one for each writer; None: a new one.
            sequence: Number of the last batch that is known to be there, when it starts again and appends what came after it once
                more; None: what is there under its name is left behind, and what it appends is new.
        """
        if id is not None and (not isinstance(id, str) or not 1 <= len(id) <= 200):
            raise InvalidInput(f"the id of a producer must be text of 1 to 200 characters, not {id!r:.100}")
        if sequence is not None:
            check_number("sequence", sequence, 0, 2**63 - 1)
        return Producer(self, id or secrets.token_hex(8), sequence)

    async def load(self, items: Iterable[NewEvent[T] | T] | AsyncIterable[NewEvent[T] | T]) -> int:
        """Append any number of events by COPY, all or none.

        The stream is locked only at the end, while what was copied is put behind what is there.

        Returns:
            How many.

        Raises:
            InvalidInput: An event does not fit, or is larger than `max_event_bytes`; nothing was appended.
            Outgrown: The stream grew meanwhile; nothing was appended, do it again.
        """
        await self.ready()
        database = await self.app.database()
        async with database.transaction() as transaction:
            width = await streams.begin_load(transaction, self.name)
            await streams.copy_load(transaction, self._chunks(items, Router(width)))
            return await streams.end_load(transaction, self.name, width)

    async def _chunks(
        self, items: Iterable[NewEvent[T] | T] | AsyncIterable[NewEvent[T] | T], router: Router
    ) -> AsyncIterator[tuple[Any, ...]]:
        gathered: list[NewEvent[T] | T] = []
        turn = random.randrange(router.partitions)
        async for item in _each(items):
            gathered.append(item)
            if len(gathered) >= _LOAD_ROUND:
                for row in self._rows(gathered, router, turn):
                    yield row
                gathered, turn = [], turn + 1
        for row in self._rows(gathered, router, turn):
            yield row

    def _rows(self, items: Sequence[NewEvent[T] | T], router: Router, turn: int) -> Iterable[tuple[Any, ...]]:
        routed, _ = route(self.encoding.columns(items), router, turn % router.partitions)
        columns, first = routed.columns, 0
        for partition, count in zip(routed.partitions, routed.counts, strict=True):
            last = first + count
            payloads = columns.payloads[first:last]
            yield (
                self.name,
                partition,
                count,
                columns.keys and columns.keys[first:last],
                columns.times and columns.times[first:last],
                columns.headers and columns.headers[first:last],
                None if columns.bytes else payloads,
                payloads if columns.bytes else None,
            )
            first = last

    def appender(self) -> Appender:
        """What groups the appends that are made on this loop."""
        loop = asyncio.get_running_loop()
        appender = self._appenders.get(loop)
        if appender is None:
            for ended in [other for other in self._appenders.copy() if other.is_closed()]:
                self._appenders.pop(ended, None)
            appender = self._appenders[loop] = Appender(self._send, self._width)
        return appender

    async def _send(self, routed: Routed) -> Sequence[Any]:
        return await streams.append_routed(await self.app.database(), self.name, routed)

    async def _width(self) -> int:
        record = await streams.find_stream(await self.app.database(), self.name)
        if record is None:
            raise NotFound(f"no such stream: {self.name}")
        return (await self._now(record)).partitions

    # -- reading

    async def read(self, partition: int, offset: int = 0, limit: int = 100) -> list[Event[T]]:
        """Up to `limit` events of a partition from an offset on; none when there is nothing yet.

        Raises:
            OffsetGone: Retention dropped what is there.
            NotFound: There is no such partition.
            Unreadable: The first of them cannot be read; `offset + 1` is past it. Those before such a one come without it.
        """
        check_number("partition", partition, 0, 1_023)
        check_number("offset", offset, 0, 2**63 - 1)
        check_number("limit", limit, 1, 100_000)
        found: list[Event[T]] = []
        at = offset
        database = await self.app.database()
        while len(found) < limit:
            chunks = await streams.read_chunks(database, self.name, {partition: at}, limit - len(found))
            for chunk in chunks:
                for event in islice(self.encoding.each(chunk, at), limit - len(found)):
                    if isinstance(event.data, Undecodable):
                        if found:
                            # Of a later call, which begins with it.
                            return found
                        raise unreadable(self.name, event)
                    found.append(event)
            if not chunks:
                break
            at = max(chunk.next_offset for chunk in chunks)
        return found

    def tail(self, start: Start = "latest", *, partitions: Iterable[int] | None = None, gone: Gone | str = Gone.ERROR) -> Tail[T]:
        """Follow the stream without a group: an async iterator over events, in order within each partition, for ever.

        Args:
            start: "earliest", "latest", a time, or the offset of each partition.
            partitions: Only these; None: all, those that come later included.
            gone: What to do when retention overtakes it.
        """
        return Tail(self, start, None if partitions is None else list(partitions), Gone.of(gone))

    async def bounds(self) -> dict[int, Bounds]:
        """What is there of each partition."""
        return await streams.bounds(await self.app.database(), self.name)

    async def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        return await streams.segments(await self.app.database(), self.name)

    # -- groups

    def consume(
        self,
        group: str,
        *,
        size: int = 100,
        within: float = 0.0,
        start: Literal["earliest", "latest"] = "earliest",
        gone: Gone | str = Gone.ERROR,
        id: str | None = None,
    ) -> Consumption[T]:
        """Consume as a member of a group, pulling batches.

            async with orders.consume("billing") as batches:
                async for batch in batches:
                    ...

        A batch is done when the next one is asked for, or `batches.done()` is called; one that is in hand at `break` is not.

        Args:
            group: Name of the group.
            size: Most events in a batch.
            within: Seconds to wait after the first event for more.
            start: Where a new group starts.
            gone: What to do when retention dropped what comes next; "error": the iteration raises `OffsetGone`.
            id: Unique in the group; None: a new one.
        """
        check_group(self, group)
        options = ConsumerOptions(size, within, start=start, gone=Gone.of(gone)).checked(self.app.settings)
        return Consumption(self, group, options, id)

    async def lag(self, group: str | None = None) -> list[Lag]:
        """How far a group (None: each) is in each partition. Raises `NotFound` for a group or stream that is not there."""
        return await streams.lag(await self.app.database(), self.name, group)

    async def held_back(self, group: str | None = None) -> list[HeldBack]:
        """What keeps a group (None: each) from beginning with partitions that came when the stream grew: paused older ones."""
        return held_back(await self.lag(group))

    async def seek(self, group: str, to: Start) -> None:
        """Move a group to "earliest", "latest", a time, or to offsets by partition. Its consumers go on from there.

        Raises:
            NotFound: There is no such group.
            InvalidInput: An offset is outside of what is there.
        """
        await streams.seek_group(await self.app.database(), self.name, group, await self.places(to))

    async def pause(self, group: str, partitions: Sequence[int] | None = None, *, because: str | None = None) -> int:
        """Give a group no more events of partitions (None: any), until `resume`."""
        return await streams.pause_partitions(await self.app.database(), self.name, group, partitions, because)

    async def resume(self, group: str, partitions: Sequence[int] | None = None) -> int:
        """End a pause or quarantine."""
        return await streams.resume_partitions(await self.app.database(), self.name, group, partitions)

    async def drop_group(self, group: str) -> None:
        """Forget a group. Raises `Conflict` while it has members."""
        await streams.drop_group(await self.app.database(), self.name, group)

    async def replay_dead(self, *, offsets: Mapping[int, int] | None = None, limit: int = 1_000) -> int:
        """Append dead letters to the stream again, for the consumer group that put them aside; others pass over them.

        Letters that were replayed are not replayed again: how far it went is the place of the group `penstock.replay` of
        the stream `<name>.dead`.

        Args:
            offsets: Replay from these offsets on, by partition of the dead letters, also what was replayed; None: what was not.
            limit: At most so many; fewer when they are large.

        Returns:
            How many. 0: there are no more.
        """
        check_number("limit", limit, 1, 100_000)
        if offsets is not None:
            _check_offsets(offsets)
        return await streams.replay_dead(await self.app.database(), self.name, limit, offsets)

    async def places(self, start: Start) -> dict[int, int]:
        """The offset of each partition for a start."""
        database = await self.app.database()
        if isinstance(start, datetime):
            return await streams.offsets_at(database, self.name, check_time("the time to start at", start))
        if isinstance(start, Mapping):
            _check_offsets(start)
            return dict(start)
        bounds = await streams.bounds(database, self.name)
        if start == "earliest":
            return {partition: found.first for partition, found in bounds.items()}
        if start == "latest":
            return {partition: found.next for partition, found in bounds.items()}
        raise InvalidInput(f"cannot start at {start!r}", hint='Use "earliest", "latest", a time, or {partition: offset}.')


def _check_offsets(offsets: Mapping[int, int]) -> None:
    for partition, offset in offsets.items():
        check_number("a partition", partition, 0, 1_023)
        check_number(f"the offset of partition {partition}", offset, 0, 2**63 - 1)


async def _each(items: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def check_stream(
    name: str,
    payload: Any,
    partitions: Any,
    key: Any,
    key_optional: Any,
    keep: Any,
    compact: Any,
    compression: Any,
    options: Any,
) -> None:
    """Raise `InvalidInput` unless a stream can be declared so."""
    what = f"stream {name}"
    check_number(f"partitions of {what}", partitions, 1, 1_024)
    check_flag(f"key_optional of {what}", key_optional)
    check_flag(f"compact of {what}", compact)
    if compression is not None and compression != "zstd":
        raise InvalidInput(f"unknown compression of {what}: {compression!r:.100}", hint="Use zstd, or None.")
    if not isinstance(options, StreamOptions):
        raise InvalidInput(f"options of {what} must be StreamOptions, not {options!r:.100}")
    if not isinstance(keep, Retention):
        raise InvalidInput(
            f"keep of {what} must be a Retention, not {keep!r:.100}", hint="For example: keep=Retention(age=timedelta(days=7))"
        )
    options.check()
    keep.check()
    check_key(what, payload, key)


def check_group(stream: Any, group: Any) -> None:
    """Raise `InvalidInput` unless this is a declared stream, and a name for a group of its consumers."""
    if not isinstance(stream, Stream):
        raise InvalidInput(f"a consumer takes a declared stream, not {stream!r:.100}", hint='For example: app.stream("orders")')
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise InvalidInput(
            f"invalid name of a consumer group: {group!r:.100}",
            hint='A consumer group has 1 to 90 letters, digits, ".", "-" or "_", and is not "." or "..".',
        )
