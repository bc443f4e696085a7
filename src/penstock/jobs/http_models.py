"""Records about jobs that the HTTP API shows and no other surface: on the server, in its clients and in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from penstock.core.records import Seconds, example
from penstock.jobs.records import JobCounts, JobErrors, JobId, Status

_AT = "2026-01-11T18:26:26Z"
_ID = "job_282227eb-3c76-4ef7-af7e-25dff933077f"


@dataclass(frozen=True, slots=True)
class JobStatistics(JobCounts):
    """Number of jobs of a type, by status, with the rates of the last minute."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "invoice-shipments", "paused": False, "waiting": 0, "ready": 12, "deferred": 3, "in_progress": 5,
        "oldest_ready_s": 0.8,
        "succeeded_last_hour": 1042, "failed_last_hour": 2, "expired_last_hour": 0, "cancelled_last_hour": 0,
        "quarantined_last_hour": 0, "enqueued_per_s": 0.3, "finished_per_s": 0.3, "failed_per_s": 0.0,
    })  # fmt: skip

    enqueued_per_s: float
    finished_per_s: float
    failed_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job. `result` is null unless the type keeps results."""

    __pydantic_config__: ClassVar[ConfigDict] = example(
        {"id": _ID, "status": "succeeded", "result": {"price": 17.15}, "errors": []}
    )

    id: JobId
    status: Status
    result: Any
    errors: JobErrors


@dataclass(frozen=True, slots=True)
class Claimed:
    """A job that belongs to a worker until it is settled or the lease ends."""

    id: JobId
    name: str
    attempt: int
    max_attempts: int
    priority: int
    key: str | None
    data: Any
    created_at: datetime
    run_after: datetime
    lease: int
    lease_s: float
    time_limit: Annotated[Seconds | None, Field(alias="time_limit_s")]
    snoozes: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedJobs:
    """The jobs that a claim got; none when there are none."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "jobs": [
            {
                "id": _ID, "name": "invoice-shipments", "attempt": 1, "max_attempts": 3, "priority": 0, "key": None,
                "data": {"shipmentId": "shp_123"}, "created_at": _AT, "run_after": _AT, "lease": 17, "lease_s": 420,
                "time_limit_s": None, "snoozes": 0,
                "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            }
        ]
    })  # fmt: skip

    jobs: list[Claimed]
