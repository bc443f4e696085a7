"""The bodies and answers about topics as models: what the OpenAPI document shows, and what is checked."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from penstock.http.models import _AT, _ID, Model, Seconds, _example

_MESSAGE = "0190b7a0-0000-7000-8000-000000000001"
ClientId = Annotated[str, Field(min_length=1, max_length=200)]


class NewTopic(Model):
    """A topic to be made, or changed when it exists."""

    name: Annotated[str, Field(min_length=1, max_length=150)]
    keep: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None, description="How many of the last messages a new subscriber gets."
    )


class Topic(BaseModel):
    """A topic. `last_seq` is the number of its last message."""

    model_config = _example({"name": "delays", "keep": 0, "last_seq": 41, "subscribers": 3, "created_at": _AT})

    name: str
    keep: int
    last_seq: int
    subscribers: int
    created_at: datetime


class TopicCounts(BaseModel):
    """How a topic is doing; `bytes` is the size of the payloads stored."""

    model_config = _example({
        "name": "delays", "keep": 0, "last_seq": 41, "subscribers": 3, "messages": 41, "bytes": 5120, "last_published_at": _AT,
    })  # fmt: skip

    name: str
    keep: int
    last_seq: int
    subscribers: int
    messages: int
    bytes: int
    last_published_at: datetime | None


class Subscribe(Model):
    """How to subscribe."""

    ttl_s: Annotated[float, Field(ge=1, le=2_592_000)] | None = Field(
        None, description="The subscription ends, with its queue, unless it is renewed in that time; none: it stays."
    )
    filter: Any = Field(None, description="Only messages that contain this JSON; none: all.")
    since: Annotated[int, Field(ge=0, le=9_000_000_000_000_000_000)] | None = Field(
        None, description="A new subscription begins with the messages after this number; none: with the last ones kept."
    )


class Subscribed(BaseModel):
    """A subscription. Each message after `seq` is a job in the queue."""

    model_config = _example({
        "client_id": "browser-17", "queue": "delays_browser-17", "created": True, "seq": 41, "replayed": 0, "expires_at": _AT,
    })  # fmt: skip

    client_id: str
    queue: str
    created: bool
    seq: int
    replayed: int
    expires_at: datetime | None


class Renewed(BaseModel):
    """Whether the subscription was renewed. false: it has ended, and messages may have been missed."""

    model_config = _example({"renewed": True})

    renewed: bool


class Subscriber(BaseModel):
    """A subscriber."""

    model_config = _example({
        "client_id": "browser-17", "queue": "delays_browser-17", "key": None, "filter": {"dest": "JFK"}, "ttl_s": 30.0,
        "expires_at": _AT, "after_seq": 41, "created_at": _AT,
    })  # fmt: skip

    client_id: str
    queue: str
    key: str | None
    filter: Any
    ttl_s: float | None
    expires_at: datetime | None
    after_seq: int
    created_at: datetime


class NewMessage(Model):
    """A message to be published. Times are text, or numbers of seconds from now."""

    data: Any = Field(default={}, description="Any JSON, up to 1 MiB.")
    id: UUID | None = Field(None, description="Publishing the same id again is the same message.")
    unique: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None, description="A subscriber in whose queue a copy with this key waits gets no other."
    )
    run_after: Seconds | AwareDatetime | None = Field(None, description="No copy is started before.")
    expires_at: Seconds | AwareDatetime | None = Field(None, description="A copy that was not started by then is archived.")
    background: bool = Field(True, description="false: wait until every receiver has settled, and answer with the outcomes.")
    timeout: str = Field("30s", max_length=20, description="How long to wait, such as 30s.")


class Outcome(BaseModel):
    """What became of a message at one receiver."""

    client_id: str
    job: str
    status: Literal["queued", "in-progress", "succeeded", "failed", "expired", "cancelled"]
    result: Any
    errors: list[Any]


class Published(BaseModel):
    """The receipt of a publish. `complete`: all receivers are known to have settled."""

    model_config = _example({
        "id": _MESSAGE, "seq": 42, "receivers": 1, "coalesced": 0, "duplicate": False, "complete": True,
        "outcomes": [{"client_id": "browser-17", "job": _ID, "status": "succeeded", "result": None, "errors": []}],
    })  # fmt: skip

    id: UUID
    seq: int
    receivers: int
    coalesced: int
    duplicate: bool
    complete: bool
    outcomes: list[Outcome] | None


class PublishedMany(BaseModel):
    """What became of the lines of a body. `duplicates` had been published before; `last_seq`: the number of the last message."""

    model_config = _example({"published": 2, "duplicates": 0, "last_seq": 43})

    published: int
    duplicates: int
    last_seq: int | None


class TopicMessage(BaseModel):
    """A message."""

    model_config = _example({"seq": 42, "id": _MESSAGE, "published_at": _AT, "data": {"dest": "JFK", "minutes": 12}})

    seq: int
    id: UUID
    published_at: datetime
    data: Any
