"""Streams: list, create, look, change, drop."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Path, Query, Request, Response

from penstock.event import StreamRecord, held_back
from penstock.http.api.common import answer, body_of, needs, principal_of, read, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import ApiError
from penstock.http.stream_models import NewStream, Stream, StreamChange, StreamDetails
from penstock.postgres import streams

api = router("streams")
StreamName = Annotated[str, Path(description="Stream.", examples=["orders"], max_length=200)]
_NEW = {"name": "orders", "partitions": 16, "keep_age_s": 604800}


@api.get("/v1/streams", response_model=list[Stream])
@needs(Role.READ)
async def list_streams(request: Request) -> Response:
    """All streams that the user may see, by name."""
    principal = principal_of(request)
    found = await streams.list_streams(service_of(request).database)
    return answer([shape(record) for record in found if principal.may(record.name)])


@api.post("/v1/streams", status_code=201, response_model=Stream, openapi_extra=body_of(NewStream, _NEW))
@needs(Role.ADMIN)
async def create_stream(request: Request) -> Response:
    """Create a stream. 409 when there is one of that name."""
    new = await read(request, NewStream)
    principal_of(request).require(new.name, request.url.path, "stream")
    created = await streams.create_stream(service_of(request).database, new.name, new.partitions, new.as_options())
    return answer(shape(created), 201)


@api.get("/v1/streams/{name:name}", response_model=StreamDetails)
@needs(Role.READ)
async def get_stream(request: Request, name: StreamName) -> Response:
    """One stream: partitions, what is there of each, retention, size, and which groups a growth waits for in vain."""
    record = await find_stream(request, name)
    database = service_of(request).database
    segments = await streams.segments(database, name)
    details = {
        "ends": [
            {"partition": partition, "first": bounds.first, "next": bounds.next}
            for partition, bounds in sorted((await streams.bounds(database, name)).items())
        ],
        "segments": len(segments),
        "events": sum(segment.events for segment in segments),
        "bytes": sum(segment.bytes for segment in segments),
        "held_back": [asdict(held) for held in held_back(await streams.lag(database, name, None))],
    }
    return answer(shape(record) | details)


@api.patch("/v1/streams/{name:name}", response_model=Stream, openapi_extra=body_of(StreamChange, {"keep_age_s": 86400}))
@needs(Role.ADMIN)
async def change_stream(request: Request, name: StreamName) -> Response:
    """Change options of a stream, or give it more partitions while it is in use; fields left out stay as they are.

    The order of each key is kept: a group begins with the new partitions when it has finished what the old ones hold now.
    All of it is done, or nothing.
    """
    record = await find_stream(request, name)
    wanted = await read(request, StreamChange)
    options = wanted.as_options()
    return answer(shape(await streams.alter_stream(service_of(request).database, record.name, options, wanted.partitions)))


@api.delete("/v1/streams/{name:name}", status_code=204, response_class=Response)
@needs(Role.ADMIN)
async def drop_stream(
    request: Request,
    name: StreamName,
    force: Annotated[bool, Query(description="Also while consumer groups have live members; they end.")] = False,
) -> Response:
    """Drop a stream with its events and consumer groups. 409 while a group has live members."""
    record = await find_stream(request, name)
    await streams.drop_stream(service_of(request).database, record.name, force=force)
    return Response(status_code=204)


async def find_stream(request: Request, name: str) -> StreamRecord:
    """The stream of that name. Raises `ApiError` 403, 404."""
    principal_of(request).require(name, request.url.path, "stream")
    record = await streams.find_stream(service_of(request).database, name)
    if record is None:
        raise ApiError(
            404,
            "not_found",
            f"no such stream: {name}",
            detail="Create it first: POST /v1/streams",
            instance=request.url.path,
            in_body=True,
        )
    return record


def shape(record: StreamRecord) -> dict[str, Any]:
    """A stream as an object."""
    options = record.options
    return {
        "name": record.name,
        "partitions": record.partitions,
        "format": options.format,
        "compression": options.compression,
        "keep_age_s": options.keep_age,
        "keep_bytes": options.keep_bytes,
        "keep_events": options.keep_events,
        "keep_unread": options.keep_unread,
        "compact": options.compact,
        "segment_age_s": options.segment_age,
        "segment_bytes": options.segment_bytes,
        "segment_events": options.segment_events,
        "max_event_bytes": options.max_event_bytes,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
    }
