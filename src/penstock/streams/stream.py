"""Streams: ordered, partitioned logs of events, shared by groups of consumers."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

from penstock.core.blocking import without_loop
from penstock.core.checks import (
    check_documentation,
    check_function,
    check_many,
    check_name,
    check_number,
    check_text,
    refusing_unknown,
)
from penstock.core.tracing import sending
from penstock.errors import InvalidInput
from penstock.streams import queries as streams
from penstock.streams.checks import check_group, check_partitions, check_start
from penstock.streams.codec import Undecodable, unreadable
from penstock.streams.consumer.declared import DeclaredConsumer, declared_consumer
from penstock.streams.consumer.handling import EventHandler, Middleware
from penstock.streams.consumer.on_failure import OnFailure
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.consumer.pull import Consumption
from penstock.streams.group_control import GroupControl
from penstock.streams.loading import rows_to_load
from penstock.streams.models import (
    Appended,
    Event,
    NewEvent,
    OffsetReset,
    Position,
    Segment,
    Start,
)
from penstock.streams.partitioner import Router
from penstock.streams.producer import Producer
from penstock.streams.reader import StreamReader
from penstock.streams.sync import SyncStream
from penstock.streams.transactional import append_through

T = TypeVar("T")


class Stream(GroupControl[T], Generic[T]):
    """A declared stream. `Penstock.stream` makes it.

        orders = app.stream("orders", Order, partitions=16, key="customer")

        await orders.append(Order(customer="acme", total=3))

        @orders.consumer(group="billing")
        async def bill(event: Event[Order]) -> None: ...

    Events of one key are in one partition, in the order in which they were appended.
    """

    # The consumers of the application by their names; None: the stream was looked up and is not declared.
    consumers: dict[str, DeclaredConsumer] | None = None

    @property
    def sync(self) -> SyncStream[T]:
        """The blocking half, for threads without an event loop."""
        return SyncStream(self, self.context.background)

    @refusing_unknown("a consumer")
    def consumer(
        self,
        *,
        group: str,
        max_batch_size: int | None = None,
        linger: timedelta = timedelta(0),
        on_failure: OnFailure | Literal["retry", "skip", "dead-letter", "quarantine", "halt"] = "retry",
        start: Literal["earliest", "latest"] = "earliest",
        auto_offset_reset: Literal["error", "earliest", "latest"] = "error",
        prefetch: int | None = None,
        concurrency: int | None = None,
        grace: timedelta | None = None,
        middleware: Sequence[Middleware] = (),
        docs_url: str | None = None,
        owner: str | None = None,
    ) -> Callable[[EventHandler], DeclaredConsumer]:
        """Declare the handler of a consumer group. Workers of the app take part in the group.

        The handler takes one `Event`, a `Batch`, or `Events`, over which it iterates itself; its annotation says which (without
        one: a batch when `max_batch_size` is more than 1). The events of one partition are handled in order, one call at a time;
        the partitions in parallel.

        Args:
            group: Name of the group; unique in the stream.
            max_batch_size: Maximum number of events in a batch; None: 100.
            linger: How long to wait for more events after the first one of a batch.
            on_failure: Policy for failures of the handler: "retry" (until it succeeds, with growing delays), "skip",
                "dead-letter", "quarantine", "halt", or an `OnFailure` with a number of attempts.
            start: Position at which a new group starts.
            auto_offset_reset: Action when retention dropped the next events; "error": quarantine the partition.
            prefetch: Number of events to buffer for each partition; None: enough for two batches.
            concurrency: Maximum number of handlers at once in a process; None: one for each partition.
            grace: How long a handler may continue when its partition is revoked, before it is cancelled; None: until it has
                finished its batch, at most `Settings.wedged_after` (5 minutes).
            middleware: Functions of (batch, call_next) around each call of the handler, the first outermost.
            docs_url: Address of the documentation of the consumer, for people: `https://...`.
            owner: Who answers for it: a team, an address.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        check_many("middleware", middleware, "middleware=[timed]")
        middleware = list(middleware)
        for function in middleware:
            check_function("a function of middleware", function, "async def timed(batch, call_next): await call_next(batch)")
        if self.consumers is None:
            raise InvalidInput(f"stream {self.name} is not declared in this application", hint="Declare it: app.stream(...).")
        consumers = self.consumers
        check_group(group)
        check_documentation(f"consumer {self.name}/{group}", docs_url, owner)
        options = ConsumerOptions(
            100 if max_batch_size is None else max_batch_size,
            linger,
            prefetch,
            start,
            OffsetReset.of(auto_offset_reset),
            OnFailure.of(on_failure),
            concurrency,
            grace,
        ).checked(self.context.settings)

        def declare(handler: EventHandler) -> DeclaredConsumer:
            declared = declared_consumer(
                self,
                group,
                handler,
                options,
                one=max_batch_size is None or max_batch_size == 1,
                middleware=middleware,
            )
            declared = replace(declared, docs_url=docs_url, owner=owner)
            if declared.name in consumers:
                raise InvalidInput(f"consumer group {declared.name} is declared twice", hint="Give each group a name of its own.")
            consumers[declared.name] = declared
            return declared

        return declare

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
        return (await self.append_many([NewEvent(data, key, headers, time)], connection=connection))[0]

    async def append_many(self, items: Iterable[NewEvent[T] | T], *, connection: Any = None) -> Appended:
        """Append at most 100,000 events atomically. For more events see `load`.

        Args:
            items: Payloads, or `NewEvent`s for events with a key, headers or a time.
            connection: See `append`. A blocking call through a connection does not declare the stream, which must exist.

        Returns:
            Positions of the events, in the given order.
        """
        columns = self.encoding.columns(items)
        with sending(self.context.tracing, "append", self.name, len(columns)) as traceparent:
            columns = columns.traced(traceparent)
            if not without_loop():
                await self.ready()
            if connection is None:
                return await self.accumulator().append(columns)
            return await append_through(connection, self.name, columns)

    def producer(self, id: str | None = None, *, sequence: int | None = None) -> Producer[T]:
        """A producer whose appends can be repeated without duplicates.

        Args:
            id: Name of the producer, one for each writer; None: a new one.
            sequence: Number of the last batch that is known to be appended, for a producer that restarts and repeats the batches
                after it. None: the producer continues after the last batch under its name.
        """
        if id is not None:
            check_text("the id of a producer", id)
        if id is not None and not 1 <= len(id) <= 200:
            raise InvalidInput(f"the id of a producer must be text of 1 to 200 characters, not {id!r:.100}")
        if sequence is not None:
            check_number("sequence", sequence, 0, 2**63 - 1)
        return Producer(self, id or secrets.token_hex(8), sequence)

    async def load(self, items: Iterable[NewEvent[T] | T] | AsyncIterable[NewEvent[T] | T]) -> int:
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
        if not isinstance(items, AsyncIterable):
            check_many("items", items, 'load([{"a": 1}, NewEvent({"a": 2}, key="acme")])')
        await self.ready()
        database = await self.context.database()
        async with database.transaction() as transaction:
            width = await streams.begin_load(transaction, self.name)
            await streams.copy_load(transaction, rows_to_load(self.name, self.encoding, items, Router(width)))
            return await streams.end_load(transaction, self.name, width)

    # -- reading

    async def read(self, partition: int, offset: int = 0, limit: int = 100) -> list[Event[T]]:
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
        check_number("partition", partition, 0, 1_023)
        check_number("offset", offset, 0, 2**63 - 1)
        check_number("limit", limit, 1, 100_000)
        await self._know_keys()
        found: list[Event[T]] = []
        at = offset
        database = await self.context.database()
        while len(found) < limit:
            chunks = await streams.read_chunks(database, self.name, {partition: at}, limit - len(found))
            for chunk in chunks:
                for event in islice(self.encoding.each(chunk, at), limit - len(found)):
                    if isinstance(event.data, Undecodable):
                        if found:
                            # A later call begins with it and raises the error.
                            return found
                        raise unreadable(self.name, event)
                    found.append(event)
            if not chunks:
                break
            at = max(chunk.next_offset for chunk in chunks)
        return found

    def tail(
        self,
        start: Start = "latest",
        *,
        partitions: Iterable[int] | None = None,
        auto_offset_reset: OffsetReset | str = OffsetReset.ERROR,
        idle_timeout: timedelta | None = None,
    ) -> StreamReader[T]:
        """Follow the stream without a group: an endless async iterator over events, in order within each partition.

        Args:
            start: "earliest", "latest", a time, or the offset of each partition.
            partitions: Partitions to follow; None: all, including those that are added later.
            auto_offset_reset: Action when retention dropped the next events.
            idle_timeout: Time without an event after which the iteration ends; None: it does not end.
        """
        check_start(start)
        check_partitions(partitions)
        return StreamReader(
            self, start, None if partitions is None else list(partitions), OffsetReset.of(auto_offset_reset), idle_timeout
        )

    async def segments(self) -> list[Segment]:
        """The segments, oldest first."""
        return await streams.segments(await self.context.database(), self.name)

    # -- consuming

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
    ) -> Consumption[T]:
        """Consume as a member of a group, pulling batches.

            async with orders.consume("billing") as batches:
                async for batch in batches:
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
        check_group(group)
        if id is not None:
            check_name("id of a member", id, 50)
        options = ConsumerOptions(
            max_batch_size, linger, start=start, auto_offset_reset=OffsetReset.of(auto_offset_reset)
        ).checked(self.context.settings)
        return Consumption(self, group, options, id, idle_timeout)
