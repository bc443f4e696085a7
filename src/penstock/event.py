"""The words of streams: events, where they are, what a stream is like, and how far a group is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar, overload

from penstock.checks import check_choice, check_flag, check_number, check_span
from penstock.errors import InvalidInput

T = TypeVar("T")
CHUNK = 1_000  # most events in a row, see 0004_streams.sql


@dataclass(frozen=True, slots=True)
class NewEvent(Generic[T]):
    """An event to be appended, when it is more than its payload.

    Attributes:
        data: The payload; None in a compacted stream: the key is gone.
        key: Events of one key keep their order; None: the stream's own rule, or any partition.
        headers: Anything beside the payload, as JSON.
        time: When it happened; None: nobody says.
    """

    data: T
    key: str | None = None
    headers: Mapping[str, Any] | None = None
    time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """Where an event is."""

    partition: int
    offset: int


@dataclass(slots=True)
class Event(Generic[T]):
    """An event as a reader gets it.

    Attributes:
        partition: Partition that it is in.
        offset: Its place there, from 0.
        key: Its key, or None.
        data: The payload; None when its key is gone (compacted streams).
        headers: What the producer gave beside it.
        time: When it happened, by the producer; None: it did not say.
        appended_at: When it was appended, by the database's clock.
    """

    partition: int
    offset: int
    key: str | None
    data: T
    headers: dict[str, Any]
    time: datetime | None
    appended_at: datetime


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events of one partition that were appended together, as the database has them (see 0004_streams.sql)."""

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
    odd_times: list[int] | None = None  # places of events with times that Python has not

    @property
    def next_offset(self) -> int:
        """The offset behind its last event."""
        return self.first_offset + self.events if self.offsets is None else self.offsets[-1] + 1


def is_for(headers: Mapping[str, Any], group: str) -> bool:
    """Whether an event is for a consumer group: a dead letter that was replayed is for the group that put it aside alone."""
    replayed = headers.get("replayed")
    return not isinstance(replayed, dict) or replayed.get("group") in (None, group)


def may_be_replayed(chunk: Chunk) -> bool:
    """Whether some event of a chunk may be a dead letter that was replayed. Quick, since it is asked of each chunk."""
    return chunk.headers is not None and any(text is not None and '"replayed"' in text for text in chunk.headers)


