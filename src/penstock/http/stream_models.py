"""The bodies and answers about streams and consumer groups as models: what the OpenAPI document shows, and what is checked."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from penstock.http.models import _AT, Model, _example

Partition = Annotated[int, Field(ge=0, le=1_023)]
Offset = Annotated[int, Field(ge=0, le=9_000_000_000_000_000_000)]
StreamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
Positive = Annotated[int, Field(ge=1, le=9_000_000_000_000_000_000)]
Age = Annotated[float, Field(gt=0, le=3_153_600_000)]
_SESSION = "0190b7a0-0000-7000-8000-000000000001"
_EVENT = {
    "partition": 3, "offset": 17, "key": "acme", "data": {"total": 3}, "headers": {}, "time": None, "appended_at": _AT,
}  # fmt: skip


class StreamSettings(Model):
    """What can be changed of a stream. Whole segments are dropped, oldest first, when `keep_...` says so; null: no limit."""

    keep_age_s: Age | None = None
    keep_bytes: Positive | None = None
    keep_events: Positive | None = None
    keep_unread: bool = Field(False, description="Keep nevertheless what some group has not read.")
    compact: bool = Field(False, description="Keep the last event of each key.")
    segment_age_s: Age | None = None
    segment_bytes: Positive = 64 * 1024 * 1024
    segment_events: Positive | None = None
    max_event_bytes: Annotated[int, Field(ge=1, le=268_435_456)] = 1024 * 1024

    def as_options(self) -> dict[str, Any]:
        """Those that were given, as the SQL functions take them."""
        given = self.model_dump(exclude={"name", "partitions"}, exclude_unset=True)
        return {
            name.removesuffix("_s"): f"{value:.6f} seconds" if name.endswith("_s") and value is not None else value
            for name, value in given.items()
        }


class NewStream(StreamSettings):
    """A stream to be created."""

    name: StreamName
    partitions: int = Field(16, ge=1, le=1_024)
    format: Literal["json", "bytes"] = "json"
    compression: Literal["zstd"] | None = Field(None, description="Of a stream of bytes.")


class StreamChange(StreamSettings):
    """What is to be changed of a stream. Fields left out stay as they are."""

    partitions: int | None = Field(None, ge=1, le=1_024, description="At least as many as it has.")


class Stream(BaseModel):
    """A stream."""

    model_config = _example({
        "name": "orders", "partitions": 16, "format": "json", "compression": None, "keep_age_s": 604800.0, "keep_bytes": None,
        "keep_events": None, "keep_unread": False, "compact": False, "segment_age_s": None, "segment_bytes": 67108864,
        "segment_events": None, "max_event_bytes": 1048576, "created_at": _AT, "updated_at": _AT,
    })  # fmt: skip

    name: str
    partitions: int
    format: str
    compression: str | None
    keep_age_s: float | None
    keep_bytes: int | None
    keep_events: int | None
    keep_unread: bool
    compact: bool
    segment_age_s: float | None
    segment_bytes: int
    segment_events: int | None
    max_event_bytes: int
    created_at: datetime
    updated_at: datetime


class Ends(BaseModel):
    """What is there of a partition: from `first` to before `next`."""

    partition: int
    first: int
    next: int


class HeldBack(BaseModel):
    """A paused partition for which new ones (`holds`) wait since the stream grew: resume it, or move the group past it."""

    group: str
    partition: int
    paused_because: str | None
    quarantined: bool
    holds: list[int]


class StreamDetails(Stream):
    """A stream with what is in it."""

    model_config = _example({
        **Stream.model_config["json_schema_extra"]["example"],  # type: ignore[index,dict-item]
        "ends": [{"partition": 0, "first": 40, "next": 93}], "segments": 1, "events": 53, "bytes": 9120, "held_back": [],
    })  # fmt: skip

    ends: list[Ends]
    segments: int
    events: int
    bytes: int
    held_back: list[HeldBack]


class NewEvent(Model):
    """An event to be appended: `data`, or `bytes` for a stream of bytes."""

    data: Any = Field(None, description="Any JSON, for a stream of JSON. null in a compacted stream: the key is gone.")
    bytes: str | None = Field(None, description="Base64, for a stream of bytes.")
    key: str | None = Field(None, description="Events of one key keep their order; none: any partition.")
    headers: dict[str, Any] | None = Field(None, description="Anything beside the payload.")
    time: AwareDatetime | None = Field(None, description="When it happened.")


class Appended(BaseModel):
    """What was appended. `partition` and `offset` say where a single event is.

    A producer's last batch, repeated, gets the answer of the first time. `duplicate`: it was an older one, and nothing was done.
    """

    model_config = _example({"appended": 1, "partition": 3, "offset": 17, "sequence": None, "duplicate": False})

    appended: int
    partition: int | None = None
    offset: int | None = None
    sequence: int | None = Field(None, description="Number of the producer's last batch; continue with the next.")
    duplicate: bool = False


class Event(BaseModel):
    """An event: `data`, or in a stream of bytes `bytes` as base64."""

    model_config = _example(_EVENT)

    partition: int
    offset: int
    key: str | None
    data: Any = None
    bytes: str | None = None
    headers: dict[str, Any]
    time: datetime | None
    appended_at: datetime


class Events(BaseModel):
    """Events of one partition. `next_offset` is what to ask for next."""

    model_config = _example({"partition": 3, "next_offset": 18, "events": [_EVENT]})

    partition: int
    next_offset: int
    events: list[Event]


class PartitionLag(BaseModel):
    """How far a group is in one partition."""

    partition: int
    next: int = Field(description="What it consumes next.")
    end: int = Field(description="What is appended next.")
    lag: int
    owner: str | None
    committed_at: datetime | None
    paused_at: datetime | None
    paused_because: str | None
    quarantined: bool
    halted_because: str | None = Field(description="The error at which a consumer halted before the next event.")
    waits_for: list[int] = Field(description="Older partitions to be finished first, since the stream grew.")
    failing_since: datetime | None = Field(description="Since when a handler has failed at an event; null: none does.")
    failing_offset: int | None = Field(description="The first event of the batch at which it fails.")
    failing_attempt: int | None = Field(description="The attempt that was noted last; not every one is.")
    failing_because: str | None = Field(description="Its error.")


class Group(BaseModel):
    """A consumer group."""

    model_config = _example({
        "group": "billing", "lag": 12,
        "partitions": [{
            "partition": 0, "next": 81, "end": 93, "lag": 12, "owner": "billing-1", "committed_at": _AT, "paused_at": None,
            "paused_because": None, "quarantined": False, "halted_because": None, "waits_for": [],
            "failing_since": _AT, "failing_offset": 81, "failing_attempt": 7,
            "failing_because": "ConnectError: All connection attempts failed",
        }],
    })  # fmt: skip

    group: str
    lag: int
    partitions: list[PartitionLag]


class Member(BaseModel):
    """A member of a group."""

    id: str
    state: str
    metadata: dict[str, Any]
    joined_at: datetime
    seen_at: datetime
    partitions: int


class GroupDetails(Group):
    """A consumer group with its members."""

    model_config = _example({
        **Group.model_config["json_schema_extra"]["example"],  # type: ignore[index,dict-item]
        "members": [
            {"id": "billing-1", "state": "active", "metadata": {}, "joined_at": _AT, "seen_at": _AT, "partitions": 16}
        ],
    })  # fmt: skip

    members: list[Member]


class Join(Model):
    """A membership to begin. A call that is repeated with the same session is the same membership."""

    session: UUID | None = Field(None, description="Of this membership; none: one is made.")
    start: Literal["earliest", "latest"] = Field("earliest", description="Where a new group starts.")
    dead_after_s: float = Field(30, ge=1, le=86_400, description="Silent for longer, its partitions are given to others.")
    metadata: dict[str, Any] = Field(default={}, description="Anything that the member says of itself.")


class Joined(BaseModel):
    """A membership. `session` comes with each of its calls."""

    model_config = _example({"member": "billing-1", "session": _SESSION, "dead_after_s": 30.0})

    member: str
    session: UUID
    dead_after_s: float


class MemberBeat(Model):
    """A word from a member."""

    session: UUID


class HeldPartitions(BaseModel):
    """What a member has: its partitions with their epochs. `revoked`: those to finish soon; the next read gives them up."""

    model_config = _example({"partitions": {"0": 4, "3": 2}, "revoked": [3]})

    partitions: dict[str, int]
    revoked: list[int]


class Read(MemberBeat):
    """What a member wants to read."""

    limit: int = Field(100, ge=1, le=10_000, description="Most events.")
    wait: str | None = Field(None, description="How long to wait for an event, such as 20s.", max_length=20)
    busy: list[Partition] = Field(
        default=[], max_length=1_024,
        description="Partitions that are still being worked on: none of their events, and they are not given up yet.",
    )  # fmt: skip
    ahead: dict[Partition, Offset] = Field(
        default={}, max_length=1_024, description="Read on from here, by partition, before what came earlier is committed."
    )
    gone: Literal["error", "earliest", "latest"] = Field("error", description="When retention dropped what comes next.")


class Batch(BaseModel):
    """Events of one partition. `epoch`, `revision` and `next_offset` are what a commit gives back."""

    partition: int
    epoch: int
    revision: int
    first_offset: int
    next_offset: int
    events: list[Event]


class Batches(HeldPartitions):
    """What a member reads: a batch for each partition that has something."""

    model_config = _example({
        "partitions": {"0": 4, "3": 2}, "revoked": [],
        "batches": [
            {"partition": 3, "epoch": 2, "revision": 0, "first_offset": 17, "next_offset": 18, "events": [_EVENT]}
        ],
    })  # fmt: skip

    batches: list[Batch]


class Commit(Model):
    """All events of a partition before `next_offset` are done."""

    partition: Partition
    epoch: Offset
    revision: Annotated[int, Field(ge=0, le=2_147_483_647)]
    next_offset: Offset


class Commits(Model):
    """What a member has done."""

    commits: list[Commit] = Field(min_length=1, max_length=1_024)


class Committed(BaseModel):
    """What became of each commit: committed, or stale when the partition is another's, or the group was moved."""

    model_config = _example({"outcomes": {"3": "committed"}})

    outcomes: dict[str, Literal["committed", "stale"]]


