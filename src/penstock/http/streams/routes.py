"""Streams: list, create, look, change, drop."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

from fastapi import Depends, Path, Query, Response

from penstock.http.errors import ApiError
from penstock.http.routing import ADMIN, READ, Instance, OpenDatabase, User, body, router
from penstock.http.streams.models import NewStream, StreamChange
from penstock.streams import group_queries
from penstock.streams import queries as streams
from penstock.streams.group_models import held_back
from penstock.streams.models import Ends, StreamDetails, StreamRecord

api = router("streams")
StreamName = Annotated[str, Path(description="Stream.", examples=["orders"], max_length=200)]
_NEW = {"name": "orders", "partitions": 16, "keep_age_s": 604800}


async def _open(name: StreamName, user: User, database: OpenDatabase, path: Instance) -> StreamRecord:
    """The stream of a path. Raises `ApiError` 403, 404."""
    user.require(name, path, "stream")
    record = await streams.find_stream(database, name)
    if record is None:
        raise ApiError(
            404, "not_found", f"no such stream: {name}", detail="Create it first: POST /v1/streams", instance=path, in_body=True
        )
    return record


# The stream of the path, which is there and open to the user.
OpenStream = Annotated[StreamRecord, Depends(_open)]


@api.get("/v1/streams", dependencies=[READ])
async def list_streams(user: User, database: OpenDatabase) -> list[StreamRecord]:
    """All streams that the user may see, by name."""
    return [record for record in await streams.list_streams(database) if user.may(record.name)]


@api.post("/v1/streams", dependencies=[ADMIN], status_code=201)
async def create_stream(
    user: User, database: OpenDatabase, path: Instance, new: Annotated[NewStream, body(NewStream, _NEW)]
) -> StreamRecord:
    """Create a stream. 409 when there is one of that name."""
    user.require(new.name, path, "stream")
    return await streams.create_stream(database, new.name, new.partitions, new.as_options())


@api.get("/v1/streams/{name:name}", dependencies=[READ])
async def get_stream(stream: OpenStream, database: OpenDatabase) -> StreamDetails:
    """One stream: partitions with their bounds, retention, size, and the groups that hold a growth back."""
    segments = await streams.segments(database, stream.name)
    bounds = sorted((await streams.bounds(database, stream.name)).items())
    held = held_back(await group_queries.lag(database, stream.name, None))
    return StreamDetails(
        **{field.name: getattr(stream, field.name) for field in fields(stream)},
        ends=[Ends(partition, found.first, found.next) for partition, found in bounds],
        segments=len(segments),
        events=sum(segment.events for segment in segments),
        bytes=sum(segment.bytes for segment in segments),
        held_back=held,
    )


@api.patch("/v1/streams/{name:name}", dependencies=[ADMIN])
async def change_stream(
    stream: OpenStream, database: OpenDatabase, wanted: Annotated[StreamChange, body(StreamChange, {"keep_age_s": 86400})]
) -> StreamRecord:
    """Change options of a stream, or give it more partitions while it is in use; fields left out stay as they are.

    The order of each key is kept: a group begins with the new partitions when it has finished what the old ones hold now.
    All of it is done, or nothing.
    """
    return await streams.alter_stream(database, stream.name, wanted.as_options(), wanted.partitions)


@api.delete("/v1/streams/{name:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_stream(
    stream: OpenStream,
    database: OpenDatabase,
    force: Annotated[bool, Query(description="Also while consumer groups have live members; they end.")] = False,
) -> None:
    """Drop a stream with its events and consumer groups. 409 while a group has live members."""
    await streams.drop_stream(database, stream.name, force=force)
