"""Models of workflows: plain data, no input or output."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar, Literal, TypeAlias
from uuid import UUID

from pydantic import ConfigDict

from penstock.core.records import example

OnFailure: TypeAlias = Literal["cancel", "continue"]
RESULT = "$result"
"""In a payload, the one field of an object that stands for the result of the step which it names."""
_AT = "2026-01-11T18:26:26Z"
_ID = "0199f7c2-6a40-7cc1-a3c5-0f3f3c0ad0b5"


@dataclass(frozen=True, slots=True)
class WorkflowRunRecord:
    """A run of a workflow as it is stored.

    Attributes:
        id: Id of the run, which is a job group.
        name: Id that was given at the start, such as `nightly-2026-11-22`.
        workflow: Name of the workflow.
        status: `running`, or how it ended: `succeeded` when each step did, otherwise `failed`, `cancelled` or `expired`.
        on_failure: `continue`: steps that do not need the one that failed go on; `cancel`: they are cancelled.
        created_at: Time of the start.
        cancelled_at: Time at which its steps began to be cancelled, or None.
        finished_at: Time of its end, or None.
        retry_of: The run that this one retries, or None.
        retried_by: The run that retries this one, or None.
        steps: Number of its steps.
        shared: Number of steps that succeeded in the run that it retries, and are not run again.
        succeeded: Number of the other steps that succeeded.
        failed: Number of steps that failed.
        cancelled: Number of steps that were cancelled.
        expired: Number of steps that expired.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": _ID, "name": "nightly-2026-01-11", "workflow": "nightly", "status": "running", "on_failure": "continue",
        "created_at": _AT, "cancelled_at": None, "finished_at": None, "retry_of": None, "retried_by": None, "steps": 3,
        "shared": 0, "succeeded": 1, "failed": 0, "cancelled": 0, "expired": 0,
    })  # fmt: skip

    id: UUID
    name: str
    workflow: str
    status: str
    on_failure: str
    created_at: datetime
    cancelled_at: datetime | None
    finished_at: datetime | None
    retry_of: str | None
    retried_by: str | None
    steps: int
    shared: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int


@dataclass(frozen=True, slots=True)
class WorkflowStepRecord:
    """A step of a run of a workflow.

    Attributes:
        place: Number of the step in its run, from 1: it runs only after steps with lower numbers.
        name: Name of the step.
        type: Job type of the step.
        job: Id of its job, or of the job group of its jobs.
        jobs: Number of its jobs when it has many; None: it is one job.
        carried: Number of these that succeeded in the runs that this one retries, and are not run again.
        after: Numbers of the steps after which it runs.
        at_any_end: Whether it runs however these end; False: they have to succeed.
        shared: Whether it succeeded in the run that this one retries, and is not run again.
        status: Status of its job: `waiting`, `queued`, `in-progress`, or how it ended; of many jobs: `running`, or how they
            ended; `unknown` when its day was pruned from the archive.
        reason: Why its job ended so, where the status does not say it, or None.
        created_at: Time at which its job was enqueued, or None.
        started_at: Time at which the last attempt of its job started, or None.
        finished_at: Time of its end, or None.
        attempt: Number of the last attempt of its job; 0: it has not started, or it has many jobs.
        error: Message of the last error of its job, or None.
        ended: Number of its jobs that have ended, when it has many.
        succeeded: Number of its jobs that succeeded in this run, when it has many.
        failed: Number of its jobs that failed in this run, when it has many.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "place": 2, "name": "publish", "type": "publish", "job": "282227eb-3c76-4ef7-af7e-25dff933077f", "jobs": None,
        "carried": 0,
        "after": [1], "at_any_end": False, "shared": False, "status": "in-progress", "reason": None, "created_at": _AT,
        "started_at": _AT, "finished_at": None, "attempt": 1, "error": None, "ended": None, "succeeded": None, "failed": None,
    })  # fmt: skip

    place: int
    name: str
    type: str
    job: UUID
    jobs: int | None
    carried: int
    after: list[int]
    at_any_end: bool
    shared: bool
    status: str
    reason: str | None
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int
    error: str | None
    ended: int | None
    succeeded: int | None
    failed: int | None
