"""Consumer groups: how far they are, moving and pausing them, and members for languages without a driver."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Request, Response

from penstock.errors import InvalidInput
from penstock.event import Bounds, Gone, Lag
from penstock.http import bodies
from penstock.http.api.common import answer, body_of, needs, read, router, service_of
from penstock.http.api.streams import StreamName, find_stream
from penstock.http.auth import Role
from penstock.http.errors import ApiError, bad_json, not_found
from penstock.http.memberships import Batch, Held, Reading, Seat
from penstock.http.stream_models import (
    Batches,
    Changed,
    Commits,
    Committed,
    Failure,
    Group,
    GroupDetails,
    HeldPartitions,
    Join,
    Joined,
    MemberBeat,
    Noted,
    Pause,
    Read,
    Seek,
)
from penstock.job import make_id
from penstock.ownership import balance
from penstock.payload import plain_text, storable
from penstock.postgres import ownership, streams
from penstock.postgres.streams import Commit

api = router("consumer groups")
_SESSION = "0190b7a0-0000-7000-8000-000000000001"
_OF_MEMBER = "/v1/streams/{name:name}/groups/{group:name}/members/{member}"
GroupName = Annotated[str, Path(description="Consumer group.", examples=["billing"], max_length=200)]
MemberId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Member, one for each process or thread.", examples=["billing-1"])
]


@api.get("/v1/streams/{name:name}/groups", response_model=list[Group])
@needs(Role.READ)
async def list_groups(request: Request, name: StreamName) -> Response:
    """The consumer groups of a stream: of each partition how far they are, the lag, and who consumes it."""
    record = await find_stream(request, name)
    groups: dict[str, list[Lag]] = {}
    for lag in await streams.lag(service_of(request).database, record.name, None):
        groups.setdefault(lag.group, []).append(lag)
    return answer([_group(group, lags) for group, lags in sorted(groups.items())])


@api.get("/v1/streams/{name:name}/groups/{group:name}", response_model=GroupDetails)
@needs(Role.READ)
async def get_group(request: Request, name: StreamName, group: GroupName) -> Response:
    """One consumer group, with its members."""
    record = await find_stream(request, name)
    database = service_of(request).database
    lags = await streams.lag(database, record.name, group)
    if not lags:
        raise not_found(request.url.path)
    members = [
        {
            "id": member.id,
            "state": member.state,
            "metadata": member.metadata,
            "joined_at": member.joined_at,
            "seen_at": member.seen_at,
            "partitions": member.slots,
        }
        for member in await ownership.members(database, f"{name}/{group}")
    ]
    return answer(_group(group, lags) | {"members": members})


@api.delete("/v1/streams/{name:name}/groups/{group:name}", status_code=204, response_class=Response)
@needs(Role.ADMIN)
async def drop_group(request: Request, name: StreamName, group: GroupName) -> Response:
    """Forget a group. 409 while it has members."""
    record = await find_stream(request, name)
    await streams.drop_group(service_of(request).database, record.name, group)
    return Response(status_code=204)


@api.post(
    "/v1/streams/{name:name}/groups/{group:name}/seek",
    response_model=Changed,
    openapi_extra=body_of(Seek, {"to": "earliest"}),
)
@needs(Role.ADMIN)
async def seek(request: Request, name: StreamName, group: GroupName) -> Response:
    """Move a group to its stream's beginning or end, to a time, or to offsets. Its members go on from there."""
    record = await find_stream(request, name)
    database = service_of(request).database
    wanted = await read(request, Seek)
    if sum(given is not None for given in (wanted.to, wanted.time, wanted.offsets)) != 1:
        raise InvalidInput("where to is not clear", hint='Give one of to, time and offsets, such as {"to": "earliest"}.')
    if wanted.offsets is not None:
        places = wanted.offsets
    elif wanted.time is not None:
        places = await streams.offsets_at(database, record.name, wanted.time)
    else:
        bounds: dict[int, Bounds] = await streams.bounds(database, record.name)
        places = {at: found.first if wanted.to == "earliest" else found.next for at, found in bounds.items()}
    return answer({"partitions": await streams.seek_group(database, record.name, group, places)})


