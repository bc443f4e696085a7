"""Events of streams: append one or very many, read, follow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response

from penstock.core.checks import parse_time
from penstock.core.records import raw_list
from penstock.errors import InvalidInput, OffsetGone, PenstockError
from penstock.http import bodies
from penstock.http import sse as live
from penstock.http.call import Call
from penstock.http.errors import ApiError, bad_json, invalid_parameter
from penstock.http.ndjson import Lines, are_lines, outcomes
from penstock.http.openapi import json_or_lines
from penstock.http.routing import BATCH, READ, CurrentService, Instance, Room, Traceparent, User, Wait, limited_body, router
from penstock.http.service import Service
from penstock.http.sse import EventStream
from penstock.http.streams.appends import Appends
from penstock.http.streams.broadcaster import Broadcaster
from penstock.http.streams.events import Given, Piece, columns_of, pieces_of, read_event
from penstock.http.streams.models import Appended, AppendOutcome, Events, NewEvent
from penstock.http.streams.routes import OpenStream
from penstock.streams import queries as streams
from penstock.streams.models import Appended as Places
from penstock.streams.models import Bounds, StreamRecord

api = router("streams")
_APPENDED = '{"line":1,"outcome":"appended","partition":3,"offset":17}\n'
_NEW = {"data": {"total": 3}, "key": "acme", "headers": {"trace": "4bf92f"}}
_LINES_OF = '{"data": {"total": 3}, "key": "acme"}\n{"data": {"total": 5}, "key": "bolt"}\n'
_BODY = json_or_lines(NewEvent, _NEW, _LINES_OF)
_FOLLOWED = 'retry: 1000\n\nid: 7@0:18,1:4\ndata: {"partition":0,"offset":17,"key":"acme","data":{"total":3},...}\n\n'
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


@api.post(
    "/v1/streams/{name:name}/events",
    dependencies=[BATCH],
    status_code=201,
    response_model=Appended,
    responses=outcomes(AppendOutcome, _APPENDED),
    openapi_extra=_BODY,
)
async def append(
    request: Request,
    stream: OpenStream,
    service: CurrentService,
    user: User,
    path: Instance,
    traceparent: Traceparent,
    producer: Producer = None,
    sequence: Sequence = None,
) -> Appended | Response:
    """Append an event (JSON), or any number of them, one in each line (NDJSON).

    Lines are appended in their order; the answer (200) has a line for each, and one that is refused does not stop the others.
    With `producer` and `sequence` an append that is repeated, since its answer was lost, is there once: the parts of a body, of
    1,000 lines or 4 MiB, have numbers that follow each other, and are there as a whole or not at all.
    """
    if (producer is None) != (sequence is None):
        raise invalid_parameter("producer and sequence go together", path, "Give both, or none of them")
    if producer is not None and "\x00" in producer:
        raise invalid_parameter("Invalid producer", path, "It has a character that cannot be stored")
    append = _Append(service, stream, producer, sequence, user.name, traceparent)
    if are_lines(request):
        # A part with a number is there as a whole or not at all, so that it can be sent again.
        lines = Lines(append.read, append.write, longest=service.settings.max_body, divisible=producer is None)
        return await lines.answer(request)
    return await append.one(await limited_body(request))


class _Append:
    """One request that appends."""

    def __init__(
        self,
        service: Service,
        record: StreamRecord,
        producer: str | None,
        sequence: int | None,
        user: str,
        traceparent: str | None,
    ) -> None:
        self._service = service
        self._record = record
        self._producer = producer
        self._sequence = sequence
        self._user = user
        self._traceparent = traceparent
        self._refused: PenstockError | None = None

    def read(self, line: bytes) -> Given:
        """One event. Raises `ApiError` 400, `InvalidInput`."""
        return read_event(self._record, line)

    async def one(self, body: bytes) -> Appended:
        """Append the event that is the whole body."""
        if not body.strip():
            raise bad_json()
        sequence = self._sequence
        positions = await self._append([self.read(body)])
        if positions is None:
            return Appended(appended=0, sequence=sequence, duplicate=True)
        position = positions[0]
        return Appended(appended=1, partition=position.partition, offset=position.offset, sequence=sequence, duplicate=False)

    async def write(self, part: list[Given]) -> list[dict[str, Any]]:
        """Append a part of the lines; each has the number of its part."""
        if self._refused is not None:
            # The number of the part that was refused is free: the next part must not take it, or that one counted as there.
            raise self._refused
        numbered = {} if self._sequence is None else {"sequence": self._sequence}
        try:
            positions = await self._append(part)
        except PenstockError as error:
            self._refused = error if self._producer is not None else None
            raise
        if positions is None:
            return [{"outcome": "duplicate", **numbered}] * len(part)
        return [
            {"outcome": "appended", "partition": position.partition, "offset": position.offset, **numbered}
            for position in positions
        ]

    async def _append(self, events: list[Given]) -> Places | None:
        columns = columns_of(self._record, events).traced(self._traceparent)
        appends = self._service.part(Appends)
        positions = await appends.append(self._record.name, columns, self._producer, self._sequence, self._user)
        if self._sequence is not None:
            self._sequence += 1
        return positions


@api.get("/v1/streams/{name:name}/events", dependencies=[READ])
async def get_events(
    request: Request,
    stream: OpenStream,
    service: CurrentService,
    partition: Annotated[int, Query(ge=0, le=1_023, description="Partition to read.")] = 0,
    offset: Annotated[int, Query(ge=0, le=9_000_000_000_000_000_000, description="First event wanted.")] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most events; fewer when they are large.")] = 100,
    wait: Wait = None,
) -> Events:
    """Events of a partition from an offset on; with `wait` the answer waits for the first one. 410 when the offset is gone."""
    within = bodies.span(wait, "wait", service.settings.longest_wait)
    piece = await _read(service, stream, partition, offset, limit)
    if not piece.events and within > 0:
        service.check_room()
        deadline = time.monotonic() + within
        call: Call = request.scope["call"]
        with call.watching() as watch, service.metrics.waiting.track_inprogress():
            async with service.part(Broadcaster).following(stream, {partition: offset}) as follower:
                while not piece.events and (left := deadline - time.monotonic()) > 0 and not service.stopping.is_set():
                    if found := await follower.next(min(left, service.settings.live_keep_alive.total_seconds())):
                        piece = found[0].first_of(limit)
                    elif watch.ended.is_set() or await request.is_disconnected():
                        break
            watch.check()
    service.metrics.read(stream.name, "get", len(piece.events))
    return Events.model_construct(partition=partition, next_offset=piece.next, events=raw_list(piece.events))


async def _read(service: Service, record: StreamRecord, partition: int, offset: int, limit: int) -> Piece:
    chunks = await streams.read_chunks(service.database, record.name, {partition: offset}, limit, id=record.id)
    found = pieces_of(record, chunks, {partition: offset})
    events = [event for piece in found for event in piece.events]
    offsets = [at for piece in found for at in piece.offsets]
    return Piece(partition, offset, found[-1].next if found else offset, offsets, events, 0).first_of(limit)


@api.get(
    "/v1/streams/{name:name}/events/follow",
    dependencies=[READ],
    response_class=Response,
    responses={200: {"description": "Events as they come.", "content": {"text/event-stream": {"example": _FOLLOWED}}}},
)
async def follow(
    room: Room,
    stream: OpenStream,
    service: CurrentService,
    path: Instance,
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
    retention has dropped what comes next. 410 when that is so at the beginning, and when the stream was dropped and created again
    since.
    """
    name = stream.name
    bounds = await streams.bounds(service.database, name)
    only = set(bounds) if partition is None else set(partition)
    if unknown := only - set(bounds):
        raise invalid_parameter(
            f"Stream {name} has no partition {min(unknown)}", path, f"Its partitions are 0 to {len(bounds) - 1}"
        )
    at = await _places(service, name, _of_stream(stream, last_event_id) if last_event_id else start, bounds)
    at = {place: offset for place, offset in at.items() if place in only}
    _check_places(name, at, bounds)
    return EventStream(service, "stream", _frames(service, stream, at, grows=partition is None))


