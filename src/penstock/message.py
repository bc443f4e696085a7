"""The words of topics. Plain data, no input or output."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from penstock.job import Status

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewMessage(Generic[T]):
    """A message for `Topic.publish_many`.

    Attributes:
        data: The payload.
        id: Identity; publishing the same id again is the same message. None: a new UUIDv7.
        unique: A subscriber in whose queue a copy with this key waits gets no other one.
        run_after: No copy is to be started before: a time, or a span from now by the database's clock.
        expires_at: A copy that was not started by then is archived as expired.
    """

    data: T
    id: UUID | str | None = None
    unique: str | None = None
    run_after: datetime | timedelta | None = None
    expires_at: datetime | timedelta | None = None


@dataclass(frozen=True, slots=True)
class ReceiverOutcome:
    """What became of a message at one receiver.

    Attributes:
        client_id: The receiver.
        job: Its copy, or the job with which that coalesced.
        status: Of the copy; a terminal one when the receiver has settled it.
        result: What its handler returned, or None.
        errors: One object for each failed attempt.
    """

    client_id: str
    job: UUID
    status: Status
    result: Any
    errors: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Published:
    """The receipt of a publish.

    Attributes:
        id: Identity of the message.
        seq: Its sequence number in the topic.
        receivers: How many subscribers got it.
        coalesced: How many of them had a copy with the same unique key waiting already.
        duplicate: Whether the message had been published before; nothing was done then.
        outcomes: With `background=False`, one for each receiver; else None.
    """

    id: UUID
    seq: int
    receivers: int
    coalesced: int = 0
    duplicate: bool = False
    outcomes: list[ReceiverOutcome] | None = None

    @property
    def complete(self) -> bool:
        """Whether all receivers are known to have settled."""
        return self.outcomes is not None and all(outcome.status.finished for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The receipt of a subscribe.

    Attributes:
        client_id: The subscriber.
        queue: The job type of its copies.
        created: Whether the subscription is new.
        seq: The last message of the topic at that moment; it gets all later ones.
        replayed: How many earlier messages it got.
        expires_at: When the subscription ends unless it is renewed; None: it stays.
    """

    client_id: str
    queue: str
    created: bool
    seq: int
    replayed: int
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A subscriber as the database has it; `key` is set when a bridge's queue takes its copies."""

    client_id: str
    queue: str
    key: str | None
    filter: Any
    ttl: timedelta | None
    expires_at: datetime | None
    after_seq: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Message(Generic[T]):
    """A message of a topic."""

    seq: int
    id: UUID
    published_at: datetime
    data: T


@dataclass(frozen=True, slots=True)
class TopicCounts:
    """How a topic is doing; `bytes` is the size of the payloads stored."""

    name: str
    keep: int
    last_seq: int
    subscribers: int
    messages: int
    bytes: int
    last_published_at: datetime | None