@api.post(
    "/v1/streams/{name:name}/groups/{group:name}/pause",
    response_model=Changed,
    openapi_extra=body_of(Pause, {"partitions": [3], "because": "a bad event at offset 17"}, required=False),
)
@needs(Role.ADMIN)
async def pause(request: Request, name: StreamName, group: GroupName) -> Response:
    """Give a group no more events of partitions, or of any. Idempotent; answers with how many were not paused."""
    record = await find_stream(request, name)
    wanted = await read(request, Pause)
    because = None if wanted.because is None else wanted.because.replace("\x00", "")
    changed = await streams.pause_partitions(service_of(request).database, record.name, group, wanted.partitions, because)
    return answer({"partitions": changed})


@api.post(
    "/v1/streams/{name:name}/groups/{group:name}/resume",
    response_model=Changed,
    openapi_extra=body_of(Pause, {"partitions": [3]}, required=False),
)
@needs(Role.ADMIN)
async def resume(request: Request, name: StreamName, group: GroupName) -> Response:
    """End a pause or quarantine of partitions, or of all. Answers with how many were paused."""
    record = await find_stream(request, name)
    wanted = await read(request, Pause)
    changed = await streams.resume_partitions(service_of(request).database, record.name, group, wanted.partitions)
    return answer({"partitions": changed})


@api.put(
    _OF_MEMBER, response_model=Joined, openapi_extra=body_of(Join, {"start": "earliest", "dead_after_s": 30}, required=False)
)
@needs(Role.WORK)
async def join(request: Request, name: StreamName, group: GroupName, member: MemberId) -> Response:
    """Join a consumer group, which is made when there is none. 409 when a living member has that id.

    From then on the member reads, or sends heartbeats, at least twice in `dead_after_s`.
    """
    record = await find_stream(request, name)
    database = service_of(request).database
    wanted = await read(request, Join)
    try:
        metadata = orjson.loads(storable(orjson.dumps(wanted.metadata).decode(), "the metadata"))
    except TypeError:
        raise bad_json() from None
    session = wanted.session or make_id()
    group_name = await streams.declare_group(database, record.name, group, wanted.start)
    await balance.join(database, group_name, member, session, timedelta(seconds=wanted.dead_after_s), metadata, None)
    return answer({"member": member, "session": session, "dead_after_s": wanted.dead_after_s})


@api.post(f"{_OF_MEMBER}/heartbeat", response_model=HeldPartitions, openapi_extra=body_of(MemberBeat, {"session": _SESSION}))
@needs(Role.WORK)
async def heartbeat(request: Request, name: StreamName, group: GroupName, member: MemberId) -> Response:
    """Say that a member lives while it works on something long. 404 when it was taken for dead: join again."""
    record = await find_stream(request, name)
    seat = Seat(record, group, member, (await read(request, MemberBeat)).session)
    return answer(_held(await service_of(request).memberships.beat(seat)))


@api.post(
    f"{_OF_MEMBER}/read", response_model=Batches, openapi_extra=body_of(Read, {"session": _SESSION, "limit": 100, "wait": "20s"})
)
@needs(Role.WORK)
async def read_batches(request: Request, name: StreamName, group: GroupName, member: MemberId) -> Response:
    """Read on from where the group is in the member's partitions; with `wait` the answer waits for an event.

    Events that are not committed come again with the next read. A read also is a heartbeat, gives up what is to go to others
    (unless it is named in `busy`), and takes what is meant for the member. 404: taken for dead, join again. 410: what comes next
    is gone.
    """
    service = service_of(request)
    record = await find_stream(request, name)
    wanted = await read(request, Read)
    within = bodies.span(wanted.wait, "wait", service.settings.longest_wait)
    if within > 0:
        service.check_room()
    reading = Reading(wanted.limit, frozenset(wanted.busy), wanted.ahead, Gone(wanted.gone))
    seat = Seat(record, group, member, wanted.session)
    with service.metrics.waiting.track_inprogress():
        held, batches = await service.memberships.read(seat, reading, within, request.is_disconnected)
    service.metrics.read(name, "group", sum(len(batch.events) for batch in batches))
    return answer(_held(held) | {"batches": [_batch(batch) for batch in batches]})