class Failure(Model):
    """A member cannot handle the event at `offset`, the first of its batch. The group's lag shows it until that event is done."""

    partition: Partition
    epoch: Offset
    revision: Annotated[int, Field(ge=0, le=2_147_483_647)]
    offset: Offset
    attempt: Annotated[int, Field(ge=1, le=2_147_483_647)] = Field(1, description="Which attempt failed; 1 is the first.")
    error: str = Field(min_length=1, max_length=10_000, description="What is shown; its first 1,000 characters are kept.")


class Noted(BaseModel):
    """Whether the failure is shown: not when the partition is another member's, the group was moved, or the event is done."""

    model_config = _example({"noted": True})

    noted: bool


class Seek(Model):
    """Where a group is to go on: one of the three."""

    to: Literal["earliest", "latest"] | None = None
    time: AwareDatetime | None = Field(None, description="The first events that were appended at that time or later.")
    offsets: dict[Partition, Offset] | None = Field(None, max_length=1_024, description="By partition; others stay.")


class Pause(Model):
    """Partitions to pause or to resume."""

    partitions: list[Partition] | None = Field(None, max_length=1_024, description="none: all.")
    because: str | None = Field(None, max_length=1_000, description="Shown with the lag.")


class Changed(BaseModel):
    """How many partitions changed."""

    model_config = _example({"partitions": 16})

    partitions: int
