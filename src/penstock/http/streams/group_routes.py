"""Consumer groups: how far they are, moving and pausing them, and members for languages without a driver."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import orjson
from fastapi import Depends, Path, Query, Request, Response

from penstock.core.serialization import plain_text, storable
from penstock.errors import Conflict, InvalidInput
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.http import bodies
from penstock.http.call import Call
from penstock.http.errors import ApiError, bad_json, not_found
from penstock.http.routing import ADMIN, READ, WORK, CurrentService, Instance, OpenDatabase, body, part, router
from penstock.http.streams.group_models import (
    Changed,
    Commits,
    Committed,
    Failure,
    Join,
    Joined,
    MemberBeat,
    Noted,
    Pause,
    Read,
    ReplayDead,
    Replayed,
    Seek,
)
from penstock.http.streams.memberships import GroupMember, Memberships, ReadRequest
from penstock.http.streams.routes import OpenStream
from penstock.jobs.models import make_id
from penstock.streams import group_queries
from penstock.streams import queries as streams
from penstock.streams.group_models import (
    ConsumerGroup,
    ConsumerGroupDetails,
    ConsumerGroupMember,
    HeldPartitions,
    Reading,
    groups_of,
)
from penstock.streams.group_queries import Commit
from penstock.streams.models import Bounds, OffsetReset

api = router("consumer groups")
_SESSION = "0190b7a0-0000-7000-8000-000000000001"
_OF_MEMBER = "/v1/streams/{name:name}/groups/{group:name}/members/{member}"
_COMMITS = {"commits": [{"partition": 3, "epoch": 2, "revision": 0, "next_offset": 18}]}
_FAILURE = {"partition": 3, "epoch": 2, "revision": 0, "offset": 17, "attempt": 1, "error": "ConnectError: refused"}
GroupName = Annotated[str, Path(description="Consumer group.", examples=["billing"], max_length=200)]
MemberId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Member, one for each process or thread.", examples=["billing-1"])
]


async def _member(stream: OpenStream, group: GroupName, member: MemberId) -> GroupMember:
    if stream.encrypted:
        raise Conflict(
            f"stream {stream.name} is encrypted, and members over HTTP have no keys",
            hint="Consume it with the Python package, and its keys: Penstock(keys=[...]).",
        )
    return GroupMember(stream, group, member)


# Which member of which group the path names.
OpenMember = Annotated[GroupMember, Depends(_member)]


@api.get("/v1/streams/{name:name}/groups", dependencies=[READ])
async def list_groups(stream: OpenStream, database: OpenDatabase) -> list[ConsumerGroup]:
    """The consumer groups of a stream: of each partition how far they are, the lag, and who consumes it."""
    return groups_of(await group_queries.lag(database, stream.name, None))


@api.get("/v1/streams/{name:name}/groups/{group:name}", dependencies=[READ])
async def get_group(stream: OpenStream, group: GroupName, database: OpenDatabase, path: Instance) -> ConsumerGroupDetails:
    """One consumer group, with its members."""
    found = groups_of(await group_queries.lag(database, stream.name, group))
    if not found:
        raise not_found(path)
    members = [
        ConsumerGroupMember(
            id=member.id,
            state=member.state,
            metadata=member.metadata,
            joined_at=member.joined_at,
            seen_at=member.seen_at,
            partitions=member.slots,
        )
        for member in await ownership.members(database, f"{stream.name}/{group}")
    ]
    return ConsumerGroupDetails(group, found[0].lag, found[0].partitions, members)


@api.delete("/v1/streams/{name:name}/groups/{group:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_group(stream: OpenStream, group: GroupName, database: OpenDatabase) -> None:
    """Forget a group. 409 while it has members."""
    await group_queries.drop_group(database, stream.name, group)


@api.post("/v1/streams/{name:name}/groups/{group:name}/seek", dependencies=[ADMIN])
async def seek(
    stream: OpenStream, group: GroupName, database: OpenDatabase, wanted: Annotated[Seek, body(Seek, {"to": "earliest"})]
) -> Changed:
    """Move a group to its stream's beginning or end, to a time, or to offsets. Its members go on from there."""
    if sum(given is not None for given in (wanted.to, wanted.time, wanted.offsets)) != 1:
        raise InvalidInput("where to is not clear", hint='Give one of to, time and offsets, such as {"to": "earliest"}.')
    if wanted.offsets is not None:
        offsets = wanted.offsets
    elif wanted.time is not None:
        offsets = await streams.offsets_at(database, stream.name, wanted.time)
    else:
        bounds: dict[int, Bounds] = await streams.bounds(database, stream.name)
        offsets = {at: found.first if wanted.to == "earliest" else found.next for at, found in bounds.items()}
    return Changed(partitions=await group_queries.seek_group(database, stream.name, group, offsets))


@api.post("/v1/streams/{name:name}/replay-dead", dependencies=[ADMIN])
async def replay_dead(
    stream: OpenStream, database: OpenDatabase, wanted: Annotated[ReplayDead, body(ReplayDead, {"limit": 100}, required=False)]
) -> Replayed:
    """Append dead letters to the stream again, for the group in which they failed; other groups skip them."""
    return Replayed(replayed=await group_queries.replay_dead(database, stream.name, wanted.limit, wanted.offsets))


@api.post("/v1/streams/{name:name}/groups/{group:name}/pause", dependencies=[ADMIN])
async def pause(
    stream: OpenStream,
    group: GroupName,
    database: OpenDatabase,
    wanted: Annotated[Pause, body(Pause, {"partitions": [3], "reason": "a bad event at offset 17"}, required=False)],
) -> Changed:
    """Give a group no more events of partitions, or of any. Idempotent; answers with how many were not paused."""
    reason = None if wanted.reason is None else wanted.reason.replace("\x00", "")
    changed = await group_queries.pause_partitions(database, stream.name, group, wanted.partitions, reason)
    return Changed(partitions=changed)