@api.post(
    f"{_OF_MEMBER}/commit",
    response_model=Committed,
    openapi_extra=body_of(Commits, {"commits": [{"partition": 3, "epoch": 2, "revision": 0, "next_offset": 18}]}),
)
@needs(Role.WORK)
async def commit(request: Request, name: StreamName, group: GroupName, member: MemberId) -> Response:
    """Say what is done. `stale`: the partition is no longer the member's, or the group was moved; nothing changed, read again."""
    record = await find_stream(request, name)
    given = {one.partition: one for one in (await read(request, Commits)).commits}
    bounds = await streams.bounds(service_of(request).database, record.name)
    for one in given.values():
        if one.partition not in bounds or one.next_offset > bounds[one.partition].next:
            raise InvalidInput(
                f"partition {one.partition} of stream {name} has no offset {one.next_offset}",
                hint="Give the next_offset of the batch that is done.",
            )
    done = await streams.commit_offsets(
        service_of(request).database,
        record.name,
        group,
        member,
        [Commit(one.partition, one.epoch, one.revision, one.next_offset) for one in given.values()],
    )
    return answer({"outcomes": {str(at): "committed" if done[at].done else "stale" for at in given}})


@api.post(
    f"{_OF_MEMBER}/failures",
    response_model=Noted,
    openapi_extra=body_of(
        Failure, {"partition": 3, "epoch": 2, "revision": 0, "offset": 17, "attempt": 1, "error": "ConnectError: refused"}
    ),
)
@needs(Role.WORK)
async def note_failure(request: Request, name: StreamName, group: GroupName, member: MemberId) -> Response:
    """Say that the member fails at an event and will try again. The group's lag shows it until the event is done.

    Say it at the first failure of an event, and then seldom: after 1, 2, 4, ... 60 seconds.
    """
    record = await find_stream(request, name)
    failure = await read(request, Failure)
    at = Commit(failure.partition, failure.epoch, failure.revision, failure.offset)
    database = service_of(request).database
    return answer(
        {
            "noted": await streams.note_failure(
                database, record.name, group, member, at, failure.attempt, plain_text(failure.error)
            )
        }
    )


@api.delete(_OF_MEMBER, status_code=204, response_class=Response)
@needs(Role.WORK)
async def leave(
    request: Request,
    name: StreamName,
    group: GroupName,
    member: MemberId,
    session: Annotated[str, Query(description="Of the membership.", examples=[_SESSION], max_length=40)],
) -> Response:
    """Leave a group: the member's partitions go to the others at once. 404 when it is no member."""
    record = await find_stream(request, name)
    seat = Seat(record, group, member, bodies.job_id(session))
    if not await balance.leave(service_of(request).database, seat.group_name, member, seat.session, None):
        raise ApiError(
            404, "not_found", f"{member} is no member of consumer group {group}", instance=request.url.path, in_body=True
        )
    return Response(status_code=204)


def _group(group: str, lags: list[Lag]) -> dict[str, Any]:
    partitions = [{field: value for field, value in asdict(lag).items() if field != "group"} for lag in lags]
    return {"group": group, "lag": sum(lag.lag for lag in lags), "partitions": partitions}


def _held(held: Held) -> dict[str, Any]:
    return {"partitions": {str(at): epoch for at, epoch in sorted(held.owned.items())}, "revoked": held.revoked}


def _batch(batch: Batch) -> dict[str, Any]:
    return {
        "partition": batch.partition,
        "epoch": batch.epoch,
        "revision": batch.revision,
        "first_offset": batch.first,
        "next_offset": batch.next,
        "events": [orjson.Fragment(event) for event in batch.events],
    }
