"""Models of streams: events and their positions, options of streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, overload

from pydantic import ConfigDict, Field

from penstock.core.checks import LONGEST_SPAN, check_choice, check_flag, check_number, check_span
from penstock.core.records import Seconds, example
from penstock.errors import InvalidInput

T = TypeVar("T")
_AT = "2026-01-11T18:26:26Z"
EVENT: dict[str, Any] = {
    "partition": 3, "offset": 17, "key": "acme", "data": {"total": 3}, "headers": {}, "time": None, "appended_at": _AT,
}  # fmt: skip
"""An event, as an example in the OpenAPI document."""
_STREAM: dict[str, Any] = {
    "name": "orders", "partitions": 16, "format": "json", "compression": None, "keep_age_s": 604800.0, "keep_bytes": None,
    "keep_events": None, "keep_unread": False, "compact": False, "segment_age_s": None, "segment_bytes": 67108864,
    "segment_events": None, "max_event_bytes": 1048576, "created_at": _AT, "updated_at": _AT,
}  # fmt: skip
Start: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[int, int]
"""Where to start in a stream: at an end, at a time, or at an offset of each partition."""
CHUNK = 1_000  # maximum number of events in a row, see 0006_streams.sql


@dataclass(frozen=True, slots=True)
class NewEvent(Generic[T]):
    """An event to be appended, with more than a payload.

    Attributes:
        data: Payload; None in a compacted stream deletes the key.
        key: Key of the event; events of one key keep their order. None: the stream's own rule for keys, or any partition.
        headers: Headers, a mapping that is stored as JSON.
        time: Time at which the event happened; None: not given.
    """

    data: T
    key: str | None = None
    headers: Mapping[str, Any] | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """The position of an event.

    Attributes:
        partition: Number of the partition.
        offset: Offset in the partition, from 0.
    """

    partition: int
    offset: int


def _as_json(schema: dict[str, Any]) -> None:
    """The schema of an event in JSON: payloads of bytes are in a field of their own."""
    schema["properties"]["bytes"] = {"type": "string", "description": "Base64, in a stream of bytes, instead of `data`."}
    schema["required"].remove("data")
    schema["example"] = EVENT


@dataclass(slots=True)
class Event(Generic[T]):
    """An event as a reader receives it. In JSON a payload of bytes is `bytes`, as base64, instead of `data`.

    Attributes:
        partition: Partition of the event.
        offset: Offset of the event in its partition, from 0.
        key: Key, or None.
        data: Payload; None when the key was deleted (compacted streams).
        headers: Headers that the producer gave.
        time: Time at which the event happened, as the producer gave it; None: not given.
        appended_at: Time of the append, by the database's clock.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(json_schema_extra=_as_json)

    partition: int
    offset: int
    key: str | None
    data: T
    headers: dict[str, Any]
    time: datetime | None
    appended_at: datetime


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events of one partition that were appended together, as they are stored (see 0006_streams.sql)."""

    partition: int
    first_offset: int
    events: int
    appended_at: datetime
    keys: list[str | None] | None
    times: list[datetime | None] | None
    headers: list[str | None] | None
    data: list[str | None] | None
    bytes: list[bytes | None] | None
    offsets: list[int] | None
    odd_times: list[int] | None = None  # indexes of events with times that Python cannot represent

    @property
    def next_offset(self) -> int:
        """The offset behind its last event."""
        return self.first_offset + self.events if self.offsets is None else self.offsets[-1] + 1


def is_for(headers: Mapping[str, Any], group: str) -> bool:
    """Whether an event is for a consumer group.

    A replayed dead letter is only for the group in which it failed, and the mark of an erased event is for none.
    """
    erased, replayed = headers.get("erased"), headers.get("replayed")
    if isinstance(erased, dict) and "operation" in erased:
        return False
    return not isinstance(replayed, dict) or replayed.get("group") in (None, group)


def may_be_for_others(text: str | None) -> bool:
    """Whether headers, as they are stored, may say that an event is not for every group. The check is a quick one."""
    return text is not None and ('"replayed"' in text or '"erased"' in text)


def has_events_for_others(chunk: Chunk) -> bool:
    """Whether a chunk may contain a replayed dead letter or the mark of an erased event."""
    return chunk.headers is not None and any(map(may_be_for_others, chunk.headers))


class Appended(Sequence[Position]):
    """Positions of the events of an append, in the given order."""

    __slots__ = ("_offsets", "_partitions")

    def __init__(self, partitions: Sequence[int], offsets: Sequence[int]) -> None:
        self._partitions = partitions
        self._offsets = offsets

    @overload
    def __getitem__(self, index: int) -> Position: ...
    @overload
    def __getitem__(self, index: slice) -> list[Position]: ...
    def __getitem__(self, index: int | slice) -> Position | list[Position]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        return Position(self._partitions[index], self._offsets[index])

    def __len__(self) -> int:
        return len(self._offsets)

    def sliced(self, first: int, last: int) -> Appended:
        """The positions from `first` up to, not including, `last`.

        Args:
            first: Place of the first position.
            last: Place behind the last position.
        """
        return Appended(self._partitions[first:last], self._offsets[first:last])

    def __repr__(self) -> str:
        return f"Appended({list(self)!r})" if len(self) < 10 else f"<Appended of {len(self)} events>"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long events are kept. Whole segments are dropped, oldest first, when one of the limits is exceeded.

    Attributes:
        age: Drop segments that were closed longer ago than this.
        bytes: Drop the oldest segment while the other ones are larger than this.
        events: Drop the oldest segment while the other ones have more events than this.
        unread: Whether to keep a segment in any case until every group has read it.
    """

    age: timedelta | None = None
    bytes: int | None = None
    events: int | None = None
    unread: bool = False

    def check(self) -> None:
        """Raise `InvalidInput` unless each value is valid."""
        StreamOptions(keep_age=self.age, keep_bytes=self.bytes, keep_events=self.events, keep_unread=self.unread).check()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of a stream in the database; the names are those of `penstock.create_stream`.

    Attributes:
        format: "json" or "bytes".
        compression: "zstd", or None.
        keep_age: Drop segments that were closed longer ago than this; None: no limit.
        keep_bytes: Drop the oldest segment while the other ones are larger than this; None: no limit.
        keep_events: Drop the oldest segment while the other ones have more events than this; None: no limit.
        keep_unread: Whether to keep a segment in any case until every group has read it.
        compact: Whether to keep only the latest event of each key.
        segment_age: Age at which a segment is closed; None: no limit.
        segment_bytes: Size at which a segment is closed.
        segment_events: Number of events at which a segment is closed; None: no limit.
        max_event_bytes: Largest size of an event.
        tombstone_age: How long a compacted stream keeps the deletion of a key.
        encrypted: Whether payloads, and errors of handlers, are stored encrypted, with the keys of the application.
    """

    format: str = "json"
    compression: str | None = None
    keep_age: timedelta | None = None
    keep_bytes: int | None = None
    keep_events: int | None = None
    keep_unread: bool = False
    compact: bool = False
    segment_age: timedelta | None = None
    segment_bytes: int = 64 * 1024 * 1024
    segment_events: int | None = None
    max_event_bytes: int = 1024 * 1024
    tombstone_age: timedelta = timedelta(days=1)
    encrypted: bool = False

    def check(self) -> None:
        """Raise `InvalidInput` unless each value is valid. Stored options are not checked: another version may allow more."""
        check_choice("format", self.format, ("json", "bytes"))
        if self.compression is not None and self.compression != "zstd":
            raise InvalidInput(f"unknown compression: {self.compression!r:.100}", hint="Use zstd, or None.")
        for name in ("keep_unread", "compact", "encrypted"):
            check_flag(name, getattr(self, name))
        for name in ("keep_bytes", "keep_events", "segment_events"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, 2**63 - 1)
        check_number("segment_bytes", self.segment_bytes, 1, 2**63 - 1)
        check_number("max_event_bytes", self.max_event_bytes, 1, 2**31 - 1)
        for name in ("keep_age", "segment_age"):
            if getattr(self, name) is not None:
                check_span(name, getattr(self, name), longest=LONGEST_SPAN)
        check_span("tombstone_age", self.tombstone_age, zero=True, longest=LONGEST_SPAN)

    def declaration(self) -> dict[str, Any]:
        """The storage format and the options that differ from the defaults, in the form that the SQL functions accept."""
        declared = {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.name in ("format", "compression") or getattr(self, option.name) != option.default
        }
        return {
            name: f"{value.total_seconds()} seconds" if isinstance(value, timedelta) else value
            for name, value in declared.items()
        }


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream as it is stored. A server tells neither `id` nor `tombstone_age`."""

    __pydantic_config__: ClassVar[ConfigDict] = example(_STREAM)

    name: str
    partitions: int
    format: str
    compression: str | None
    keep_age: Annotated[Seconds | None, Field(alias="keep_age_s")]
    keep_bytes: int | None
    keep_events: int | None
    keep_unread: bool
    compact: bool
    segment_age: Annotated[Seconds | None, Field(alias="segment_age_s")]
    segment_bytes: int
    segment_events: int | None
    max_event_bytes: int
    created_at: datetime
    updated_at: datetime
    encrypted: Annotated[bool, Field(description="Whether payloads are stored encrypted.")] = field(default=False, kw_only=True)
    encrypted_at: Annotated[
        datetime | None, Field(description="Since when there may be encrypted payloads; null: there are none.")
    ] = field(default=None, kw_only=True)
    id: Annotated[int | None, Field(exclude=True)] = field(default=None, kw_only=True)
    tombstone_age: Annotated[timedelta, Field(exclude=True)] = field(default=timedelta(days=1), kw_only=True)

    @property
    def options(self) -> StreamOptions:
        """The options of the stream, in the form in which an application declares them."""
        return StreamOptions(**{option.name: getattr(self, option.name) for option in fields(StreamOptions)})


