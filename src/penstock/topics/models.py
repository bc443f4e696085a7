"""Models of topics: plain data, no input or output."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Generic, TypeVar
from uuid import UUID

from pydantic import ConfigDict, Field, computed_field

from penstock.core.records import Seconds, example
from penstock.jobs.records import JobId, Status

T = TypeVar("T")
_AT = "2026-01-11T18:26:26Z"
_MESSAGE = "0190b7a0-0000-7000-8000-000000000001"


@dataclass(frozen=True, slots=True)
class NewMessage(Generic[T]):
    """A message for `Topic.publish_many`.

    Attributes:
        data: Payload.
        id: Identity of the message; a repeated publish of the same id is the same message. None: a new UUIDv7.
        key: Key of the copies; None: that of the declared rule, or none.
        unique: Coalescing key: a subscriber in whose queue a copy with this key waits gets no other copy.
        run_after: Earliest start of the copies: a time, or a timedelta from now by the database's clock.
        expires_at: Time after which a copy that waits, also for a retry, is archived as expired.
    """

    data: T
    id: UUID | str | None = None
    key: str | None = None
    unique: str | None = None
    run_after: datetime | timedelta | None = None
    expires_at: datetime | timedelta | None = None


@dataclass(frozen=True, slots=True)
class ReceiverOutcome:
    """The outcome of a message at one receiver.

    Attributes:
        client_id: Client id of the receiver.
        job: Its copy, or the job with which the copy coalesced.
        status: Status of the copy; a terminal one when the receiver has settled it.
        result: Value that its handler returned, or None.
        errors: One object for each failed attempt.
    """

    client_id: str
    job: JobId
    status: Status
    result: Any
    errors: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Published:
    """The receipt of a publish.

    Attributes:
        id: Identity of the message.
        seq: Sequence number of the message in the topic.
        receivers: Number of subscribers that got it.
        coalesced: Number of subscribers in whose queue a copy with the same unique key was waiting already.
        duplicate: Whether the message had been published before; the call had no effect then.
        outcomes: With `background=False`, one outcome for each receiver; otherwise None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": _MESSAGE, "seq": 42, "receivers": 1, "coalesced": 0, "duplicate": False, "complete": True,
        "outcomes": [{
            "client_id": "browser-17", "job": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "status": "succeeded", "result": None,
            "errors": [],
        }],
    })  # fmt: skip

    id: UUID
    seq: int
    receivers: int
    coalesced: int = 0
    duplicate: bool = False
    outcomes: list[ReceiverOutcome] | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def complete(self) -> bool:
        """Whether all receivers are known to have settled."""
        return self.outcomes is not None and all(outcome.status.finished for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The receipt of a subscribe.

    Attributes:
        client_id: Client id of the subscriber.
        queue: Job type of its copies.
        created: Whether the subscription is new.
        seq: Number of the last message of the topic at that moment; the subscriber gets all later ones.
        replayed: Number of earlier messages that it got.
        expires_at: Time at which the subscription ends unless it is renewed; None: it does not end.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "client_id": "browser-17", "queue": "delays_browser-17", "created": True, "seq": 41, "replayed": 0, "expires_at": _AT,
    })  # fmt: skip

    client_id: str
    queue: str
    created: bool
    seq: int
    replayed: int
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A subscriber as it is stored.

    Attributes:
        client_id: Client id of the subscriber.
        queue: Job type of its copies.
        key: Key of its copies, when the queue of a bridge takes them.
        filter: Fields that a message must have; None: all messages.
        ttl: How long the subscription lasts without a renewal; None: it does not end.
        expires_at: Time at which the subscription ends unless it is renewed; None: it does not end.
        after_seq: Number of the last message before the subscription.
        created_at: Time of the subscribe.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "client_id": "browser-17", "queue": "delays_browser-17", "key": None, "filter": {"dest": "JFK"}, "ttl_s": 30.0,
        "expires_at": _AT, "after_seq": 41, "created_at": _AT,
    })  # fmt: skip

    client_id: str
    queue: str
    key: str | None
    filter: Any
    ttl: Annotated[Seconds | None, Field(alias="ttl_s")]
    expires_at: datetime | None
    after_seq: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Message(Generic[T]):
    """A message of a topic.

    Attributes:
        seq: Number of the message in its topic.
        id: Identity of the message.
        published_at: Time of the publish, by the database's clock.
        data: Payload.
        key: Key of its copies, or None.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example(
        {"seq": 42, "id": _MESSAGE, "published_at": _AT, "data": {"dest": "JFK", "minutes": 12}, "key": "JFK"}
    )

    seq: int
    id: UUID
    published_at: datetime
    data: T
    key: str | None = None


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic. `last_seq` is the number of its last message, `encrypted` whether messages are stored encrypted."""

    __pydantic_config__: ClassVar[ConfigDict] = example(
        {"name": "delays", "catch_up": 0, "last_seq": 41, "subscribers": 3, "created_at": _AT, "encrypted": False}
    )

    name: str
    catch_up: int
    last_seq: int
    subscribers: int
    created_at: datetime
    encrypted: bool = False


@dataclass(frozen=True, slots=True)
class TopicCounts:
    """Counts of a topic.

    Attributes:
        name: Name of the topic.
        catch_up: Number of the last messages that a new subscriber gets.
        last_seq: Number of the last message.
        subscribers: Number of subscribers.
        messages: Number of stored messages.
        bytes: Size of the stored payloads.
        last_published_at: Time of the last publish; None: there was none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "delays", "catch_up": 0, "last_seq": 41, "subscribers": 3, "messages": 41, "bytes": 5120,
        "last_published_at": _AT,
    })  # fmt: skip

    name: str
    catch_up: int
    last_seq: int
    subscribers: int
    messages: int
    bytes: int
    last_published_at: datetime | None