@api.post("/v1/streams/{name:name}/groups/{group:name}/resume", dependencies=[ADMIN])
async def resume(
    stream: OpenStream,
    group: GroupName,
    database: OpenDatabase,
    wanted: Annotated[Pause, body(Pause, {"partitions": [3]}, required=False)],
) -> Changed:
    """End a pause or quarantine of partitions, or of all. Answers with how many were paused."""
    return Changed(partitions=await group_queries.resume_partitions(database, stream.name, group, wanted.partitions))


@api.put(_OF_MEMBER, dependencies=[WORK])
async def join(
    member: OpenMember,
    database: OpenDatabase,
    wanted: Annotated[Join, body(Join, {"start": "earliest", "dead_after_s": 30}, required=False)],
) -> Joined:
    """Join a consumer group, which is made when there is none. 409 when a living member has that id.

    From then on the member reads, or sends heartbeats, at least twice in `dead_after_s`.
    """
    try:
        metadata = orjson.loads(storable(orjson.dumps(wanted.metadata).decode(), "the metadata"))
    except TypeError:
        raise bad_json() from None
    session = wanted.session or make_id()
    group_name = await group_queries.declare_group(database, member.stream.name, member.group, wanted.start)
    span = timedelta(seconds=wanted.dead_after_s)
    await balance.join(database, group_name, member.id, session, span, metadata, None)
    return Joined(member=member.id, session=session, dead_after_s=wanted.dead_after_s)


@api.post(f"{_OF_MEMBER}/heartbeat", dependencies=[WORK])
async def heartbeat(
    member: OpenMember,
    memberships: Annotated[Memberships, part(Memberships)],
    beat: Annotated[MemberBeat, body(MemberBeat, {"session": _SESSION})],
) -> HeldPartitions:
    """Keep a member alive while it handles a long batch. 404 when it was evicted: join again."""
    return await memberships.beat(member, beat.session)


@api.post(f"{_OF_MEMBER}/read", dependencies=[WORK])
async def read_batches(
    request: Request,
    member: OpenMember,
    service: CurrentService,
    wanted: Annotated[Read, body(Read, {"session": _SESSION, "limit": 100, "wait": "20s"})],
) -> Reading:
    """Read the events behind the group's offsets in the member's partitions; with `wait` the answer waits for an event.

    Events that are not committed come again with the next read. A read also is a heartbeat: it releases revoked partitions,
    except those in `busy`, and takes those that are free for the member. 404: the member was evicted, join again. 410: retention
    has dropped the next events.
    """
    within = bodies.span(wanted.wait, "wait", service.settings.longest_wait)
    if within > 0:
        service.check_room()
    asked = ReadRequest(wanted.limit, frozenset(wanted.busy), wanted.ahead, OffsetReset(wanted.auto_offset_reset))
    call: Call = request.scope["call"]
    with call.watching() as watch, service.metrics.waiting.track_inprogress():

        async def gone() -> bool:
            return watch.ended.is_set() or await request.is_disconnected()

        reading, events = await service.part(Memberships).read(member, wanted.session, asked, within, gone)
        watch.check()
    service.metrics.read(member.stream.name, "group", events)
    return reading


@api.post(f"{_OF_MEMBER}/commit", dependencies=[WORK])
async def commit(
    member: OpenMember, database: OpenDatabase, service: CurrentService, wanted: Annotated[Commits, body(Commits, _COMMITS)]
) -> Committed:
    """Say what is done. `stale`: the partition is no longer the member's, or the group was moved; nothing changed, read again."""
    name = member.stream.name
    given = {one.partition: one for one in wanted.commits}
    bounds = await streams.bounds(database, name)
    for one in given.values():
        if one.partition not in bounds or one.next_offset > bounds[one.partition].next:
            raise InvalidInput(
                f"partition {one.partition} of stream {name} has no offset {one.next_offset}",
                hint="Give the next_offset of the batch that is done.",
            )
    commits = [Commit(one.partition, one.epoch, one.revision, one.next_offset) for one in given.values()]
    done = await service.part(Memberships).commit(member, commits)
    return Committed(outcomes={str(at): "committed" if done[at].done else "stale" for at in given})


@api.post(f"{_OF_MEMBER}/failures", dependencies=[WORK])
async def note_failure(member: OpenMember, database: OpenDatabase, failure: Annotated[Failure, body(Failure, _FAILURE)]) -> Noted:
    """Say that the member fails at an event and will try again. The group's lag shows it until the event is done.

    Say it at the first failure of an event, and then seldom: after 1, 2, 4, ... 60 seconds.
    """
    at = Commit(failure.partition, failure.epoch, failure.revision, failure.offset)
    error = plain_text(failure.error)
    return Noted(
        noted=await group_queries.note_failure(database, member.stream.name, member.group, member.id, at, failure.attempt, error)
    )


@api.delete(_OF_MEMBER, dependencies=[WORK], status_code=204, response_class=Response)
async def leave(
    member: OpenMember,
    database: OpenDatabase,
    path: Instance,
    session: Annotated[str, Query(description="Of the membership.", examples=[_SESSION], max_length=40)],
) -> None:
    """Leave a group: the member's partitions go to the others at once. 404 when it is no member."""
    if not await balance.leave(database, member.group_name, member.id, bodies.job_id(session), None):
        raise ApiError(
            404, "not_found", f"{member.id} is no member of consumer group {member.group}", instance=path, in_body=True
        )
