"""Events of streams: append one or very many, read, follow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from datetime import datetime
from typing import Annotated

import orjson
from fastapi import Header, Query, Request, Response

from penstock.errors import InvalidInput, OffsetGone, PenstockError
from penstock.event import Bounds, StreamRecord
from penstock.http import bodies, live
from penstock.http.api.common import Wait, answer, body_of, limited_body, needs, principal_of, router, service_of
from penstock.http.api.streams import StreamName, find_stream
from penstock.http.auth import Role
from penstock.http.errors import ApiError, bad_json, from_penstock, invalid_parameter
from penstock.http.events import Appendix, Piece, pieces_of
from penstock.http.live import EventStream
from penstock.http.publishing import lines_of
from penstock.http.service import Service
from penstock.http.stream_models import Appended, Events, NewEvent
from penstock.postgres import streams

api = router("streams")
_NDJSON = "application/x-ndjson"
_LINES, _BYTES = 1_000, 4 << 20
_NEW = {"data": {"total": 3}, "key": "acme", "headers": {"trace": "4bf92f"}}
_LINES_OF = '{"data": {"total": 3}, "key": "acme"}\n{"data": {"total": 5}, "key": "bolt"}\n'
_BODY = body_of(NewEvent, _NEW)
_BODY["requestBody"]["content"] |= body_of(NewEvent, _LINES_OF, content=_NDJSON)["requestBody"]["content"]
_FOLLOWED = 'retry: 1000\n\nid: 0:18,1:4\ndata: {"partition":0,"offset":17,"key":"acme","data":{"total":3},...}\n\n'
Producer = Annotated[
    str | None,
    Query(
        description="Name of the producer, one for each writer of this user, for appends that can be repeated.",
        min_length=1,
        max_length=200,
    ),
]
Sequence = Annotated[
    int | None, Query(ge=1, le=9_000_000_000_000_000_000, description="Number of the producer's batch: one more than the last.")
]


@api.post("/v1/streams/{name:name}/events", status_code=201, response_model=Appended, openapi_extra=_BODY)
@needs(Role.ENQUEUE, batch=True)
async def append(request: Request, name: StreamName, producer: Producer = None, sequence: Sequence = None) -> Response:
    """Append an event (JSON), or any number of them, one in each line (NDJSON).

    Lines are appended in parts of 1,000 (or 4 MiB), each all or none. With `producer` and `sequence` an append that
    is repeated, since its answer was lost, is there once; the parts of a body have numbers that follow each other, and the
    answer has the last one.
    """
    service = service_of(request)
    if (producer is None) != (sequence is None):
        raise invalid_parameter("producer and sequence go together", request.url.path, "Give both, or none of them")
    if producer is not None and "\x00" in producer:
        raise invalid_parameter("Invalid producer", request.url.path, "It has a character that cannot be stored")
    record = await find_stream(request, name)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    part = _Append(service, record, producer, sequence, principal_of(request).name)
    if kind == _NDJSON:
        return answer(await part.lines(request), 201)
    return answer(await part.one(request), 201)


class _Append:
    """One request that appends."""

    def __init__(self, service: Service, record: StreamRecord, producer: str | None, sequence: int | None, user: str) -> None:
        self._service = service
        self._record = record
        self._producer = producer
        self._sequence = sequence
        self._user = user
        self._last: int | None = None
        self._gathered = Appendix(record)
        self._line = 0
        self._appended = 0
        self._repeated = 0

    async def one(self, request: Request) -> dict[str, object]:
        body = await limited_body(request)
        if not body.strip():
            raise bad_json()
        self._gathered.add(body)
        position = await self._flush()
        where = {} if position is None else {"partition": position[0], "offset": position[1]}
        return {"appended": self._appended, **where, "sequence": self._last, "duplicate": self._repeated > 0}

    async def lines(self, request: Request) -> dict[str, object]:
        try:
            async for line in lines_of(request.stream(), self._service.settings.max_body):
                await self._take(line)
            await self._flush()
        except PenstockError as error:
            refused = from_penstock(error, request.url.path)
            if refused.status < 500 or self._appended:
                raise self._at_line(refused) from None
            raise
        return {"appended": self._appended, "sequence": self._last, "duplicate": self._repeated > 0}

    async def _take(self, line: bytes) -> None:
        self._line += 1
        if line.strip():
            self._gathered.add(line)
            # By what the lines are, not by how they arrived: a body that is sent again has the same parts.
            if len(self._gathered) >= _LINES or self._gathered.bytes >= _BYTES:
                await self._flush()

    async def _flush(self) -> tuple[int, int] | None:
        events = len(self._gathered)
        if not events:
            return None
        positions, done = await self._service.appending.append(
            self._record.name, self._gathered.columns(), self._producer, self._sequence, self._user
        )
        self._last = self._sequence
        if self._sequence is not None:
            self._sequence += 1
        if done:
            self._appended += events
            self._service.metrics.appended(self._record.name, events)
        else:
            self._repeated += events
        return positions[0] if positions else None

    def _at_line(self, error: ApiError) -> ApiError:
        there = self._appended + self._repeated
        detail = f"{there:,} events before are there; what came after them is not, up to line {self._line:,}."
        return ApiError(
            error.status,
            error.id,
            f"Line {self._line}: {error.message}",
            detail=f"{error.hint}. {detail}" if error.hint else detail,
            instance=error.instance,
            in_body=True,
            headers=error.headers,
        )


@api.get("/v1/streams/{name:name}/events", response_model=Events)
@needs(Role.READ)
async def get_events(
    request: Request,
    name: StreamName,
    partition: Annotated[int, Query(ge=0, le=1_023, description="Partition to read.")] = 0,
    offset: Annotated[int, Query(ge=0, le=9_000_000_000_000_000_000, description="First event wanted.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most events; fewer when they are large.")] = 100,
    wait: Wait = None,
) -> Response:
    """Events of a partition from an offset on; with `wait` the answer waits for the first one. 410 when the offset is gone."""
    service = service_of(request)
    within = bodies.span(wait, "wait", service.settings.longest_wait)
    record = await find_stream(request, name)
    piece = await _read(service, record, partition, offset, limit)
    if not piece.events and within > 0:
        service.check_room()
        deadline = time.monotonic() + within
        with service.metrics.waiting.track_inprogress():
            async with service.feeds.following(record, {partition: offset}) as follower:
                while not piece.events and (left := deadline - time.monotonic()) > 0 and not service.stopping.is_set():
                    if found := await follower.next(min(left, service.settings.live_keep_alive.total_seconds())):
                        piece = found[0].first_of(limit)
                    elif await request.is_disconnected():
                        break
    service.metrics.read(name, "get", len(piece.events))
    fragments = [orjson.Fragment(event) for event in piece.events]
    return answer({"partition": partition, "next_offset": piece.next, "events": fragments})


async def _read(service: Service, record: StreamRecord, partition: int, offset: int, limit: int) -> Piece:
    chunks = await streams.read_chunks(service.database, record.name, {partition: offset}, limit)
    found = pieces_of(record, chunks, {partition: offset})
    events = [event for piece in found for event in piece.events]
    offsets = [at for piece in found for at in piece.offsets]
    return Piece(partition, offset, found[-1].next if found else offset, offsets, events, 0).first_of(limit)


@api.get(
    "/v1/streams/{name:name}/events/follow",
    response_class=Response,
    responses={200: {"description": "Events as they come.", "content": {"text/event-stream": {"example": _FOLLOWED}}}},
)
@needs(Role.READ)
async def follow(
    request: Request,
    name: StreamName,
    start: Annotated[
        str,
        Query(
            alias="from",
            description="latest, earliest, a time, or positions: `0:17,1:5` (partition:offset).",
            examples=["latest"],
            max_length=30_000,
        ),
    ] = "latest",
    partition: Annotated[list[int] | None, Query(description="Only this partition; may be repeated.", max_length=1_024)] = None,
    last_event_id: Annotated[
        str | None, Header(description="The `id` of the last event that the client saw, instead of `from`.", max_length=30_000)
    ] = None,
) -> Response:
    """Follow a stream as Server-Sent Events, in order within each partition.

    The `id` of an event says how far the client is in every partition: with it in `Last-Event-ID` a client goes on where it was,
    without a gap and without a double. An event named `end` says that the server ends the connection (connect again), `gone` that
    retention has dropped what comes next. 410 when that is so at the beginning.
    """
    service = service_of(request)
    service.check_room()
    record = await find_stream(request, name)
    bounds = await streams.bounds(service.database, name)
    only = set(bounds) if partition is None else set(partition)
    if unknown := only - set(bounds):
        raise invalid_parameter(
            f"Stream {name} has no partition {min(unknown)}", request.url.path, f"Its partitions are 0 to {len(bounds) - 1}"
        )
    at = await _places(service, name, last_event_id or start, bounds)
    at = {place: offset for place, offset in at.items() if place in only}
    _check_places(name, at, bounds)
    return EventStream(service, "stream", _frames(service, record, at, grows=partition is None))


async def _places(service: Service, name: str, start: str, bounds: dict[int, Bounds]) -> dict[int, int]:
    """Where to begin in each partition. Raises `ApiError` 400."""
    if start in ("latest", "earliest"):
        return {at: found.next if start == "latest" else found.first for at, found in bounds.items()}
    if ":" in start and "T" not in start.upper():
        try:
            given = {int(at): int(offset) for at, _, offset in (place.partition(":") for place in start.split(","))}
        except ValueError:
            raise _bad_start(start) from None
        if unknown := set(given) - set(bounds):
            raise invalid_parameter(f"Stream {name} has no partition {min(unknown)}")
        # What is not named began later than the client looked last.
        return {at: given.get(at, found.first) for at, found in bounds.items()}
    try:
        moment = datetime.fromisoformat(start)
    except ValueError:
        raise _bad_start(start) from None
    if moment.tzinfo is None:
        raise _bad_start(start)
    return await streams.offsets_at(service.database, name, moment)


def _bad_start(start: str) -> ApiError:
    return invalid_parameter(
        f"Invalid from: {start[:100]}", detail="Write latest, earliest, a time such as 2026-01-31T12:00:00Z, or 0:17,1:5"
    )


def _check_places(name: str, at: dict[int, int], bounds: dict[int, Bounds]) -> None:
    for partition, offset in at.items():
        found = bounds[partition]
        if not 0 <= offset <= found.next:
            raise InvalidInput(
                f"partition {partition} of stream {name} has no offset {offset}", hint=f"The next to come is {found.next}."
            )
        if offset < found.first:
            raise OffsetGone(
                f"offset {offset} of partition {partition} of stream {name} is gone",
                hint=f"The first that is there is {found.first}, the next to come {found.next}.",
            )


async def _frames(service: Service, record: StreamRecord, at: dict[int, int], *, grows: bool) -> AsyncGenerator[bytes, None]:
    keep_alive = service.settings.live_keep_alive.total_seconds()
    until = time.monotonic() + service.settings.longest_live.total_seconds()
    ids = _Ids(at)
    yield live.beginning()
    async with service.feeds.following(record, at, grows=grows) as follower:
        while not service.stopping.is_set() and (left := until - time.monotonic()) > 0:
            pieces = await follower.next(min(keep_alive, left))
            if not pieces:
                yield live.KEEP_ALIVE
            for frame in live.packed(frame for piece in pieces for frame in ids.frames(piece)):
                yield frame
            service.metrics.read(record.name, "follow", sum(len(piece.events) for piece in pieces))
    yield live.ending("the server stops" if service.stopping.is_set() else "the connection is as old as it may get")


class _Ids:
    """The position of a follower after each event, as the id of that event."""

    def __init__(self, at: dict[int, int]) -> None:
        self._places = {partition: f"{partition}:{offset}" for partition, offset in sorted(at.items())}

    def frames(self, piece: Piece) -> Iterator[bytes]:
        for offset, event in zip(piece.offsets, piece.events, strict=True):
            self._places[piece.partition] = f"{piece.partition}:{offset + 1}"
            yield live.event(event, id=",".join(self._places.values()))
