"""The bodies of the routes about consumer groups as models, and the answers that are no records."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from penstock.core.records import example
from penstock.http.models import Model
from penstock.http.streams.models import Offset, Partition

_SESSION = "0190b7a0-0000-7000-8000-000000000001"


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
    """A heartbeat of a member."""

    session: UUID


class Read(MemberBeat):
    """What a member wants to read."""

    limit: int = Field(100, ge=1, le=10_000, description="Most events.")
    wait: str | None = Field(None, description="How long to wait for an event, such as 20s.", max_length=20)
    busy: list[Partition] = Field(
        default=[], max_length=1_024,
        description="Partitions on which the member still works: it gets none of their events, and they are not released.",
    )  # fmt: skip
    ahead: dict[Partition, Offset] = Field(
        default={}, max_length=1_024, description="Read on from here, by partition, before what came earlier is committed."
    )
    auto_offset_reset: Literal["error", "earliest", "latest"] = Field(
        "error", description="When retention dropped what comes next."
    )


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


class ReplayDead(Model):
    """Which dead letters to replay."""

    offsets: dict[Partition, Offset] | None = Field(
        None, max_length=1_024, description="From there on, by partition of the dead letters; none: those that were not replayed."
    )
    limit: int = Field(1_000, ge=1, le=100_000, description="Most letters.")


class Replayed(BaseModel):
    """How many letters were replayed; 0: none are left."""

    model_config = example({"replayed": 3})

    replayed: int


class Changed(BaseModel):
    """How many partitions changed."""

    model_config = example({"partitions": 16})

    partitions: int
