"""The bodies and answers of the routes about pools, standing jobs and scaling, as models."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.http.models import _AT, Model, Why, Word, _example

Key = Annotated[str, Field(min_length=1, max_length=255)]
PoolName = Annotated[str, Field(min_length=1, max_length=200)]
Period = Annotated[float, Field(ge=0.01, le=2_678_400, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2_147_483_647)]
_WORKER = "web-3.4711.a1b2c3"


class PoolOptions(Model):
    """What can be changed of a pool. Fields left out stay as they are."""

    slots: Annotated[int, Field(ge=1, le=65_536)] | None = Field(None, description="More than now: the pool grows.")
    on_retry: Literal["block", "skip"] | None = Field(None, description="Whether a job to be retried holds up its key.")
    key_concurrency: Annotated[int, Field(ge=1, le=10_000)] | None = Field(None, description="Jobs of one key at once.")
    key_rate_limit: Count | None = Field(None, description="Most starts of one key in a period; null: no limit.")
    key_rate_period_s: Period | None = Field(None, description="The period; null: no limit.")

    @model_validator(mode="after")
    def _not_null(self) -> PoolOptions:
        for name in ("slots", "on_retry", "key_concurrency"):
            if name in self.model_fields_set and getattr(self, name) is None:
                raise ValueError(f"{name} must not be null")
        return self

    def limits(self) -> dict[str, Any]:
        """What `penstock.change_pool` takes."""
        given = self.model_dump(exclude_unset=True, exclude={"slots", "name", "assignor", "attempts", "convert"})
        if "key_rate_period_s" in given:
            period = given.pop("key_rate_period_s")
            given["key_rate_period"] = None if period is None else f"{period:.6f} seconds"
        return given


class NewPool(PoolOptions):
    """A pool to be created; the options of its job type are changed at `PATCH /v1/jobs/{name}`."""

    name: PoolName
    assignor: Literal["sticky", "jump"] = Field("sticky", description="sticky moves the fewest slots.")
    convert: bool = Field(False, description="Turn the plain job type of this name, with its jobs, into a pool.")


class Pool(BaseModel):
    """A pool."""

    model_config = _example({
        "name": "fibonacci", "slots": 256, "assignor": "sticky", "on_retry": "block", "key_concurrency": 1,
        "key_rate_limit": None, "key_rate_period_s": None, "workers": 3, "unowned_slots": 0, "moving_slots": 2, "ready": 12,
        "deferred": 3, "in_progress": 5, "oldest_ready_s": 0.8, "standing": 4, "standing_running": 4, "created_at": _AT,
    })  # fmt: skip

    name: str
    slots: int = Field(description="How many; with the assignor custom one for each key.")
    assignor: Literal["sticky", "jump", "custom"]
    on_retry: Literal["block", "skip"]
    key_concurrency: int
    key_rate_limit: int | None
    key_rate_period_s: float | None
    workers: int
    unowned_slots: int = Field(description="Slots that nobody has.")
    moving_slots: int = Field(description="Slots on their way to another worker.")
    ready: int
    deferred: int
    in_progress: int
    oldest_ready_s: float | None = Field(description="How long the oldest job has waited; some seconds old.")
    standing: int
    standing_running: int
    created_at: datetime


class QuarantinedKey(BaseModel):
    """A key for which the rule of its pool fails."""

    model_config = _example({"key": "acme", "slot": 17, "error": "KeyError: 'acme'", "failed_at": _AT, "jobs": 12})

    key: str
    slot: int
    error: str = Field(description="What the rule raised, or answered.")
    failed_at: datetime
    jobs: int = Field(description="How many jobs wait; at most 10,000 are counted.")


class NewPoolJob(BaseModel):
    """A job for a pool. Unknown fields are ignored."""

    key: Key = Field(description="Whose job it is: jobs of a key run in order, one at a time.")
    data: Any = Field({}, description="Any JSON, up to 100 KiB.")
    id: str | None = Field(None, description="Its id, so that a repeated call enqueues once; none: a new one.", max_length=40)
    run_after: datetime | None = None
    expires_at: datetime | None = None
    unique: Word | None = None


class PoolJob(BaseModel):
    """The job that was enqueued, or the one that was there."""

    model_config = _example({
        "id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "name": "fibonacci", "key": "acme", "attempts": 5, "run_after": _AT,
        "expires_at": None, "created_at": _AT, "updated_at": _AT, "status": "queued", "data": 42,
    })  # fmt: skip

    id: str
    name: str
    key: str
    attempts: int
    run_after: datetime
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    status: Literal["queued", "in-progress"]
    data: Any


class PoolWorker(BaseModel):
    """A worker of a pool; `id` null: the slots that nobody has. Slots are numbers, or keys in a pool with a rule of its own."""

    model_config = _example({
        "id": _WORKER, "state": "active", "joined_at": _AT, "seen_at": _AT, "slots": [0, 1, 2], "coming": [3], "going": [],
        "metadata": {},
    })  # fmt: skip

    id: str | None
    state: Literal["active", "draining"] | None
    joined_at: datetime | None
    seen_at: datetime | None
    slots: list[int | str]
    coming: list[int | str] = Field(description="What it is to get.")
    going: list[int | str] = Field(description="What of its own it is to give up.")
    metadata: dict[str, Any]


class KeyState(BaseModel):
    """Where a key is and what waits for it; counts end at 10,000."""

    model_config = _example({
        "key": "acme", "slot": 17, "owner": _WORKER, "target": _WORKER, "epoch": 3, "weight": 1, "ready": 2, "in_progress": 1,
        "oldest_ready_s": 0.4, "standing": False, "next_job": "job_0192f7a8-7b5c-7d6e-8f90-a1b2c3d4e5f6", "why": {
            "reason": "key-retry", "message": "Its key is held by a job that failed and is retried: attempt 2 of 5 comes next.",
            "since": None, "until": "2026-03-01T12:00:04Z", "by_job": "job_0192f7a8-7b5c-7d6e-8f90-a1b2c3d4e5f5", "worker": None,
            "used": None, "most": None, "ahead": 1, "expires_at": None,
        },
    })  # fmt: skip

    key: str
    slot: int | None
    owner: str | None
    target: str | None
    epoch: int | None
    weight: int
    ready: int
    in_progress: int
    oldest_ready_s: float | None
    standing: bool
    next_job: str | None = Field(description="The first that waits.")
    why: Why | None = Field(description="What it waits for.")


class Weight(Model):
    """How many jobs a key gets in each of its turns."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"weight": 3}})

    weight: int = Field(ge=1, le=1_000)


