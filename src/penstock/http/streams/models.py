"""The bodies and answers about streams and their events as models: what the OpenAPI document shows, and what is checked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, Field

from penstock.core.records import example
from penstock.http.models import Model
from penstock.http.ndjson import LineOutcome
from penstock.streams.models import EVENT, Event

Partition = Annotated[int, Field(ge=0, le=1_023)]
Offset = Annotated[int, Field(ge=0, le=9_000_000_000_000_000_000)]
StreamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")]
Positive = Annotated[int, Field(ge=1, le=9_000_000_000_000_000_000)]
Age = Annotated[float, Field(gt=0, le=3_153_600_000)]


class StreamSettings(Model):
    """The options of a stream that can be changed. `keep_...` drops whole segments, oldest first; null: no limit."""

    keep_age_s: Age | None = None
    keep_bytes: Positive | None = None
    keep_events: Positive | None = None
    keep_unread: bool = Field(False, description="Keep nevertheless what some group has not read.")
    compact: bool = Field(False, description="Keep the last event of each key.")
    segment_age_s: Age | None = None
    segment_bytes: Positive = 64 * 1024 * 1024
    segment_events: Positive | None = None
    max_event_bytes: Annotated[int, Field(ge=1, le=268_435_456)] = 1024 * 1024
    encrypted: bool = Field(
        False, description="Store payloads encrypted: then only applications with keys can append and consume."
    )

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


class NewEvent(Model):
    """An event to be appended: `data`, or `bytes` for a stream of bytes."""

    data: Any = Field(None, description="Any JSON, for a stream of JSON. null in a compacted stream: the key is gone.")
    bytes: str | None = Field(None, description="Base64, for a stream of bytes.")
    key: str | None = Field(None, description="Events of one key keep their order; none: any partition.")
    headers: dict[str, Any] | None = Field(None, description="Anything beside the payload.")
    time: AwareDatetime | None = Field(None, description="When it happened.")


class Appended(BaseModel):
    """Where an appended event is.

    A producer's last append, repeated, gets the answer of the first time. `duplicate`: it was an older one, and nothing was done.
    """

    model_config = example({"appended": 1, "partition": 3, "offset": 17, "sequence": None, "duplicate": False})

    appended: int
    partition: int | None = None
    offset: int | None = None
    sequence: int | None = Field(None, description="Number of the append; continue with the next.")
    duplicate: bool = False


class AppendOutcome(LineOutcome):
    """One line of the answer to events in lines: where the event is, or an error."""

    outcome: Literal["appended", "duplicate"] | None = None
    partition: int | None = None
    offset: int | None = None
    sequence: int | None = Field(None, description="Number of the producer's part; continue with the next after the last.")


class Events(BaseModel):
    """Events of one partition. `next_offset` is what to ask for next."""

    model_config = example({"partition": 3, "next_offset": 18, "events": [EVENT]})

    partition: int
    next_offset: int
    events: list[Event[Any]]