class Appended(Sequence[Position]):
    """Where the events of an append are, in the order in which they were given."""

    __slots__ = ("_offsets", "_partitions")

    def __init__(self, partitions: Sequence[int], offsets: Sequence[int]) -> None:
        self._partitions = partitions
        self._offsets = offsets

    @overload
    def __getitem__(self, place: int) -> Position: ...
    @overload
    def __getitem__(self, place: slice) -> list[Position]: ...
    def __getitem__(self, place: int | slice) -> Position | list[Position]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        return Position(self._partitions[place], self._offsets[place])

    def __len__(self) -> int:
        return len(self._offsets)

    def sliced(self, first: int, last: int) -> Appended:
        """Those from `first` to before `last`."""
        return Appended(self._partitions[first:last], self._offsets[first:last])

    def __repr__(self) -> str:
        return f"Appended({list(self)!r})" if len(self) < 10 else f"<Appended of {len(self)} events>"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long events are kept; whole segments go, oldest first, when one of these says so.

    Attributes:
        age: Segments that ended longer ago.
        bytes: The oldest, while the others are larger.
        events: The oldest, while the others have more events.
        unread: Keep a segment nevertheless until every group has read it.
    """

    age: timedelta | None = None
    bytes: int | None = None
    events: int | None = None
    unread: bool = False

    def check(self) -> None:
        """Raise `InvalidInput` unless each is of its kind."""
        StreamOptions(keep_age=self.age, keep_bytes=self.bytes, keep_events=self.events, keep_unread=self.unread).check()


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream is like in the database; the names are those of `penstock.create_stream`."""

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

    def check(self) -> None:
        """Raise `InvalidInput` unless each is of its kind. What the database has is not checked: others may know more."""
        check_choice("format", self.format, ("json", "bytes"))
        if self.compression is not None and self.compression != "zstd":
            raise InvalidInput(f"unknown compression: {self.compression!r:.100}", hint="Use zstd, or None.")
        for name in ("keep_unread", "compact"):
            check_flag(name, getattr(self, name))
        for name in ("keep_bytes", "keep_events", "segment_events"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, 2**63 - 1)
        check_number("segment_bytes", self.segment_bytes, 1, 2**63 - 1)
        check_number("max_event_bytes", self.max_event_bytes, 1, 2**31 - 1)
        for name in ("keep_age", "segment_age"):
            if getattr(self, name) is not None:
                check_span(name, getattr(self, name))
        check_span("tombstone_age", self.tombstone_age, zero=True)

    def declaration(self) -> dict[str, Any]:
        """How payloads are stored, and the options that differ from the defaults, as the SQL functions take them."""
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
    """A stream as the database has it."""

    name: str
    id: int
    partitions: int
    options: StreamOptions
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is there of a partition: from `first` to before `next`."""

    first: int
    next: int


def gone_at(stream: str, partition: int, offset: int, bounds: Bounds) -> str:
    """What is said of an offset that retention dropped."""
    return f"offset {offset} of partition {partition} of stream {stream} is gone: the first that is there is {bounds.first}"


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
class Lag:
    """How far a group is in one partition.

    Attributes:
        group: The consumer group.
        partition: The partition.
        next: The next event that it will consume.
        end: The next event that will be appended.
        lag: How many events are between them.
        owner: The member that consumes it; None: nobody does.
        committed_at: When the group committed last.
        paused_at: Since when it is paused; None: it is not.
        paused_because: Why.
        quarantined: Whether a failing event paused it.
        halted_because: The error at which a consumer halted before the next event, until that event is done; None: none did.
        waits_for: Older partitions that the group has to finish first, since the stream grew; none: it does not wait.
        failing_since: Since when a handler has failed at an event, until that event is done; None: none does.
        failing_offset: The first event of the batch at which it fails.
        failing_attempt: The attempt that was noted last; not every one is.
        failing_because: Its error.
    """

    group: str
    partition: int
    next: int
    end: int
    lag: int
    owner: str | None
    committed_at: datetime | None
    paused_at: datetime | None
    paused_because: str | None
    quarantined: bool
    halted_because: str | None
    waits_for: list[int]
    failing_since: datetime | None = None
    failing_offset: int | None = None
    failing_attempt: int | None = None
    failing_because: str | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A growth that a group cannot finish by itself: an old partition is paused before where it ended then.

    Attributes:
        group: The consumer group.
        partition: The partition that is paused. Resume it, or move the group past what is there.
        paused_because: Why.
        quarantined: Whether a failing event paused it.
        holds: The new partitions that wait for it.
    """

    group: str
    partition: int
    paused_because: str | None
    quarantined: bool
    holds: list[int]


def held_back(lags: Iterable[Lag]) -> list[HeldBack]:
    """What is held back, from how far groups are."""
    found = list(lags)
    waiting: dict[tuple[str, int], list[int]] = {}
    for lag in found:
        for older in lag.waits_for:
            waiting.setdefault((lag.group, older), []).append(lag.partition)
    return [
        HeldBack(lag.group, lag.partition, lag.paused_because, lag.quarantined, holds)
        for lag in found
        if lag.paused_at is not None and (holds := waiting.get((lag.group, lag.partition)))
    ]


class Gone(StrEnum):
    """What a reader does when retention dropped what it wanted next."""

    ERROR = "error"
    EARLIEST = "earliest"
    LATEST = "latest"

    @classmethod
    def of(cls, given: Gone | str) -> Gone:
        """By its word. Raises `InvalidInput`."""
        check_choice("gone", given, list(cls))
        return cls(given)


@dataclass(slots=True)
class Columns:
    """Events to be appended, by column; a column that is None is so for all."""

    payloads: list[Any]
    keys: list[str | None] | None = None
    headers: list[str | None] | None = None
    times: list[datetime | None] | None = None
    bytes: bool = False

    def __len__(self) -> int:
        return len(self.payloads)


def chunked(count: int) -> Iterator[int]:
    """`count` events as sizes of chunks."""
    while count > 0:
        yield min(count, CHUNK)
        count -= CHUNK
