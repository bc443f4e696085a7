"""What an application declares about streams and consumers: a part of `Penstock`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock.consuming.declared import DeclaredConsumer, declared_consumer
from penstock.consuming.delivery import EventHandler, Middleware
from penstock.consuming.failure import OnFailure
from penstock.consuming.options import ConsumerOptions
from penstock.errors import InvalidInput
from penstock.event import Gone, Retention, StreamOptions
from penstock.streams import Stream, check_group, check_stream

if TYPE_CHECKING:
    from penstock.app import Penstock


class StreamDeclarations:
    """Declares streams and consumers."""

    def __init__(self) -> None:
        super().__init__()
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
            partitions: Parts into which it is divided when it is created, and the most consumers of a group that have work.
            key: A field of the payload, or a function of it: events of one key keep their order. A field that the payload type
                has not is refused here; where the type does not say which fields there are, an event without it is refused.
            keep: How long events are kept; the default is for ever.
            compact: Keep only the latest event of each key in segments that are no longer written.
            compression: Compress each payload, which is then stored as bytes.
            options: What else a stream can have.
            key_optional: An event without the field `key` has no key, and with that no order, instead of being refused.

        Raises:
            InvalidInput: An option is not valid, or `key` is no field of the payload type.
        """
        if not isinstance(name, str):
            raise InvalidInput(f"the name of a stream must be text, not {name!r:.100}")
        check_stream(name, payload, partitions, key, key_optional, keep, compact, compression, options)
        compression = options.compression if compression is None else compression  # type: ignore[assignment]
        if keep == Retention():
            keep = Retention(options.keep_age, options.keep_bytes, options.keep_events, options.keep_unread)
        binary = payload is bytes or compression is not None
        stream: Stream[Any] = Stream(
            cast("Penstock", self),
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
        size: int | None = None,
        within: float = 0.0,
        on_failure: OnFailure | Literal["retry", "skip", "dead-letter", "quarantine", "halt"] = "retry",
        start: Literal["earliest", "latest"] = "earliest",
        gone: Literal["error", "earliest", "latest"] = "error",
        prefetch: int | None = None,
        concurrency: int | None = None,
        grace: timedelta | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[EventHandler], EventHandler]:
        """Declare what a consumer group does with the events of a stream. Workers of this app take part in the group.

        The handler takes one `Event`, or a `Batch` of them, or `Events`, over which it iterates itself; its annotation says
        which (without one: a batch when `size` is more than 1). Events of one partition are handled in order, one call
        at a time; the partitions in parallel.

        Args:
            stream: The stream.
            group: Name of the group; unique in the stream.
            size: Most events in a batch; None: 100.
            within: Seconds to wait after the first event for more.
            on_failure: What to do when the handler fails: "retry" (until it succeeds, with growing delays), "skip",
                "dead-letter", "quarantine", "halt", or an `OnFailure` for some attempts before.
            start: Where a new group starts.
            gone: What to do when retention dropped what comes next; "error": quarantine the partition.
            prefetch: Events to have ready for each partition; None: enough for two batches.
            concurrency: Most handlers at once in a process; None: one for each partition.
            grace: How long a handler may go on when its partition goes to another member, before it is cancelled; None: until it
                is done with what it has in hand, for `Settings.wedged_after` (5 minutes) at most.
            middleware: Functions of (batch, call_next) around each call of the handler, the first outermost.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        check_group(stream, group)
        options = ConsumerOptions(
            100 if size is None else size, within, prefetch, start, Gone.of(gone), OnFailure.of(on_failure), concurrency, grace
        ).checked(stream.app.settings)

        def declare(handler: EventHandler) -> EventHandler:
            declared = declared_consumer(
                stream,
                group,
                handler,
                options,
                one=size is None or size == 1,
                middleware=middleware,
            )
            if declared.name in self.consumers:
                raise InvalidInput(f"consumer group {declared.name} is declared twice", hint="Give each group a name of its own.")
            self.consumers[declared.name] = declared
            return handler

        return declare
