"""The bodies and answers of the routes about pools, standing jobs and scaling, as models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.core.records import example
from penstock.http.jobs.models import JobTypeOptions, NewJobOptions
from penstock.http.models import AT, Model

Key = Annotated[str, Field(min_length=1, max_length=255)]
PoolName = Annotated[str, Field(min_length=1, max_length=200)]
Period = Annotated[float, Field(ge=0.01, le=2_678_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2_147_483_647)]


class PoolOptions(Model):
    """What can be changed of a pool. Fields left out stay as they are."""

    slots: Annotated[int, Field(ge=1, le=65_536)] | None = Field(None, description="More than now: the pool grows.")
    on_retry: Literal["block", "skip"] | None = Field(None, description="Whether a job to be retried holds up its key.")
    key_concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, description="Jobs of one key at once.")
    key_rate_limit: Count | None = Field(None, description="Most starts of one key in a period; null: no limit.")
    key_rate_period_s: Period | None = Field(None, description="The period; null: no limit.")

    key_max_waiting: Count | None = Field(None, description="Most jobs of one key that wait; null: no limit.")

    @model_validator(mode="after")
    def _not_null(self) -> PoolOptions:
        for name in ("slots", "on_retry", "key_concurrency"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} must not be null")
        return self

    def limits(self) -> dict[str, Any]:
        """What `penstock.change_pool` takes."""
        given = self.model_dump(exclude_unset=True, include=set(PoolOptions.model_fields) - {"slots"})
        if "key_rate_period_s" in given:
            period = given.pop("key_rate_period_s")
            given["key_rate_period"] = None if period is None else f"{period:.6f} seconds"
        return given


class NewPool(PoolOptions, JobTypeOptions):
    """A pool to be created, with the options of its job type, which are changed at `PATCH /v1/jobs/{name}`."""

    name: PoolName
    assignor: Literal["sticky", "jump"] = Field("sticky", description="sticky moves the fewest slots.")
    convert: bool = Field(False, description="Turn the plain job type of this name, with its jobs, into a pool.")


class NewPoolJob(NewJobOptions):
    """A job for a pool. Unknown fields are ignored."""

    key: Key = Field(description="Whose job it is: jobs of a key run in order, one at a time.")
    data: Any = Field({}, description="Any JSON, up to 100 KiB.")
    id: str | None = Field(None, description="Its id, so that a repeated call enqueues once; none: a new one.", max_length=40)


class PoolJob(BaseModel):
    """The job that was enqueued, or the one that was there."""

    model_config = example({
        "id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "name": "fibonacci", "key": "acme", "attempt": 1, "max_attempts": 5,
        "run_after": AT, "expires_at": None, "created_at": AT, "updated_at": AT, "status": "queued", "data": 42,
    })  # fmt: skip

    id: str
    name: str
    key: str
    attempt: int
    max_attempts: int
    run_after: datetime
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    status: Literal["queued", "in-progress"]
    data: Any


class Weight(Model):
    """How many jobs a key gets in each of its turns."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"weight": 3}})

    weight: int = Field(ge=1, le=1_000)


class Weights(BaseModel):
    """Keys with a weight other than 1."""

    model_config = example({"weights": {"acme": 3}})

    weights: dict[str, int]


class StartStanding(Model):
    """A standing job to be started."""

    data: Any = Field({}, description="Its payload: any JSON, up to 100 KiB.")
    replace: bool = Field(False, description="Whether to replace the payload when it is another; otherwise that is a 409.")


class StandingOutcome(BaseModel):
    """What a start did: started, unchanged (it is there with this payload) or replaced."""

    model_config = example({"key": "acme", "outcome": "starting"})

    key: str
    outcome: Literal["starting", "unchanged", "replaced"]


class Wanted(Model):
    """The standing jobs that there are to be: payloads by key."""

    wanted: dict[Key, Any] = Field(max_length=100_000)


class Reconciled(BaseModel):
    """How many standing jobs a reconciliation started, replaced and stopped."""

    model_config = example({"started": 1, "replaced": 0, "stopped": 2})

    started: int
    replaced: int
    stopped: int


class Message(Model):
    """A message to a standing job."""

    data: Any = Field(description="Any JSON, up to 100 KiB.")