@dataclass(frozen=True, slots=True)
class Ends:
    """What is stored of a partition: from `first` up to, not including, `next`."""

    partition: int
    first: int
    next: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """The stored range of offsets of a partition: from `first` up to, not including, `next`."""

    first: int
    next: int


def gone_at(stream: str, partition: int, offset: int, bounds: Bounds) -> str:
    """The message about an offset that retention dropped."""
    return f"offset {offset} of partition {partition} of stream {stream} is gone: the first stored offset is {bounds.first}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a stream that is dropped as a whole."""

    number: int
    table: str
    opened_at: datetime
    closed_at: datetime | None
    events: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A growth that a group cannot finish by itself: an old partition is paused before its end at the time of the growth.

    Attributes:
        group: Name of the consumer group.
        partition: Paused partition. Resume it, or move the group past its events.
        pause_reason: Reason of the pause.
        quarantined: Whether a failing event paused it.
        holds: New partitions that wait for it.
    """

    group: str
    partition: int
    pause_reason: str | None
    quarantined: bool
    holds: list[int]


@dataclass(frozen=True, slots=True)
class StreamDetails(StreamRecord):
    """A stream with what is in it."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        **_STREAM, "ends": [{"partition": 0, "first": 40, "next": 93}], "segments": 1, "events": 53, "bytes": 9120,
        "held_back": [],
    })  # fmt: skip

    ends: list[Ends]
    segments: int
    events: int
    bytes: int
    held_back: list[HeldBack]


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """A stream in a list: how many events it has, how large it is, and how long it keeps them."""

    name: str
    partitions: int
    events: int
    bytes: int
    segments: int
    format: str
    keep_age: Annotated[Seconds | None, Field(alias="keep_age_s")]
    compact: bool
    created_at: datetime


