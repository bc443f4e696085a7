"""Declarations of streams and consumers, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from penstock.errors import InvalidInput
from penstock.postgres.context import Context, Declarations
from penstock.streams.checks import check_group, check_stream
from penstock.streams.consumer.declared import DeclaredConsumer, declared_consumer
from penstock.streams.consumer.handling import EventHandler, Middleware
from penstock.streams.consumer.on_failure import OnFailure
from penstock.streams.consumer.options import ConsumerOptions
from penstock.streams.models import OffsetReset, Retention, StreamOptions
from penstock.streams.stream import Stream


class StreamDeclarations(Declarations):
    """Declares streams and consumers."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.streams: dict[str, Stream[Any]] = {}
        self.consumers: dict[str, DeclaredConsumer] = {}

    def stream(
        self,
        name: str,
        payload: Any = Any,
        *,
        partitions: int = 16,
        key: str | Callable[[Any], str | None] | None = None,
        keep: Retention = Retention(),
        compact: bool = False,
        compression: Literal["zstd"] | None = None,
        options: StreamOptions = StreamOptions(),
        key_optional: bool = False,
    ) -> Stream[Any]:
        """Declare a stream: an ordered, partitioned log of events.

        Args:
            name: Name of the stream: letters, digits, ".", "-", "_".
            payload: Payload type; `bytes` for plain bytes.
            partitions: Number of partitions at creation, which is the maximum number of consumers of a group that have work.
            key: Name of a field of the payload, or a function of it; events of one key keep their order. A field that the payload
                type does not have is refused here; where the type does not define its fields, an event without it is refused.
            keep: Retention of events; the default keeps them for ever.
            compact: Whether to keep only the latest event of each key in closed segments.
            compression: Compression of each payload, which is then stored as bytes.
            options: Further options of the stream.
            key_optional: Whether an event without the field `key` is appended without a key, and so without an order, instead of
                being refused.

        Raises:
            InvalidInput: An option is not valid, or `key` is not a field of the payload type.
        """
        if not isinstance(name, str):
            raise InvalidInput(f"the name of a stream must be text, not {name!r:.100}")
        check_stream(name, payload, partitions, key, key_optional, keep, compact, compression, options)
        compression = options.compression if compression is None else compression  # type: ignore[assignment]
        if keep == Retention():
            keep = Retention(options.keep_age, options.keep_bytes, options.keep_events, options.keep_unread)
        binary = payload is bytes or compression is not None
        stream: Stream[Any] = Stream(
            self.context,
            name,
            payload,
            partitions,
            key,
            replace(
                options,
                format="bytes" if binary else options.format,
                compression=compression,
                keep_age=keep.age,
                keep_bytes=keep.bytes,
                keep_events=keep.events,
                keep_unread=keep.unread,
                compact=compact or options.compact,
            ),
            key_optional,
        )
        if name in self.streams:
            raise InvalidInput(f"stream {name} is declared twice", hint="Declare it once and use it from there.")
        self.streams[name] = stream
        return stream

    def consumer(
        self,
        stream: Stream[Any],
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
    ) -> Callable[[EventHandler], EventHandler]:
        """Declare the handler of a consumer group of a stream. Workers of this app take part in the group.

        The handler takes one `Event`, a `Batch`, or `Events`, over which it iterates itself; its annotation says which (without
        one: a batch when `max_batch_size` is more than 1). The events of one partition are handled in order, one call at a time;
        the partitions in parallel.

        Args:
            stream: Stream to consume.
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

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        if not isinstance(stream, Stream):
            raise InvalidInput(
                f"a consumer takes a declared stream, not {stream!r:.100}", hint='For example: app.stream("orders")'
            )
        check_group(group)
        options = ConsumerOptions(
            100 if max_batch_size is None else max_batch_size,
            linger,
            prefetch,
            start,
            OffsetReset.of(auto_offset_reset),
            OnFailure.of(on_failure),
            concurrency,
            grace,
        ).checked(stream.context.settings)

        def declare(handler: EventHandler) -> EventHandler:
            declared = declared_consumer(
                stream,
                group,
                handler,
                options,
                one=max_batch_size is None or max_batch_size == 1,
                middleware=middleware,
            )
            if declared.name in self.consumers:
                raise InvalidInput(f"consumer group {declared.name} is declared twice", hint="Give each group a name of its own.")
            self.consumers[declared.name] = declared
            return handler

        return declare
