"""The bodies and answers about topics as models: what the OpenAPI document shows, and what is checked."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, Field

from penstock.core.records import example
from penstock.http.models import Model, Seconds

ClientId = Annotated[str, Field(min_length=1, max_length=200)]


class NewTopic(Model):
    """A topic to be made, or changed when it exists."""

    name: Annotated[str, Field(min_length=1, max_length=150)]
    catch_up: Annotated[int, Field(ge=0, le=100_000)] | None = Field(
        None, description="How many of the last messages a new subscriber gets."
    )
    encrypted: bool | None = Field(
        None, description="Whether messages are stored encrypted: then only applications with keys can publish and receive them."
    )


class Subscribe(Model):
    """How to subscribe."""

    ttl_s: Annotated[float, Field(ge=1, le=2_592_000)] | None = Field(
        None, description="The subscription ends, with its queue, unless it is renewed in that time; none: it stays."
    )
    filter: Any = Field(None, description="Only messages that contain this JSON; none: all.")
    since: Annotated[int, Field(ge=0, le=9_000_000_000_000_000_000)] | None = Field(
        None, description="A new subscription begins with the messages after this number; none: with the last ones of `catch_up`."
    )


class Renewed(BaseModel):
    """Whether the subscription was renewed. false: it has ended, and messages may have been missed."""

    model_config = example({"renewed": True})

    renewed: bool


class NewMessage(Model):
    """A message to be published. Times are text, or numbers of seconds from now."""

    data: Any = Field(default={}, description="Any JSON, up to 1 MiB.")
    id: UUID | None = Field(None, description="Publishing the same id again is the same message.")
    key: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(None, description="Key of the copies; none: none.")
    unique: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None, description="A subscriber in whose queue a copy with this key waits gets no other."
    )
    run_after: Seconds | AwareDatetime | None = Field(None, description="No copy is started before.")
    expires_at: Seconds | AwareDatetime | None = Field(None, description="A copy that waits then is archived as expired.")
    background: bool = Field(True, description="false: wait until every receiver has settled, and answer with the outcomes.")
    timeout: str = Field("30s", max_length=20, description="How long to wait, such as 30s.")