class OffsetReset(StrEnum):
    """Action of a reader when retention dropped the next events."""

    ERROR = "error"
    EARLIEST = "earliest"
    LATEST = "latest"

    @classmethod
    def of(cls, given: OffsetReset | str) -> OffsetReset:
        """The action of this name. Raises `InvalidInput`."""
        check_choice("auto_offset_reset", given, list(cls))
        return cls(given)


@dataclass(slots=True)
class Columns:
    """Events to be appended, by column; a column that is None stands for None in all events."""

    payloads: list[Any]
    keys: list[str | None] | None = None
    headers: list[str | None] | None = None
    times: list[datetime | None] | None = None
    bytes: bool = False

    def __len__(self) -> int:
        return len(self.payloads)

    def traced(self, traceparent: str | None) -> Columns:
        """The same events, with a trace context in the headers of those that have none; None: unchanged.

        Args:
            traceparent: The trace context.
        """
        if traceparent is None:
            return self
        alone = f'{{"traceparent":"{traceparent}"}}'
        if self.headers is None:
            headers: list[str | None] = [alone] * len(self)
        else:
            # The headers of an event are the text of an object that is not empty.
            headers = [
                alone if text is None else text if '"traceparent"' in text else f"{alone[:-1]},{text.lstrip()[1:]}"
                for text in self.headers
            ]
        return replace(self, headers=headers)


def chunked(count: int) -> Iterator[int]:
    """The sizes of the chunks of `count` events."""
    while count > 0:
        yield min(count, CHUNK)
        count -= CHUNK
