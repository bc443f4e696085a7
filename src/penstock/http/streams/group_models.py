"""The bodies and answers about consumer groups as models: what the OpenAPI document shows, and what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from penstock.core.records import as_json_parts, example
from penstock.http.models import AT, Model
from penstock.http.streams.memberships import EventBatch, Held
from penstock.http.streams.models import EVENT, Event, Offset, Partition
from penstock.streams.models import Lag

_SESSION = "0190b7a0-0000-7000-8000-000000000001"


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

    model_config = example({
        "group": "billing", "lag": 12,
        "partitions": [{
            "partition": 0, "next": 81, "end": 93, "lag": 12, "owner": "billing-1", "committed_at": AT, "paused_at": None,
            "paused_because": None, "quarantined": False, "halted_because": None, "waits_for": [],
            "failing_since": AT, "failing_offset": 81, "failing_attempt": 7,
            "failing_because": "ConnectError: All connection attempts failed",
        }],
    })  # fmt: skip

    group: str
    lag: int
    partitions: list[PartitionLag]

    @classmethod
    def of(cls, group: str, lags: Sequence[Lag]) -> Group:
        """A group from how far it is in each partition."""
        partitions = [PartitionLag.model_validate(lag, from_attributes=True) for lag in lags]
        return Group(group=group, lag=sum(lag.lag for lag in lags), partitions=partitions)


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

    model_config = example({
        **Group.model_config["json_schema_extra"]["example"],  # type: ignore[index,dict-item]
        "members": [
            {"id": "billing-1", "state": "active", "metadata": {}, "joined_at": AT, "seen_at": AT, "partitions": 16}
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

    model_config = example({"member": "billing-1", "session": _SESSION, "dead_after_s": 30.0})

    member: str
    session: UUID
    dead_after_s: float


class MemberBeat(Model):
    """A word from a member."""

    session: UUID


class HeldPartitions(BaseModel):
    """What a member has: its partitions with their epochs. `revoked`: those to finish soon; the next read gives them up."""

    model_config = example({"partitions": {"0": 4, "3": 2}, "revoked": [3]})

    partitions: dict[str, int]
    revoked: list[int]

    @classmethod
    def of(cls, held: Held) -> HeldPartitions:
        """What a member has."""
        return HeldPartitions(partitions={str(at): epoch for at, epoch in sorted(held.owned.items())}, revoked=held.revoked)


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
    auto_offset_reset: Literal["error", "earliest", "latest"] = Field(
        "error", description="When retention dropped what comes next."
    )


class Batch(BaseModel):
    """Events of one partition. `epoch`, `revision` and `next_offset` are what a commit gives back."""

    partition: int
    epoch: int
    revision: int
    first_offset: int
    next_offset: int
    events: list[Event]

    @classmethod
    def of(cls, batch: EventBatch) -> Batch:
        """A batch, whose events are JSON already."""
        return Batch.model_construct(
            partition=batch.partition,
            epoch=batch.epoch,
            revision=batch.revision,
            first_offset=batch.first,
            next_offset=batch.next,
            events=as_json_parts(batch.events),
        )


class Batches(HeldPartitions):
    """What a member reads: a batch for each partition that has something."""

    model_config = example({
        "partitions": {"0": 4, "3": 2}, "revoked": [],
        "batches": [
            {"partition": 3, "epoch": 2, "revision": 0, "first_offset": 17, "next_offset": 18, "events": [EVENT]}
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

    model_config = example({"outcomes": {"3": "committed"}})

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

    model_config = example({"noted": True})

    noted: bool


class Seek(Model):
    """Where a group is to go on: one of the three."""

    to: Literal["earliest", "latest"] | None = None
    time: AwareDatetime | None = Field(None, description="The first events that were appended at that time or later.")
    offsets: dict[Partition, Offset] | None = Field(None, max_length=1_024, description="By partition; others stay.")


class Pause(Model):
    """Partitions to pause or to resume."""

    partitions: list[Partition] | None = Field(None, max_length=1_024, description="none: all.")
    reason: str | None = Field(None, max_length=1_000, description="Shown with the lag.")


class Changed(BaseModel):
    """How many partitions changed."""

    model_config = example({"partitions": 16})

    partitions: int