class Weights(BaseModel):
    """Keys with a weight other than 1."""

    model_config = _example({"weights": {"acme": 3}})

    weights: dict[str, int]


class StartStanding(Model):
    """A standing job to be started."""

    data: Any = Field({}, description="Its payload: any JSON, up to 100 KiB.")
    replace: bool = Field(False, description="Whether to replace the payload when it is another; otherwise that is a 409.")


class StandingOutcome(BaseModel):
    """What a start did: started, unchanged (it is there with this payload) or replaced."""

    model_config = _example({"key": "acme", "outcome": "starting"})

    key: str
    outcome: Literal["starting", "unchanged", "replaced"]


class StandingJob(BaseModel):
    """A standing job, and where it runs."""

    model_config = _example({
        "key": "acme", "slot": 17, "owner": _WORKER, "running_by": _WORKER, "wanted": True, "started_at": _AT, "failures": 0,
        "retry_at": None, "messages": 0, "created_at": _AT, "updated_at": _AT, "data": {"every_s": 60},
        "state": {"cursor": 4711}, "error": None, "entered_at": _AT, "crashes": 0, "quarantined_at": None,
    })  # fmt: skip

    key: str
    slot: int
    owner: str | None = Field(description="The worker that has its slot.")
    running_by: str | None = Field(description="The worker that runs it; null: it does not run.")
    wanted: bool = Field(description="False: it is to be stopped.")
    started_at: datetime | None
    failures: int = Field(description="Runs in a row that ended with an error.")
    retry_at: datetime | None
    messages: int = Field(description="Messages that wait for it.")
    created_at: datetime
    updated_at: datetime
    data: Any
    state: Any
    error: Any
    entered_at: datetime | None = Field(
        description="When the start side of its last run had succeeded; null: not yet, or it failed."
    )
    crashes: int = Field(description="Workers lost one after the other while they ran it.")
    quarantined_at: datetime | None = Field(description="Since when it is set aside, since it ends its workers.")


class Wanted(Model):
    """The standing jobs that there are to be: payloads by key."""

    wanted: dict[Key, Any] = Field(max_length=100_000)


class Reconciled(BaseModel):
    """How many standing jobs a reconciliation started, replaced and stopped."""

    model_config = _example({"started": 1, "replaced": 0, "stopped": 2})

    started: int
    replaced: int
    stopped: int


class Message(Model):
    """A message to a standing job."""

    data: Any = Field(description="Any JSON, up to 100 KiB.")


class Advice(BaseModel):
    """How many workers a job type or pool needs."""

    model_config = ConfigDict(json_schema_extra={"example": {
        "name": "fibonacci", "ready": 1200, "oldest_ready_s": 8.5, "finished_per_s": 100.0, "drain_s": 12.0, "workers": 2,
        "advised": 4,
    }})  # fmt: skip

    name: str
    ready: int
    oldest_ready_s: float | None = Field(description="How long the oldest job has lacked a worker; null: none does.")
    finished_per_s: float
    drain_s: float | None = Field(description="How long what waits takes at that rate; null: nothing finished of late.")
    workers: int
    advised: int
