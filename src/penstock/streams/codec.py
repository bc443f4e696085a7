"""Payloads of streams: conversion of a producer's values to the form that is stored, and back.

A stream of the format "json" stores the JSON text of a payload. A stream of the format "bytes" stores the bytes of a plain
payload, or the JSON of a typed one. With compression, each payload is compressed by itself. In an encrypted stream, what would be
stored is encrypted last, payload by payload, and read in both forms; what that costs is paid by encrypted streams alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import repeat
from operator import attrgetter
from typing import Any, Generic, TypeVar

from penstock.core.checks import check_many, check_time
from penstock.core.encryption import Keyring, no_key, opened_reason, owner_of_events, sealed_reason
from penstock.core.garbage_collection import CollectedLater
from penstock.core.keys import KeyOf, key_by, key_of_field
from penstock.core.serialization import Codec, dump_json, load_json
from penstock.core.user_code import message_of
from penstock.errors import InvalidInput, KeyMissing, Unreadable
from penstock.streams.compression import LEAST_BOUND, pack, unpack
from penstock.streams.models import Chunk, Columns, Event, NewEvent, StreamRecord

T = TypeVar("T")
_UNPACKED_AT_ONCE = 128 << 20
_FIELDS = attrgetter("data", "key", "headers", "time")
_ODD_TIME = "before the year 1 or after 9999"


class Undecodable:
    """Stands for a payload that does not match its type, or whose key this application lacks (`key_id`)."""

    __slots__ = ("key_id", "reason")

    def __init__(self, reason: str, key_id: str | None = None) -> None:
        self.reason = reason
        self.key_id = key_id


class Encoding(Generic[T]):
    """Encodes and decodes the events of one stream.

    Args:
        name: Name of the stream.
        payload: Payload type; bytes for plain bytes.
        key: Key of a payload: name of a field, or a function; None: an event has a key only when the producer gives one.
        binary: Whether the stream stores bytes.
        compressed: Whether the bytes are compressed.
        key_optional: Whether an event may lack the field that is its key.
        keyring: Keys of the application; None: it has none.
        encrypted: Whether the application declares the stream as encrypted.

    Attributes:
        seals: Whether what is appended is encrypted, by the declaration.
        encrypted: Whether payloads and errors of handlers are encrypted: by the declaration, or in the database.
    """

    def __init__(
        self,
        name: str,
        payload: Any,
        key: str | KeyOf | None,
        binary: bool,
        compressed: bool,
        key_optional: bool = False,
        keyring: Keyring | None = None,
        encrypted: bool = False,
    ) -> None:
        self.binary = binary
        self.suspect = False  # whether a payload did not match its type
        self._raw = payload is bytes
        self._codec: Codec[T] = Codec(Any if self._raw else payload, f"stream {name}")
        self._name = name
        self._key_of: KeyOf | None = None
        if isinstance(key, str):
            hint = "Append it with a key (key=..., or NewEvent), or declare the stream with key_optional=True."
            self._key_of = key_of_field(f"an event of stream {name}", key, key_optional, self._codec.check, hint)
        elif key is not None:
            self._key_of = key_by(f"an event of stream {name}", key)
        self._compressed = compressed
        self.largest = LEAST_BOUND  # largest size of an uncompressed payload
        self._keyring = keyring or Keyring()
        # Dead letters are moved as they are, so they belong to the stream that they come from.
        self._owner = owner_of_events(name)
        self.seals = self.encrypted = self._may_be_sealed = encrypted

    def refresh(self, record: StreamRecord) -> None:
        """Apply what the database has."""
        self.largest = record.max_event_bytes
        self.encrypted = self.seals or record.encrypted
        self._may_be_sealed = self.encrypted or record.encrypted_at is not None

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Ids of the keys that the application has."""
        return self._keyring.ids

    @property
    def locked(self) -> bool:
        """Whether the stream is encrypted and there is no key."""
        return self.encrypted and not self._keyring

    def reason_of(self, error: BaseException) -> str:
        """Why a handler failed, as it is stored: class and message, which is encrypted where the payloads are."""
        if self.encrypted and self._keyring and not isinstance(error, KeyMissing):
            return sealed_reason(self._keyring, self._owner, type(error).__name__, message_of(error))
        return f"{type(error).__name__}: {message_of(error)}"

    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of the payloads; None: any JSON, or bytes."""
        return self._codec.schema()

    def columns(self, items: Iterable[NewEvent[T] | T], place: str | None = None) -> Columns:
        """The columns of events that are given as payloads or `NewEvent`s. Raises `InvalidInput` when one is not valid.

        Args:
            items: The events.
            place: Names these events among all of the stream, when a repeated call has to produce the same columns.
        """
        check_many("events", items, 'append_many([{"a": 1}, NewEvent({"a": 2}, key="acme")])')
        given = list(items)
        encode, key_of = self.encode, self._key_of
        wrapped = list(map(type, given)).count(NewEvent)
        payloads: list[Any]
        keys: list[Any] | None = None
        headers: list[str | None] | None = None
        times: list[datetime | None] | None = None
        if not wrapped:
            payloads = given if self._plain(given) else [encode(item) for item in given]  # type: ignore[arg-type]
            if key_of is not None:
                keys = [None if data is None else key_of(data) for data in given]
        else:
            events: list[Any] = given
            if wrapped < len(given):
                events = [item if type(item) is NewEvent else NewEvent(item) for item in given]
            payloads, keys, plain_headers, plain_times = map(list, zip(*map(_FIELDS, events), strict=True))
            if key_of is not None:
                keys = [
                    key if key is not None or data is None else key_of(data) for key, data in zip(keys, payloads, strict=True)
                ]
            if not self._plain(payloads):
                payloads = [encode(payload) for payload in payloads]
            if plain_headers.count(None) < len(events):
                headers = [self._headers(each) for each in plain_headers]
                headers = headers if any(headers) else None
            if plain_times.count(None) < len(events):
                times = [None if time is None else check_time("time of an event", time) for time in plain_times]
        if self.seals:
            payloads = self._sealed(payloads, place)
        return Columns(payloads, None if keys is None else self._keys(keys), headers, times, self.binary)

    def _sealed(self, payloads: Sequence[Any], place: str | None) -> list[Any]:
        """Encoded payloads as an encrypted stream stores them; a deletion stays one."""
        if not self._keyring:
            raise no_key(f"stream {self._name}")
        seal: Callable[..., Any] = self._keyring.seal_bytes if self.binary else self._keyring.seal
        return [
            None if payload is None else seal(payload, self._owner, place=None if place is None else f"{place} {number}")
            for number, payload in enumerate(payloads)
        ]

    def _open_and_decode(self, stored: Any) -> T:
        opened = self._keyring.open_bytes(stored, self._owner) if self.binary else self._keyring.open(stored, self._owner)
        return self.decode(opened)

    def _plain(self, payloads: list[Any]) -> bool:
        """Whether payloads are stored without conversion."""
        return self._raw and not self._compressed and set(map(type, payloads)) <= {bytes}

    def _keys(self, keys: list[Any]) -> list[str | None] | None:
        """Checked keys; None: no event has one."""
        try:
            # Most keys are plain, which one look at all of them shows.
            joined = "".join(keys)
            if joined.isascii() and "\x00" not in joined:
                return keys
        except TypeError:  # null, or no text
            if keys.count(None) == len(keys):
                return None
        return [self._key(key) for key in keys]

    def _key(self, key: Any) -> str | None:
        if key is not None and not isinstance(key, str):
            raise InvalidInput(f"a key of stream {self._name} must be text, not {key!r:.100}", hint="Give str(...).")
        if key is not None and "\x00" in key:
            raise InvalidInput(f"a key of stream {self._name} contains the character U+0000", hint="PostgreSQL cannot store it.")
        if key is not None and not _is_text(key):
            raise InvalidInput(
                f"a key of stream {self._name} is not valid text: {key!r}", hint="It contains half of a surrogate pair."
            )
        return key

    def _headers(self, headers: Mapping[str, Any] | None) -> str | None:
        if headers is not None and not isinstance(headers, Mapping):
            raise InvalidInput(
                f"headers of an event of stream {self._name} must be a mapping, not {headers!r:.100}",
                hint='For example: headers={"trace": "4bf92f"}',
            )
        return dump_json(dict(headers), f"an event of {self._name} (its headers)") if headers else None

    def encode(self, data: T) -> Any:
        """A payload as it is stored. None remains None, which marks a key as deleted."""
        if data is None:
            return None
        if self._raw:
            if not isinstance(data, (bytes, bytearray, memoryview)):
                raise InvalidInput(f"stream {self._name} takes bytes, not {type(data).__name__}")
            blob = bytes(data)
        else:
            text = self._codec.dump(data)
            if not self.binary:
                return text
            blob = text.encode()
        return pack(blob) if self._compressed else blob

    def decode(self, stored: Any) -> T:
        """The payload of a stored value. Raises `Unreadable` when it cannot be decoded, or does not match the type."""
        if stored is None:
            return None  # type: ignore[return-value]
        if self.binary:
            if self._compressed:
                try:
                    stored = unpack(stored, self.largest)
                except Unreadable as error:
                    raise Unreadable(f"a payload of stream {self._name} cannot be unpacked: {error.message}") from None
            if self._raw:
                return stored  # type: ignore[no-any-return]
            try:
                stored = stored.decode()
            except UnicodeDecodeError as error:
                raise Unreadable(f"a payload of stream {self._name} is not UTF-8: {error}") from None
        return self._codec.load(stored)

    def _decode_or_error(self, stored: Any) -> Any:
        try:
            return self._open_and_decode(stored) if self._may_be_sealed else self.decode(stored)
        except Exception as error:
            # The validators of a type may raise any exception.
            reason = error.message if isinstance(error, InvalidInput) else f"{type(error).__name__}: {error}"
            return Undecodable(reason, error.key_id if isinstance(error, KeyMissing) else None)

    def each(self, chunk: Chunk, from_offset: int) -> Iterator[Event[Any]]:
        """`events` with `lenient`. Compressed payloads are unpacked a few at a time, since a chunk may hold a thousand."""
        if self._compressed:
            return self._few_by_few(chunk, from_offset)
        return iter(self.events(chunk, from_offset, lenient=True))

    def _few_by_few(self, chunk: Chunk, at: int) -> Iterator[Event[Any]]:
        most = max(1, min(16, _UNPACKED_AT_ONCE // max(self.largest, 1)))
        while at < chunk.next_offset:
            events = self.events(chunk, at, lenient=True, most=most)
            yield from events
            at = events[-1].offset + 1 if events else chunk.next_offset

    def events(self, chunk: Chunk, from_offset: int, *, lenient: bool = False, most: int | None = None) -> list[Event[T]]:
        """The events of a chunk from an offset on.

        Args:
            chunk: The chunk.
            from_offset: First offset to return.
            lenient: Whether an event whose payload does not match the type gets an `Undecodable` as data, instead of an error.
            most: Maximum number of events.
        """
        # The code works by column, since a reader spends most of its time here.
        offsets: Sequence[int] = chunk.offsets if chunk.offsets is not None else range(chunk.first_offset, chunk.next_offset)
        begin = bisect_left(offsets, from_offset)
        end = chunk.events if most is None else min(begin + most, chunk.events)
        stored = chunk.bytes if self.binary else chunk.data
        nothing: Iterable[None] = repeat(None)
        payloads = self._decoded([None] * (end - begin) if stored is None else stored[begin:end], lenient)
        headers: Iterable[dict[str, Any]] = ({} for _ in nothing)
        if chunk.headers is not None:
            headers, payloads = self._with_headers(chunk.headers[begin:end], payloads, lenient)
        if chunk.odd_times is not None:
            payloads = self._with_odd_times(
                [index - begin for index in chunk.odd_times if begin <= index < end], payloads, lenient
            )
        with CollectedLater():
            return list(
                map(
                    Event,
                    repeat(chunk.partition),
                    offsets[begin:end],
                    nothing if chunk.keys is None else chunk.keys[begin:end],
                    payloads,
                    headers,
                    nothing if chunk.times is None else chunk.times[begin:end],
                    repeat(chunk.appended_at),
                )
            )

    def _with_odd_times(self, indexes: Sequence[int], payloads: Sequence[Any], lenient: bool) -> Sequence[Any]:
        """Payloads; those of events whose time Python cannot represent are undecodable."""
        if not indexes:
            return payloads
        if not lenient:
            raise Unreadable(f"an event of stream {self._name} happened {_ODD_TIME}")
        self.suspect = True
        found = list(payloads)
        for index in indexes:
            found[index] = Undecodable(f"it happened {_ODD_TIME}")
        return found

    def _with_headers(
        self, texts: Sequence[str | None], payloads: Sequence[Any], lenient: bool
    ) -> tuple[list[dict[str, Any]], Sequence[Any]]:
        """Headers and payloads; events whose headers are JSON for PostgreSQL and not for Python are undecodable."""
        headers: list[dict[str, Any]] = []
        found = list(payloads)
        for index, text in enumerate(texts):
            try:
                found_headers = {} if text is None else load_json(text)
                headers.append(self._with_reasons(found_headers) if self._may_be_sealed else found_headers)
            except Unreadable as error:
                if not lenient:
                    raise Unreadable(f"headers of an event of stream {self._name} cannot be read: {error.message}") from None
                self.suspect = True
                headers.append({})
                found[index] = Undecodable(f"its headers cannot be read: {error.message}")
        return headers, found

    def _with_reasons(self, headers: dict[str, Any]) -> dict[str, Any]:
        """Headers of an event, with the error of a dead letter decrypted."""
        for name in ("dead", "replayed"):
            origin = headers.get(name)
            if isinstance(origin, dict) and isinstance(origin.get("error"), str):
                headers[name] = {**origin, "error": opened_reason(self._keyring, self._owner, origin["error"])}
        return headers

    def _decoded(self, stored: Sequence[Any], lenient: bool) -> Sequence[Any]:
        if self._raw and not self._compressed and not self._may_be_sealed:
            return stored
        decode = self._open_and_decode if self._may_be_sealed else self.decode
        try:
            return [None if payload is None else decode(payload) for payload in stored]
        except Exception:
            if not lenient:
                raise
            self.suspect = True
            return [self._decode_or_error(payload) for payload in stored]


def unreadable(stream: str, event: Event[Any]) -> Unreadable:
    """The error for an event whose data is `Undecodable`."""
    return Unreadable(
        f"offset {event.offset} of partition {event.partition} of stream {stream} cannot be read: {event.data.reason}",
        hint="Continue with the next offset to skip it.",
    )


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
