"""The bodies and answers of the API as models: what the OpenAPI document shows, and what Penstock's own routes check."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from penstock.core.records import example
from penstock.http.models import AT, ID, Model, Seconds, Word
from penstock.jobs.records import JobTypeRecord

Delivery = Literal["at_least_once", "at_most_once"]
Kept = Annotated[float, Field(gt=0, le=31_536_000)]


class JobTypeOptions(Model):
    """What can be changed of a job type. Fields left out stay as they are."""

    delivery_strategy: Delivery | None = None
    max_attempts: Annotated[int, Field(ge=1, le=32_767)] | None = None
    concurrency: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = Field(None, description="null: no limit; 0: paused.")
    visibility_timeout_s: Annotated[float, Field(ge=1, le=2_592_000)] | None = None
    time_limit_s: Seconds | None = None
    backoff_base_s: Seconds | None = None
    backoff_factor: Annotated[float, Field(ge=1, le=100)] | None = None
    backoff_cap_s: Seconds | None = None
    backoff_jitter: Annotated[float, Field(ge=0, le=1)] | None = None
    rate_limit: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = None
    rate_period_s: Seconds | None = None
    keep_succeeded_s: Kept | None = Field(None, description="How long jobs that succeeded are kept; null: by default.")
    keep_failed_s: Kept | None = Field(
        None, description="How long jobs are kept that failed, expired or were cancelled; null: by default."
    )
    keep_result: bool | None = None
    max_waiting: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = Field(
        None, description="Most jobs that wait; an enqueue beyond it answers 429. null: no limit."
    )

    max_crashes: Annotated[int, Field(ge=1, le=2_147_483_647)] | None = Field(
        None,
        description="How many workers a job may end that runs alone, before it counts as failed; null: any number.",
    )

    def as_options(self) -> dict[str, Any]:
        """The options as the SQL functions take them."""
        given = self.model_dump(exclude_unset=True, include=set(JobTypeOptions.model_fields))
        return {
            name.removesuffix("_s"): f"{value:.6f} seconds" if name.endswith("_s") and value is not None else value
            for name, value in given.items()
        }


class NewJobType(BaseModel):
    """A job type to be created."""

    name: str = Field(description='Its name; `"id"` is accepted as well.')
    delivery_strategy: Delivery
    attempts: int = Field(ge=1, le=32_767, description="Most attempts of a job; `max_attempts` is accepted as well.")
    concurrency: int | None = Field(ge=1, le=32_767, description="Most jobs in flight at once, over all workers; null: no limit.")


class JobType(BaseModel):
    """A job type, with the fields that Rickover has; it calls `max_attempts` attempts."""

    model_config = example(
        {"name": "invoice-shipments", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5, "created_at": AT}
    )

    name: str
    delivery_strategy: Delivery
    attempts: int
    concurrency: int | None
    created_at: datetime

    @classmethod
    def of(cls, record: JobTypeRecord) -> JobType:
        """The same as Rickover shows it."""
        return JobType(
            name=record.name,
            delivery_strategy=record.delivery_strategy.value,
            attempts=record.max_attempts,
            concurrency=record.concurrency,
            created_at=record.created_at,
        )


class NewJobOptions(BaseModel):
    """Options of a job to be enqueued."""

    run_after: datetime | None = Field(None, description="Not to be started before.")
    expires_at: datetime | None = Field(None, description="Not to be started after.")
    unique: Word | None = Field(None, description="While a job with it is queued, that job is returned.")
    unique_for_s: Annotated[float, Field(gt=0, le=2_592_000)] | None = Field(
        None, description="Held while the job waits or runs, and for this time also when it has ended."
    )
    max_attempts: Annotated[int, Field(ge=1, le=32_767)] | None = Field(None, description="Instead of that of the type.")
    time_limit_s: Annotated[float, Field(gt=0, le=2_592_000)] | None = Field(None, description="Instead of that of the type.")
    after: Annotated[list[str], Field(min_length=1, max_length=100)] | None = Field(
        None, description="Ids of the jobs for which it waits: `job_` and a UUID."
    )
    group: UUID | None = Field(None, description="Id of the job group of which it is a child.")
    when: Literal["succeeded", "finished"] | None = Field(
        None,
        description="finished: it runs however they ended; succeeded (the default): it is cancelled when one does not succeed.",
    )


class NewJob(NewJobOptions):
    """A job to be enqueued. Unknown fields are ignored."""

    data: Any = Field(description="Any JSON, up to 100 KiB.")
    key: Word | None = Field(None, description="Whose job it is.")
    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(None, description="Lower first.")


class BatchJob(NewJob):
    """A line of a batch."""

    data: Any = Field({}, description="Any JSON, up to 100 KiB.")
    id: str | None = Field(None, description="`job_` and a UUID; none: one is made.")


class QueuedJob(BaseModel):
    """A job that is not finished."""

    model_config = example({
        "id": ID, "name": "invoice-shipments", "attempts": 3, "run_after": AT, "expires_at": None, "created_at": AT,
        "updated_at": AT, "status": "queued", "data": {"shipmentId": "shp_123"},
    })  # fmt: skip

    id: str
    name: str
    attempts: int = Field(description="Attempts that are left; to be given back in the callback.")
    run_after: datetime
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    status: Literal["queued", "in-progress", "waiting"] = Field(
        description="waiting, for other jobs, only with `details`: otherwise it is queued, as Rickover knows it."
    )
    data: Any


class ArchivedJob(BaseModel):
    """A job that is finished."""

    model_config = example({
        "id": ID, "name": "invoice-shipments", "attempts": 3, "status": "succeeded", "created_at": AT,
        "data": {"shipmentId": "shp_123"}, "expires_at": None,
    })  # fmt: skip

    id: str
    name: str
    attempts: int
    status: Literal["succeeded", "failed", "expired", "cancelled"]
    created_at: datetime
    data: Any
    expires_at: datetime | None


class Status(BaseModel):
    """A callback: what became of an attempt."""

    status: Literal["succeeded", "failed"]
    attempt: int = Field(ge=0, le=32_767, description="The `attempts` that came with the job: how many are left.")
    retryable: bool = Field(True, description="false: do not try again.")
    result: Any = Field(None, description="Kept when the type keeps results.")
    error: Any = Field(None, description="What went wrong, kept with the attempt: text or an object.")


NEW_SIGNAL = {"value": {"by": "ada@example.com"}}


class NewSignal(Model):
    """A signal to a job. Its handler gets `value`, any JSON."""

    model_config = example(NEW_SIGNAL)

    value: Any = Field(None, description="What the handler gets; at most 256 KiB.")


class Signalled(BaseModel):
    """Whether a signal was `first`: false when there was one of this name, or the wait for it had timed out."""

    model_config = example({"id": ID, "name": "approved", "first": True})

    id: str
    name: str
    first: bool


class Cancelled(BaseModel):
    """What a cancel did: `cancelled`, `cancelling` (its handler is told), or the status of a finished job."""

    model_config = example({"id": ID, "status": "cancelled"})

    id: str
    status: str


class NewPriority(Model):
    """Another priority."""

    model_config = Model.model_config | example({"priority": -10})

    priority: int = Field(ge=-100, le=100, description="Lower first, within the type.")


class PrioritySet(BaseModel):
    """What became of it. `changed` is false for a job that runs, has ended or is of a pool, and for one that has it already."""

    model_config = example({"id": ID, "changed": True})

    id: str
    changed: bool


class MadeDue(BaseModel):
    """What became of it. `changed` is false for a job that is not deferred: it is ready, runs, has ended, or waits for others."""

    model_config = example({"id": ID, "changed": True})

    id: str
    changed: bool


WorkerId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Different for each worker process.")]


class Claim(Model):
    """A claim of jobs."""

    worker: WorkerId
    limit: int = Field(1, ge=1, le=1_000, description="Most jobs to claim.")
    wait: str | None = Field(None, description="How long to wait for a job, such as 20s.", max_length=20)


class Held(Model):
    """A job as its worker holds it."""

    id: str = Field(max_length=40)
    attempt: int = Field(ge=0, le=32_767)
    lease: int = Field(ge=0, le=9_223_372_036_854_775_807)


class Extend(Model):
    """Leases to be extended."""

    jobs: list[Held] = Field(max_length=1_000)
    for_s: Annotated[float, Field(gt=0, le=2_592_000)] | None = Field(None, description="From now; null: the visibility timeout.")


class Extended(BaseModel):
    """The new leases; a job that is missing no longer belongs to the worker."""

    model_config = example({"leases": {ID: 18}})

    leases: dict[str, int]


class Settlement(Held):
    """What became of an attempt."""

    outcome: Literal["succeeded", "failed", "failed-for-good", "cancelled", "released", "snoozed"]
    result: Any = None
    error: Any = Field(None, description="Text, or an object such as type and message.")
    retry_after_s: Seconds | None = Field(None, description="When it runs again; to be given with snoozed.")


class Settle(Model):
    """Attempts to be settled."""

    jobs: list[Settlement] = Field(max_length=1_000)


class Settled(BaseModel):
    """What became of each job: succeeded, retried, failed, cancelled, released, snoozed, or stale: it was not the worker's."""

    model_config = example({"outcomes": {ID: "succeeded"}})

    outcomes: dict[str, str]


class Heartbeat(Model):
    """A heartbeat of a worker; the first one registers it."""

    names: list[Annotated[str, Field(max_length=200)]] = Field(default=[], max_length=1_000)
    in_flight: int = Field(0, ge=0, le=1_000_000)
    concurrency: int = Field(1, ge=1, le=1_000_000)
    state: Literal["running", "draining"] = "running"
    host: str = Field("", max_length=200)
    pid: int = Field(0, ge=0, le=2_147_483_647)
    dead_after_s: float = Field(30, ge=1, le=86_400, description="Silent for longer, its jobs are given to others.")
    code_version: str | None = Field(
        None, min_length=1, max_length=100, pattern=r"^[^\x00]+$", description="Version of its code, such as a commit."
    )


class Beat(BaseModel):
    """`known` false: the worker was new, or declared dead, and has no jobs. `cancelled`: jobs to stop."""

    model_config = example({"known": True, "cancelled": [], "leases": [17]})

    known: bool
    cancelled: list[str]
    leases: list[int]


class Drained(BaseModel):
    """A worker was told to stop."""

    model_config = example({"fleet": "night"})

    fleet: str


class JobberJob(BaseModel):
    """A job for Jobber."""

    type: str = Field(min_length=1)
    payload: Any = None
