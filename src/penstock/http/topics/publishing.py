"""Many messages in one request: a message for each line. See `penstock.http.ndjson`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal
from uuid import UUID

import msgspec
from fastapi import Request, Response
from msgspec import Raw, Struct

from penstock.core.checks import ZONED
from penstock.core.serialization import storable
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.http.errors import ApiError
from penstock.http.ndjson import LineOutcome, Lines
from penstock.http.service import Service
from penstock.jobs.models import make_id
from penstock.topics import queries as topics

_LONGEST_SPAN_S = 2_678_400.0


class PublishOutcome(LineOutcome):
    """One line of the answer to messages in lines: where the message is, or an error."""

    id: UUID | None = None
    seq: int | None = None
    outcome: Literal["published", "duplicate"] | None = None


class _Line(Struct, forbid_unknown_fields=True):
    data: Raw = Raw(b"")
    id: UUID | None = None
    key: str | None = None
    unique: str | None = None
    run_after: float | datetime | None = None
    expires_at: float | datetime | None = None


@dataclass(frozen=True, slots=True)
class _New:
    id: UUID
    document: str


_line_of = msgspec.json.Decoder(_Line).decode


async def publish_lines(service: Service, topic: str, request: Request, traceparent: str | None) -> Response:
    """Publish a message for each line, in their order; answers with a line for each."""

    async def write(part: list[_New]) -> Sequence[Mapping[str, Any]]:
        documents = [new.document for new in part]
        try:
            receipts = await topics.publish_many(service.database, topic, documents)
        except DatabaseUnavailable:
            # The ids are made, so that once more does no harm.
            receipts = await topics.publish_many(service.database, topic, documents)
        service.metrics.published(topic, sum(not receipt.duplicate for receipt in receipts))
        return [
            {"id": str(receipt.id), "seq": receipt.seq, "outcome": "duplicate" if receipt.duplicate else "published"}
            for receipt in receipts
        ]

    return await Lines(partial(_read, traceparent), write, longest=service.settings.max_body).answer(request)


def _read(traceparent: str | None, line: bytes) -> _New:
    try:
        message = _line_of(line)
        data = bytes(message.data).decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, "invalid_request", f"That is not a message: {error}", in_body=True) from None
    for what, key in (("unique key", message.unique), ("key", message.key)):
        if key is not None and "\x00" in key:
            raise InvalidInput(f"the {what} contains the character U+0000", hint="PostgreSQL cannot store it.")
    id = message.id or make_id()
    run_after, expires_at = _moment("run_after", message.run_after), _moment("expires_at", message.expires_at)
    payload = storable(data, "the message") if data else "{}"
    return _New(id, topics.publish_document(payload, id, message.unique, run_after, expires_at, traceparent, message.key))


def _moment(what: str, given: float | datetime | None) -> datetime | timedelta | None:
    if isinstance(given, float):
        if not 0 <= given <= _LONGEST_SPAN_S:
            raise InvalidInput(
                f"{what} is not a number of seconds from now: {given:g}", hint="Use 0 to 2,678,400, or a time with its zone."
            )
        return timedelta(seconds=given)
    if given is not None and given.tzinfo is None:
        raise InvalidInput(f"{what} has no time zone: {given.isoformat()}", hint=ZONED)
    return given
