"""The records of pools, which are the same in Python, over HTTP, in its clients and in the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from penstock.core.records import Seconds, example
from penstock.jobs.records import JobCounts, JobId, Status, Why

_AT = "2026-01-11T18:26:26Z"
_WORKER = "web-3.4711.a1b2c3"
_JOB = "job_0192f7a8-7b5c-7d6e-8f90-a1b2c3d4e5f6"


@dataclass(frozen=True, slots=True)
class PoolDetails:
    """A pool: its options, its workers and slots, and the number of waiting jobs."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "fibonacci", "slots": 256, "assignor": "sticky", "on_retry": "block", "key_concurrency": 1,
        "key_rate_limit": None, "key_rate_period_s": None, "key_max_waiting": None,
        "workers": 3, "unowned_slots": 0, "moving_slots": 2, "ready": 12,
        "deferred": 3, "in_progress": 5, "oldest_ready_s": 0.8, "standing": 4, "standing_running": 4, "created_at": _AT,
    })  # fmt: skip

    name: str
    slots: Annotated[int, Field(description="How many it has now; with the assignor custom one for each key that it knows.")]
    assignor: Literal["sticky", "jump", "custom"]
    on_retry: Literal["block", "skip"]
    key_concurrency: int
    key_rate_limit: int | None
    key_rate_period: Annotated[Seconds | None, Field(alias="key_rate_period_s")]
    key_max_waiting: Annotated[int | None, Field(description="Most jobs of one key that wait; null: no limit.")]
    workers: int
    unowned_slots: Annotated[int, Field(description="Slots that no worker has.")]
    moving_slots: Annotated[int, Field(description="Slots on their way to another worker.")]
    standing: Annotated[int, Field(description="Standing jobs that are wanted.")]
    standing_running: Annotated[int, Field(description="Standing jobs that run.")]
    created_at: datetime
    ready: int = 0
    deferred: int = 0
    in_progress: int = 0
    oldest_ready_s: Annotated[float | None, Field(description="How long the oldest job has waited; some seconds old.")] = None

    def with_counts(self, counts: JobCounts | None) -> PoolDetails:
        """A copy with the numbers of waiting and running jobs."""
        if counts is None:
            return self
        return replace(
            self,
            ready=counts.ready,
            deferred=counts.deferred,
            in_progress=counts.in_progress,
            oldest_ready_s=counts.oldest_ready_s,
        )


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A worker of a pool; `id` null: the slots that no worker has. In a pool with a rule of its own, slots are keys."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": _WORKER, "state": "active", "joined_at": _AT, "seen_at": _AT, "slots": [0, 1, 2], "coming": [3], "going": [],
        "metadata": {},
    })  # fmt: skip

    id: str | None
    state: Annotated[str | None, Field(description="active, or draining: it stays without slots.")] = None
    joined_at: datetime | None = None
    seen_at: datetime | None = None
    slots: list[int | str] = field(default_factory=list)
    coming: Annotated[list[int | str], Field(description="What it is to get.")] = field(default_factory=list)
    going: Annotated[list[int | str], Field(description="Its slots that it has to release.")] = field(default_factory=list)
    metadata: Annotated[dict[str, Any], Field(description="What it says of itself.")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job of a key that runs."""

    __pydantic_config__: ClassVar[ConfigDict] = example({"id": _JOB, "attempt": 1, "worker": _WORKER, "started_at": _AT})

    id: JobId
    attempt: int
    worker: str | None
    started_at: Annotated[datetime | None, Field(description="When its worker claimed it.")]


@dataclass(frozen=True, slots=True)
class KeyedJob:
    """A job of a pool that waits or runs, without its payload. `cursor` is its position in the list."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "cursor": "q17:4711:acme", "id": _JOB, "key": "acme", "status": "queued", "attempt": 1, "max_attempts": 5,
        "created_at": _AT, "run_after": _AT, "expires_at": None, "started_at": None, "worker": None,
    })  # fmt: skip

    cursor: Annotated[str, Field(description="Where the next page begins when this is the last job of a page.")]
    id: JobId
    key: str
    status: Annotated[Status, Field(description="queued or in-progress.")]
    attempt: int
    max_attempts: int
    created_at: datetime
    run_after: datetime
    expires_at: datetime | None
    started_at: datetime | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class PausedKey:
    """A paused key of a pool."""

    __pydantic_config__: ClassVar[ConfigDict] = example({"key": "acme", "paused_at": _AT, "jobs": 12})

    key: str
    paused_at: datetime
    jobs: Annotated[int, Field(description="How many jobs it has; at most 10,000 are counted.")]


