"""What the records of consumer groups look like: in Python, over HTTP, in its clients and in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PlainSerializer

from penstock.core.encryption import Keyring, opened_reason
from penstock.core.records import example
from penstock.streams.models import EVENT, Event, HeldBack

_AT = "2026-01-11T18:26:26Z"
_GROUP: dict[str, Any] = {
    "group": "billing", "lag": 12,
    "partitions": [{
        "partition": 0, "next": 81, "end": 93, "lag": 12, "owner": "billing-1", "committed_at": _AT, "paused_at": None,
        "pause_reason": None, "quarantined": False, "halt_error": None, "waits_for": [],
        "failing_since": _AT, "failing_offset": 81, "failing_attempt": 7,
        "failing_error": "ConnectError: All connection attempts failed",
    }],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a group in one partition. In JSON the group around it has the name.

    Attributes:
        group: Name of the consumer group.
        partition: Number of the partition.
        next: Offset of the next event to consume.
        end: Offset of the next event to be appended.
        lag: Number of events between them.
        owner: Member that consumes the partition; None: no member does.
        committed_at: Time of the group's last commit.
        paused_at: Time since which the partition is paused; None: it is not paused.
        pause_reason: Reason of the pause.
        quarantined: Whether a failing event paused it.
        halt_error: Error at which a consumer halted before the next event, until that event is done; None: none has halted.
        waits_for: Older partitions that the group has to finish first, since the stream grew; empty: it does not wait.
        failing_since: Time since which a handler fails at an event, until that event is done; None: no handler fails.
        failing_offset: Offset of the first event of the batch at which the handler fails.
        failing_attempt: Attempt that was recorded last; not every attempt is recorded.
        failing_error: Error of that attempt.
    """

    group: Annotated[str, Field(exclude=True)]
    partition: int
    next: Annotated[int, Field(description="What it consumes next.")]
    end: Annotated[int, Field(description="What is appended next.")]
    lag: int
    owner: str | None
    committed_at: datetime | None
    paused_at: datetime | None
    pause_reason: str | None
    quarantined: bool
    halt_error: Annotated[str | None, Field(description="The error at which a consumer halted before the next event.")]
    waits_for: Annotated[list[int], Field(description="Older partitions to be finished first, since the stream grew.")]
    failing_since: Annotated[datetime | None, Field(description="Since when a handler has failed at an event; null: none does.")]
    failing_offset: Annotated[int | None, Field(description="The first event of the batch at which it fails.")]
    failing_attempt: Annotated[int | None, Field(description="The attempt that was noted last; not every one is.")]
    failing_error: Annotated[str | None, Field(description="Its error.")]


@dataclass(frozen=True, slots=True)
class ConsumerGroup:
    """A consumer group, and its lag in all partitions and in each."""

    __pydantic_config__: ClassVar[ConfigDict] = example(_GROUP)

    group: str
    lag: int
    partitions: list[Lag]


@dataclass(frozen=True, slots=True)
class ConsumerGroupMember:
    """A member of a consumer group, and how many partitions it has."""

    id: str
    state: str
    metadata: dict[str, Any]
    joined_at: datetime
    seen_at: datetime
    partitions: int


@dataclass(frozen=True, slots=True)
class ConsumerGroupDetails(ConsumerGroup):
    """A consumer group with its members."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        **_GROUP,
        "members": [
            {"id": "billing-1", "state": "active", "metadata": {}, "joined_at": _AT, "seen_at": _AT, "partitions": 16}
        ],
    })  # fmt: skip

    members: list[ConsumerGroupMember]


def opened_lag(lag: Lag, owner: bytes, keyring: Keyring) -> Lag:
    """A lag whose errors have what their envelopes contain, or the word "encrypted".

    Args:
        lag: As it is stored.
        owner: What the envelopes of the stream are bound to.
        keyring: Keys of the reader.
    """
    if lag.pause_reason is None and lag.halt_error is None and lag.failing_error is None:
        return lag

    def opened(text: str | None) -> str | None:
        return None if text is None else opened_reason(keyring, owner, text)

    return replace(
        lag,
        pause_reason=opened(lag.pause_reason),
        halt_error=opened(lag.halt_error),
        failing_error=opened(lag.failing_error),
    )


def held_back(lags: Iterable[Lag]) -> list[HeldBack]:
    """The paused partitions that hold new partitions back, computed from the lag of groups."""
    found = list(lags)
    waiting: dict[tuple[str, int], list[int]] = {}
    for lag in found:
        for older in lag.waits_for:
            waiting.setdefault((lag.group, older), []).append(lag.partition)
    return [
        HeldBack(lag.group, lag.partition, lag.pause_reason, lag.quarantined, holds)
        for lag in found
        if lag.paused_at is not None and (holds := waiting.get((lag.group, lag.partition)))
    ]


def groups_of(lags: Iterable[Lag]) -> list[ConsumerGroup]:
    """The consumer groups of a stream, by name, from the lag in each partition."""
    groups: dict[str, list[Lag]] = {}
    for lag in lags:
        groups.setdefault(lag.group, []).append(lag)
    return [ConsumerGroup(group, sum(lag.lag for lag in found), found) for group, found in sorted(groups.items())]


def _by_text(partitions: dict[int, int]) -> dict[str, int]:
    return {str(partition): epoch for partition, epoch in sorted(partitions.items())}


@dataclass(frozen=True, slots=True)
class HeldPartitions:
    """What a member has: its partitions with their epochs. `revoked`: those to finish soon; the next read gives them up."""

    __pydantic_config__: ClassVar[ConfigDict] = example({"partitions": {"0": 4, "3": 2}, "revoked": [3]})

    partitions: Annotated[dict[int, int], PlainSerializer(_by_text, return_type=dict[str, int])]
    revoked: list[int]


@dataclass(frozen=True, slots=True)
class MemberBatch:
    """Events of one partition for a member. `epoch`, `revision` and `next_offset` are what a commit gives back."""

    partition: int
    epoch: int
    revision: int
    first_offset: int
    next_offset: int
    events: list[Event[Any]]


@dataclass(frozen=True, slots=True)
class Reading(HeldPartitions):
    """What a member reads: a batch for each partition that has something."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "partitions": {"0": 4, "3": 2}, "revoked": [],
        "batches": [
            {"partition": 3, "epoch": 2, "revision": 0, "first_offset": 17, "next_offset": 18, "events": [EVENT]}
        ],
    })  # fmt: skip

    batches: list[MemberBatch]