def _of_stream(record: StreamRecord, last_event_id: str) -> str:
    """The positions of an id. Raises `OffsetGone` for one of a stream that was dropped and created again since."""
    id, at, places = last_event_id.rpartition("@")
    if at and id != str(record.id):
        raise OffsetGone(
            f"stream {record.name} was dropped and created again since event {last_event_id[:100]}",
            hint="Follow the new one from its beginning: from=earliest, without Last-Event-ID.",
        )
    return places


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
        moment = parse_time("the time", start)
    except InvalidInput as error:
        raise _bad_start(error.message) from None
    return await streams.offsets_at(service.database, name, moment)


def _bad_start(what: str) -> ApiError:
    return invalid_parameter(
        f"Invalid from: {what[:150]}",
        detail="Write latest, earliest, a time with its zone such as 2026-01-31T12:00:00Z, or 0:17,1:5",
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
    ids = _Ids(record, at)
    yield live.beginning()
    async with service.part(Broadcaster).following(record, at, grows=grows) as follower:
        while not service.stopping.is_set() and (left := until - time.monotonic()) > 0:
            pieces = await follower.next(min(keep_alive, left))
            if not pieces:
                yield live.KEEP_ALIVE
            for frame in live.packed(frame for piece in pieces for frame in ids.frames(piece)):
                yield frame
            service.metrics.read(record.name, "follow", sum(len(piece.events) for piece in pieces))
    yield live.ending("the server stops" if service.stopping.is_set() else "the connection is as old as it may get")


class _Ids:
    """The stream, and the position of a follower after each event, as the id of that event."""

    def __init__(self, record: StreamRecord, at: dict[int, int]) -> None:
        self._stream = record.id
        self._places = {partition: f"{partition}:{offset}" for partition, offset in sorted(at.items())}

    def frames(self, piece: Piece) -> Iterator[bytes]:
        for offset, event in zip(piece.offsets, piece.events, strict=True):
            self._places[piece.partition] = f"{piece.partition}:{offset + 1}"
            yield live.event(event, id=f"{self._stream}@{','.join(self._places.values())}")
