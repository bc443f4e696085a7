"""Many messages in one request: NDJSON, a message a line, published in the order of the lines while the body arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec import Raw, Struct

from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.http.errors import ApiError, from_penstock, too_large
from penstock.http.service import Service
from penstock.job import make_id
from penstock.payload import storable
from penstock.postgres import topics

_LINES, _BYTES = 1_000, 4 << 20
_LONGEST_SPAN_S = 2_678_400.0


class _Line(Struct, forbid_unknown_fields=True):
    data: Raw = Raw(b"")
    id: UUID | None = None
    unique: str | None = None
    run_after: float | datetime | None = None
    expires_at: float | datetime | None = None


_line_of = msgspec.json.Decoder(_Line).decode


async def lines_of(chunks: AsyncIterator[bytes], longest: int) -> AsyncIterator[bytes]:
    """The lines of a body as it arrives, without their ends. Raises `ApiError` 413 for one of more than `longest` bytes."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > longest or any(len(line) > longest for line in lines):
            raise too_large(f"A line is too long ({longest} bytes max)")
        for line in lines:
            yield line
    yield rest


class Publishing:
    """One request that publishes lines: all before the first bad one, and none from there on.

    Args:
        service: Of this process.
        topic: Where.
        path: Of the request, for errors.
    """

    def __init__(self, service: Service, topic: str, path: str) -> None:
        self._service = service
        self._topic = topic
        self._path = path
        self._line = 0
        self._gathered: list[tuple[int, str]] = []
        self._bytes = 0
        self._done = 0
        self._answer: dict[str, Any] = {"published": 0, "duplicates": 0, "last_seq": None}

    async def lines(self, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        """Publish them. Returns how many were published, how many had been before, and the number of the last one.

        Raises:
            ApiError: With the line at which it was, and how many messages before it are published.
        """
        try:
            async for line in lines_of(chunks, self._service.settings.max_body):
                self._line += 1
                if line.strip():
                    await self._take(line)
            await self._flush()
        except PenstockError as error:
            refused = from_penstock(error, self._path)
            if refused.status < 500 or self._done:
                raise self._at_line(refused) from None
            raise
        return self._answer

    async def _take(self, line: bytes) -> None:
        try:
            document = _document(line)
        except PenstockError:
            # What came before it is good.
            at = self._line
            await self._flush()
            self._line = at
            raise
        self._gathered.append((self._line, document))
        self._bytes += len(line)
        if len(self._gathered) >= _LINES or self._bytes >= _BYTES:
            await self._flush()

    async def _flush(self) -> None:
        gathered, self._gathered, self._bytes = self._gathered, [], 0
        if gathered:
            at = self._line
            await self._publish(gathered)
            self._line = at

    async def _publish(self, part: list[tuple[int, str]]) -> None:
        """Publish a part; when it is refused, in halves: up to the bad message, or until it is not too much at once."""
        self._line = part[0][0]
        try:
            receipts = await topics.publish_many(self._service.database, self._topic, [document for _, document in part])
        except (Conflict, InvalidInput):
            if len(part) == 1:
                raise
            middle = len(part) // 2
            await self._publish(part[:middle])
            await self._publish(part[middle:])
            return
        new = sum(not receipt.duplicate for receipt in receipts)
        self._answer["published"] += new
        self._answer["duplicates"] += len(receipts) - new
        self._answer["last_seq"] = receipts[-1].seq
        self._done += len(receipts)
        self._service.metrics.published(self._topic, new)

    def _at_line(self, error: ApiError) -> ApiError:
        detail = f"{self._done:,} messages before are published; what came after them is not."
        return ApiError(
            error.status,
            error.id,
            f"Line {self._line}: {error.message}",
            detail=f"{error.hint.rstrip('.')}. {detail}" if error.hint else detail,
            instance=error.instance,
            in_body=True,
            headers=error.headers,
        )


def _document(line: bytes) -> str:
    try:
        message = _line_of(line)
        data = bytes(message.data).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_request", f"That is not a message: {error}", in_body=True) from None
    if message.unique is not None and "\x00" in message.unique:
        raise InvalidInput("the unique key contains the character U+0000", hint="PostgreSQL cannot store it.")
    id = message.id or make_id()
    run_after, expires_at = _moment(message.run_after), _moment(message.expires_at)
    return topics.publish_document(storable(data, "the message") if data else "{}", id, message.unique, run_after, expires_at)


def _moment(given: float | datetime | None) -> datetime | timedelta | None:
    if isinstance(given, float):
        if not 0 <= given <= _LONGEST_SPAN_S:
            raise InvalidInput(f"{given:g} is not a number of seconds from now", hint="Use 0 to 2,678,400, or a time.")
        return timedelta(seconds=given)
    if given is not None and given.tzinfo is None:
        raise InvalidInput(f"{given.isoformat()} has no time zone", hint="Write 2026-01-31T12:00:00Z.")
    return given
