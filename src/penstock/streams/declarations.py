"""Declarations of streams and consumers, as `Penstock` offers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar, overload

from typing_extensions import Unpack

from penstock.core.checks import check_names
from penstock.core.keys import PayloadForm
from penstock.errors import InvalidInput
from penstock.postgres.context import Context, Declarations
from penstock.streams.checks import check_stream
from penstock.streams.consumer.declared import DeclaredConsumer
from penstock.streams.models import Retention, StreamOptions
from penstock.streams.stream import Stream

T = TypeVar("T")


class StreamSettings(TypedDict, total=False):
    """Further options of a stream: see `StreamOptions` for what they mean."""

    format: Literal["json", "bytes"]
    compact: bool
    compression: Literal["zstd"] | None
    segment_age: timedelta | None
    segment_bytes: int
    segment_events: int | None
    max_event_bytes: int
    tombstone_age: timedelta
    encrypted: bool


def options_of_stream(name: str, given: Mapping[str, Any]) -> StreamOptions:
    """The options of a stream, as they are given by name. Raises `InvalidInput` for one that does not exist or is not valid."""
    check_names(f"stream {name}", given, [*StreamSettings.__annotations__, "partitions", "key", "keep", "key_optional"])
    options = StreamOptions(**given)
    options.check()
    return options


class StreamDeclarations(Declarations):
    """Declares streams and consumers."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.streams: dict[str, Stream[Any]] = {}
        self.consumers: dict[str, DeclaredConsumer] = {}

    @overload
    def stream(
        self,
        name: str,
        payload: type[T],
        *,
        partitions: int = ...,
        key: str | Callable[[T], str | None] | None = ...,
        keep: Retention | timedelta = ...,
        key_optional: bool = ...,
        **options: Unpack[StreamSettings],
    ) -> Stream[T]: ...
    @overload
    def stream(
        self,
        name: str,
        payload: PayloadForm = ...,
        *,
        partitions: int = ...,
        key: str | Callable[[Any], str | None] | None = ...,
        keep: Retention | timedelta = ...,
        key_optional: bool = ...,
        **options: Unpack[StreamSettings],
    ) -> Stream[Any]: ...
    @overload
    def stream(
        self,
        name: str,
        payload: object,
        *,
        partitions: int = ...,
        key: str | Callable[[T], str | None] | None = ...,
        keep: Retention | timedelta = ...,
        key_optional: bool = ...,
        **options: Unpack[StreamSettings],
    ) -> Stream[Any]: ...
    def stream(
        self,
        name: str,
        payload: Any = Any,
        *,
        partitions: int = 16,
        key: str | Callable[[Any], str | None] | None = None,
        keep: Retention | timedelta = Retention(),
        key_optional: bool = False,
        **options: Unpack[StreamSettings],
    ) -> Stream[Any]:
        """Declare a stream: an ordered, partitioned log of events.

        Args:
            name: Name of the stream: letters, digits, ".", "-", "_".
            payload: Payload type; `bytes` for plain bytes.
            partitions: Number of partitions at creation, which is the maximum number of consumers of a group that have work.
            key: Name of a field of the payload, or a function of it; events of one key keep their order. A field that the payload
                type does not have is refused here; where the type does not define its fields, an event without it is refused.
            keep: How long events are kept, or a `Retention`; the default keeps them for ever.
            key_optional: Whether an event without the field `key` is appended without a key, and so without an order, instead of
                being refused.
            options: Further options of the stream: `StreamOptions`.

        Raises:
            InvalidInput: An option is not valid, or `key` is not a field of the payload type.
        """
        chosen = options_of_stream(name, options)
        keep = Retention(age=keep) if isinstance(keep, timedelta) else keep
        check_stream(name, payload, partitions, key, key_optional, keep, chosen)
        binary = payload is bytes or chosen.compression is not None
        stream: Stream[Any] = Stream(
            self.context,
            name,
            payload,
            partitions,
            key,
            replace(
                chosen,
                format="bytes" if binary else chosen.format,
                keep_age=keep.age,
                keep_bytes=keep.bytes,
                keep_events=keep.events,
                keep_unread=keep.unread,
            ),
            key_optional,
        )
        stream.consumers = self.consumers
        if name in self.streams:
            raise InvalidInput(f"stream {name} is declared twice", hint="Declare it once and use it from there.")
        self.streams[name] = stream
        return stream