@dataclass(frozen=True, slots=True)
class KeyState:
    """What is known of a key: its place, whether it is paused or quarantined, what runs and waits. Counts end at 10,000."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "key": "acme", "slot": 17, "owner": _WORKER, "target": _WORKER, "epoch": 3, "weight": 1, "ready": 2, "in_progress": 0,
        "deferred": 0, "oldest_ready_s": 0.4, "standing": False, "paused_at": None, "quarantined_at": None,
        "quarantine_error": None, "running": [], "next_job": _JOB, "why": {
            "reason": "key-retry", "message": "Its key is held by a job that failed and is retried: attempt 2 of 5 comes next.",
            "since": None, "until": "2026-03-01T12:00:04Z", "by_job": "job_0192f7a8-7b5c-7d6e-8f90-a1b2c3d4e5f5", "worker": None,
            "used": None, "most": None, "ahead": 1, "expires_at": None,
        },
    })  # fmt: skip

    key: str
    slot: Annotated[int | None, Field(description="null: the pool has not placed the key yet.")]
    owner: str | None
    target: str | None
    epoch: int | None
    weight: int
    ready: Annotated[int, Field(description="Jobs that wait in its queue.")]
    in_progress: Annotated[int, Field(description="Jobs that its worker has claimed, those that run included.")]
    deferred: Annotated[int, Field(description="Jobs whose time has not come.")]
    oldest_ready_s: float | None
    standing: bool
    paused_at: Annotated[datetime | None, Field(description="Since when it is paused; null: it is not.")]
    quarantined_at: Annotated[datetime | None, Field(description="Since when it is quarantined; null: it is not.")]
    quarantine_error: Annotated[str | None, Field(description="Why it is quarantined: what the rule of the pool raised.")]
    running: Annotated[list[RunningJob], Field(description="Its jobs that run.")]
    next_job: Annotated[JobId | None, Field(description="The first that waits.")] = None
    why: Annotated[Why | None, Field(description="What it waits for.")] = None


@dataclass(frozen=True, slots=True)
class QuarantinedKey:
    """A key for which the rule of its pool fails."""

    __pydantic_config__: ClassVar[ConfigDict] = example(
        {"key": "acme", "slot": 17, "error": "KeyError: 'acme'", "failed_at": _AT, "jobs": 12}
    )

    key: str
    slot: int
    error: Annotated[str, Field(description="What the rule raised, or answered.")]
    failed_at: datetime
    jobs: Annotated[int, Field(description="How many jobs wait; at most 10,000 are counted.")]


@dataclass(frozen=True, slots=True)
class StandingState:
    """A standing job, and where it runs."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "key": "acme", "slot": 17, "owner": _WORKER, "running_by": _WORKER, "wanted": True, "started_at": _AT, "failures": 0,
        "retry_at": None, "messages": 0, "created_at": _AT, "updated_at": _AT, "data": {"every_s": 60},
        "state": {"cursor": 4711}, "error": None, "entered_at": _AT, "crashes": 0, "quarantined_at": None,
    })  # fmt: skip

    key: str
    slot: int
    owner: Annotated[str | None, Field(description="The worker that has its slot.")]
    running_by: Annotated[str | None, Field(description="The worker that runs it; null: it does not run.")]
    wanted: Annotated[bool, Field(description="False: it is to be stopped.")]
    started_at: datetime | None
    failures: Annotated[int, Field(description="Runs in a row that ended with an error.")]
    retry_at: datetime | None
    messages: Annotated[int, Field(description="Messages that wait for it.")]
    created_at: datetime
    updated_at: datetime
    data: Any
    state: Any
    error: Any
    entered_at: Annotated[
        datetime | None, Field(description="When the start side of its last run had succeeded; null: not yet, or it failed.")
    ]
    crashes: Annotated[int, Field(description="Workers lost one after the other while they ran it.")]
    quarantined_at: Annotated[datetime | None, Field(description="Since when it is quarantined, since it ends its workers.")]
