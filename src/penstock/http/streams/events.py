"""Events as JSON: out of chunks as the database has them, and into columns as they are appended.

Payloads of JSON travel as the text that they are, so that no number is rounded; payloads of bytes as base64.
"""

from __future__ import annotations

import base64
import binascii
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
import orjson
from msgspec import Raw, Struct

from penstock.core.checks import ZONED
from penstock.core.serialization import load_json, storable
from penstock.errors import InvalidInput, Unreadable
from penstock.http.bodies import NOTHING
from penstock.http.errors import ApiError
from penstock.streams.compression import pack, unpack
from penstock.streams.models import Chunk, Columns, StreamRecord, has_events_for_others, is_for, may_be_for_others

_OPTIONS = orjson.OPT_UTC_Z
# So much of a chunk that is compressed becomes one piece.
_UNPACKED_AT_ONCE = 8 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Events of one partition that follow each other, from `first` to before `next`: their offsets, and each as JSON."""

    partition: int
    first: int
    next: int
    offsets: list[int]
    events: list[bytes]
    size: int

    def since(self, offset: int) -> Piece:
        """The part from an offset on."""
        if offset <= self.first:
            return self
        at = bisect_left(self.offsets, offset)
        return replace(self, first=offset, offsets=self.offsets[at:], events=self.events[at:])

    def first_of(self, most: int) -> Piece:
        """The first so many events."""
        if len(self.events) <= most:
            return self
        return replace(self, next=self.offsets[most], offsets=self.offsets[:most], events=self.events[:most])


def piece_of(record: StreamRecord, chunk: Chunk, since: int) -> Piece:
    """The events of a chunk from an offset on."""
    offsets = list(chunk.offsets) if chunk.offsets is not None else list(range(chunk.first_offset, chunk.next_offset))
    begin = bisect_left(offsets, since)
    events: list[bytes] = []
    size = 100
    for event in _events(record, chunk, offsets, begin):
        events.append(orjson.dumps(event, option=_OPTIONS))
        size += len(events[-1])
        if size > _UNPACKED_AT_ONCE and record.compression is not None and begin + len(events) < len(offsets):
            end = begin + len(events)
            return Piece(chunk.partition, since, offsets[end], offsets[begin:end], events, size)
    return Piece(chunk.partition, since, chunk.next_offset, offsets[begin:], events, size)


def for_group(piece: Piece, chunk: Chunk, group: str) -> Piece:
    """The piece of a chunk without the events that are for another consumer group, or erased."""
    if not has_events_for_others(chunk) or chunk.headers is None:
        return piece
    offsets = chunk.offsets if chunk.offsets is not None else range(chunk.first_offset, chunk.next_offset)
    others = {
        offset
        for offset, text in zip(offsets, chunk.headers, strict=True)
        if text is not None and may_be_for_others(text) and not is_for(_headers_of(text), group)
    }
    kept = [index for index, offset in enumerate(piece.offsets) if offset not in others]
    return replace(piece, offsets=[piece.offsets[at] for at in kept], events=[piece.events[at] for at in kept])


def _headers_of(text: str) -> dict[str, Any]:
    with suppress(Unreadable):
        found = load_json(text)
        if isinstance(found, dict):
            return found
    return {}


def pieces_of(record: StreamRecord, chunks: Iterable[Chunk], at: dict[int, int]) -> list[Piece]:
    """The events of chunks of one or more partitions from their offsets in `at` on, which go on past them.

    Where they become too large to be had at once, what is behind is for another time.
    """
    found: list[Piece] = []
    for chunk in chunks:
        piece = piece_of(record, chunk, at[chunk.partition])
        found.append(piece)
        at[chunk.partition] = piece.next
        if record.compression is not None and sum(one.size for one in found) > _UNPACKED_AT_ONCE:
            break
    return found


def _events(record: StreamRecord, chunk: Chunk, offsets: list[int], begin: int) -> Iterator[dict[str, Any]]:
    for index in range(begin, len(offsets)):
        event: dict[str, Any] = {
            "partition": chunk.partition,
            "offset": offsets[index],
            "key": None if chunk.keys is None else chunk.keys[index],
        }
        if record.format == "bytes":
            stored = None if chunk.bytes is None else chunk.bytes[index]
            if stored is not None and record.compression is not None:
                try:
                    stored = unpack(stored, record.max_event_bytes)
                except Unreadable as error:
                    # It is this event's own fault: the others can be read.
                    stored = None
                    event["error"] = f"its payload cannot be unpacked: {error.message}"
            event["bytes"] = None if stored is None else base64.b64encode(stored).decode()
        else:
            text = None if chunk.data is None else chunk.data[index]
            event["data"] = None if text is None else orjson.Fragment(text)
        headers = None if chunk.headers is None else chunk.headers[index]
        event["headers"] = {} if headers is None else orjson.Fragment(headers)
        event["time"] = None if chunk.times is None else chunk.times[index]
        event["appended_at"] = chunk.appended_at
        if chunk.odd_times is not None and index in chunk.odd_times:
            event["error"] = "it happened before the year 1 or after 9999"
        yield event


class EventBody(Struct, forbid_unknown_fields=True):
    """An event that is to be appended."""

    data: Raw = NOTHING
    bytes: str | None = None
    key: str | None = None
    headers: Raw = NOTHING
    time: datetime | None = None


class Given(NamedTuple):
    """An event as its columns have it."""

    payload: Any
    key: str | None
    headers: str | None
    time: datetime | None


_body_of = msgspec.json.Decoder(EventBody).decode


def read_event(record: StreamRecord, line: bytes) -> Given:
    """An event that is to be appended to a stream, from JSON. Raises `ApiError` 400, `InvalidInput`."""
    try:
        event = _body_of(line)
        data, headers = bytes(event.data).decode(), bytes(event.headers).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_request", f"That is not an event: {error}", in_body=True) from None
    what = f"an event of {record.name}"
    if event.time is not None and event.time.tzinfo is None:
        raise InvalidInput(f"time has no time zone: {event.time.isoformat()}", hint=ZONED)
    if event.key is not None and "\x00" in event.key:
        raise InvalidInput("the key contains the character U+0000", hint="PostgreSQL cannot store it.")
    if headers and headers != "null" and not headers.startswith("{"):
        raise InvalidInput("headers must be an object", hint='For example {"trace": "4bf92f"}.')
    text = storable(headers, what) if headers not in ("", "null", "{}") else None
    return Given(_payload(record, event, data, what), event.key, text, event.time)


def columns_of(record: StreamRecord, events: Sequence[Given]) -> Columns:
    """Events as an append takes them."""
    keys = [event.key for event in events]
    headers = [event.headers for event in events]
    times = [event.time for event in events]
    return Columns(
        [event.payload for event in events],
        keys if any(key is not None for key in keys) else None,
        headers if any(text is not None for text in headers) else None,
        times if any(time is not None for time in times) else None,
        record.format == "bytes",
    )


def _payload(record: StreamRecord, event: EventBody, data: str, what: str) -> Any:
    if record.format != "bytes":
        if event.bytes is not None or not data:
            raise InvalidInput(f"{what} needs data, any JSON", hint='For example {"data": {"total": 3}, "key": "acme"}.')
        # A JSON null in a compacted stream says that the key is gone.
        return None if record.compact and data == "null" else storable(data, what)
    if data:
        raise InvalidInput(f"{what} needs bytes, as base64", hint='For example {"bytes": "aGVsbG8=", "key": "acme"}.')
    if event.bytes is None:
        if record.compact:
            return None
        raise InvalidInput(f"{what} needs bytes, as base64", hint='For example {"bytes": "aGVsbG8=", "key": "acme"}.')
    try:
        blob = base64.b64decode(event.bytes, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("bytes is not base64", hint='For example {"bytes": "aGVsbG8="}.') from None
    return blob if record.compression is None else pack(blob)
