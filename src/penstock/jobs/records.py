"""Records of jobs, job types and handlers, as they are stored and shown: plain data, no input or output."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar
from uuid import UUID

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, SkipValidation, WithJsonSchema

from penstock.core.records import Seconds, example
from penstock.errors import InvalidInput
from penstock.jobs.options import Backoff, Delivery, Options, RateLimit
from penstock.settings import Keep

_AT = "2026-01-11T18:26:26Z"


def parse_id(value: UUID | str) -> UUID:
    """A job id from a UUID or text, with or without the prefix `job_`. Raises `InvalidInput`."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value.removeprefix("job_") if isinstance(value, str) else "")
    except ValueError:
        of_record = "Give its id, such as receipt.id." if hasattr(value, "id") else None
        raise InvalidInput(
            f"invalid job id: {value!r:.100}", hint=of_record or "A job id is a UUID, with or without the prefix job_."
        ) from None


JobId = Annotated[
    UUID,
    BeforeValidator(parse_id),
    PlainSerializer(lambda id: f"job_{id}", return_type=str),
    WithJsonSchema({"type": "string"}),
]
"""The id of a job: a UUID, in JSON with its prefix."""


_NO_TIME = datetime(9998, 1, 1, tzinfo=UTC)


def reached(run_after: datetime) -> datetime | None:
    """The time at which a job may start; None when it is one that stands for none, as of a job that waits for a signal."""
    return run_after if run_after < _NO_TIME else None


LONGEST_LINE = 1_000


MOST_LINES = 100
"""How many lines the log of a job keeps, and how many characters of each; penstock.append_log has the same numbers."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of the log of a job, with its time and the number of the attempt that logged it.

    Attributes:
        at: Time of the line, by the clock of the worker.
        attempt: Number of the attempt that logged it.
        line: Text of the line.
    """

    at: datetime
    attempt: int
    line: str


JobErrors = SkipValidation[list[dict[str, Any]]]
"""The errors of a job's attempts, oldest first. They are read as they are: who settles jobs through SQL can give any JSON."""


class Status(enum.StrEnum):
    """Status of a job; the last four are terminal.

    Attributes:
        WAITING: It waits for other jobs, after which it is to run, or is suspended in one of its steps.
        QUEUED: It waits, for a worker or for its time.
        IN_PROGRESS: It belongs to a worker.
        SUCCEEDED: Its handler returned.
        FAILED: Its last attempt failed, or it cannot be read.
        EXPIRED: It waited, also for a retry or in one of its steps, when its `expires_at` came. `attempt` is 0: it never started.
        CANCELLED: It was cancelled.
    """

    WAITING = "waiting"
    QUEUED = "queued"
    IN_PROGRESS = "in-progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """Whether the job is archived."""
        return self not in (Status.WAITING, Status.QUEUED, Status.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job with all its stored fields, queued or archived.

    Attributes:
        id: Identity of the job.
        name: Name of its job type.
        status: Status.
        attempt: Number of the attempt that runs or comes next, from 1; of a finished job, of its last one, 0 when it never
            started.
        max_attempts: Number of attempts that the job may have.
        priority: -100 to 100, lower first.
        key: Key of the job, or None.
        unique: Coalescing key, or None.
        data: Payload.
        created_at: Time of the enqueue.
        run_after: Earliest start; of a job that no time lets start one in the years 9998 and 9999, see `not_before`.
        expires_at: Time after which no worker gets it: it expires then unless it runs; None: it has none.
        started_at: Start of its latest attempt, or None.
        finished_at: Time of its end, or None.
        worker: Id of the worker of its latest attempt, or None.
        errors: One object for each failed attempt, oldest first.
        result: Value that the handler returned, when the type keeps results.
        progress: Last progress that the handler reported.
        replay_of: Id of the job that this one repeats, or None.
        cancel_requested_at: Time at which its cancellation was requested, or None.
        reason: Why the job ended where its status does not say it: `quarantined` when no worker can read it or it kills its
            workers, `dependency` when a job after which it was to run did not succeed, `group` when its job group failed
            or was cancelled, `purged` or `dropped` when its type was.
        replayed_by: Ids of the jobs that repeat this one.
        time_limit: The job's own time limit; None: that of its type.
        snoozes: How often its handler put it off.
        log: The newest lines that its handler logged; lists of jobs leave it out.
        encrypted: Whether documents of it (data, result, progress, errors) are stored encrypted. In the place of a document for
            which the reader has no key stands the text "encrypted"; an error then has its type, and this text as its message.
        after: Ids of the jobs for which it waits, or waited before it was queued.
        when: How these jobs have to end: "succeeded", or "finished" for any end.
        workflow: Id of the workflow of which it is a part, such as a job group, or None.
    """

    id: JobId
    name: str
    status: Status
    attempt: int
    max_attempts: int
    priority: int
    key: str | None
    unique: str | None
    data: Any
    created_at: datetime
    run_after: datetime
    expires_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    errors: JobErrors
    result: Any
    progress: Any
    replay_of: JobId | None
    cancel_requested_at: datetime | None
    reason: str | None = None
    replayed_by: tuple[JobId, ...] = ()
    time_limit: Annotated[Seconds | None, Field(alias="time_limit_s")] = None
    snoozes: int = 0
    log: tuple[LogLine, ...] = ()
    encrypted: bool = False
    after: tuple[JobId, ...] = ()
    when: str = "succeeded"
    workflow: UUID | None = None

    @property
    def not_before(self) -> datetime | None:
        """Earliest start; None: no time lets it start, but a signal, the end of its children, or a worker that runs it alone."""
        return reached(self.run_after)


@dataclass(frozen=True, slots=True)
class Why:
    """Why a job waits: the first condition that must change before it can start.

    Attributes:
        reason: Machine-readable reason: `dependencies` (it waits for other jobs), `deferred`, `retry`, `snoozed`, `expired`,
            `paused`, `no-worker` (no live worker has its type), `no-key` (it is encrypted, and no live worker has its key),
            `quarantined-key`, `paused-key`, `unplaced`, `moving`, `key-alone`, `key-retry`, `key-snoozed`, `key-suspended`,
            `key-busy`, `key-rate`, `alone` (to run alone after crashes), `concurrency`, `rate`, `behind`, `ready`; `sleep`,
            `signal` or `children`, for which its handler waits in a step; of a job that does not wait `running` or `finished`.
        message: A sentence for people.
        since: Time at which the reason began, where that is known.
        until: Time at which the reason ends by itself, where that is known.
        by_job: Job that holds its key, or the first for which it waits.
        worker: Worker, or member of the pool, that holds it or its key.
        used: Number of places of the limit that are taken.
        most: Number of places of the limit.
        ahead: Number of jobs in front of it, at most 1,000, or for which it waits.
        expires_at: Time at which it expires unless it runs then.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "reason": "concurrency", "message": "The concurrency limit of the job type is full: 5 of 5.", "since": None,
        "until": None, "by_job": None, "worker": None, "used": 5, "most": 5, "ahead": None, "expires_at": None,
    })  # fmt: skip

    reason: Annotated[
        str,
        Field(
            description="For programs: deferred, retry, snoozed, paused, no-worker, no-key, key-busy, key-retry, concurrency, ..."
        ),
    ]
    message: Annotated[str, Field(description="For people.")]
    since: datetime | None
    until: Annotated[datetime | None, Field(description="When it ends by itself, where that is known.")]
    by_job: Annotated[JobId | None, Field(description="The job that holds its key, or the first for which it waits.")]
    worker: Annotated[str | None, Field(description="Who holds it.")]
    used: Annotated[int | None, Field(description="Places of the limit that are taken.")]
    most: int | None
    ahead: Annotated[int | None, Field(description="Jobs in front of it, 1,000 at most.")]
    expires_at: datetime | None

    def __str__(self) -> str:
        times = [("since", self.since), ("until", self.until), ("expires", self.expires_at if self.reason != "expired" else None)]
        known = [f"{word} {at.isoformat(' ', 'seconds')}" for word, at in times if at is not None and self.reason != "finished"]
        if self.by_job is not None:
            known.append(f"job {self.by_job}")
        return self.message + (f" ({', '.join(known)})" if known else "")


@dataclass(frozen=True, slots=True)
class JobTypeRecord:
    """A job type as it is stored."""

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "invoice-shipments", "delivery_strategy": "at_least_once", "max_attempts": 3, "concurrency": 5, "created_at": _AT,
        "visibility_timeout_s": 420, "time_limit_s": 300, "backoff_base_s": 2, "backoff_factor": 2, "backoff_cap_s": 3600,
        "backoff_jitter": 0.1, "rate_limit": None, "rate_period_s": None, "keep_result": False, "paused_at": None,
        "updated_at": _AT, "encrypted": False, "encrypted_at": None, "max_waiting": None, "max_crashes": 3,
        "keep_succeeded_s": 259_200, "keep_failed_s": 31_536_000,
    })  # fmt: skip

    name: str
    delivery_strategy: Delivery
    max_attempts: int
    concurrency: int | None
    created_at: datetime
    visibility_timeout: Annotated[Seconds, Field(alias="visibility_timeout_s")]
    time_limit: Annotated[Seconds | None, Field(alias="time_limit_s")]
    backoff_base: Annotated[Seconds, Field(alias="backoff_base_s")]
    backoff_factor: float
    backoff_cap: Annotated[Seconds, Field(alias="backoff_cap_s")]
    backoff_jitter: float
    rate_limit: int | None
    rate_period: Annotated[Seconds | None, Field(alias="rate_period_s")]
    keep_result: bool
    paused_at: datetime | None
    updated_at: datetime
    encrypted: Annotated[bool, Field(description="Whether what belongs to its jobs is stored encrypted.")] = False
    encrypted_at: Annotated[
        datetime | None, Field(description="Since when there may be encrypted documents; null: there are none.")
    ] = None
    max_waiting: Annotated[int | None, Field(description="Most jobs that wait; null: no limit.")] = None
    max_crashes: Annotated[
        int | None,
        Field(description="How many workers a job may end that runs alone, before it counts as failed; null: any number."),
    ] = 3
    keep_succeeded: Annotated[
        Seconds | None, Field(alias="keep_succeeded_s", description="How long jobs that succeeded are kept; null: by default.")
    ] = None
    keep_failed: Annotated[
        Seconds | None, Field(alias="keep_failed_s", description="How long jobs are kept that ended otherwise; null: by default.")
    ] = None

    @property
    def options(self) -> Options:
        """The options of the job type, in the form in which an application declares them."""
        limit, period = self.rate_limit, self.rate_period
        keep = None if self.keep_succeeded is None and self.keep_failed is None else Keep(self.keep_succeeded, self.keep_failed)
        return Options(
            delivery=self.delivery_strategy,
            max_attempts=self.max_attempts,
            concurrency=self.concurrency,
            visibility_timeout=self.visibility_timeout,
            time_limit=self.time_limit,
            backoff=Backoff(self.backoff_base, self.backoff_factor, self.backoff_cap, self.backoff_jitter),
            rate_limit=None if limit is None or period is None else RateLimit(limit, period),
            keep=keep,
            keep_result=self.keep_result,
            encrypted=self.encrypted,
            max_waiting=self.max_waiting,
            max_crashes=self.max_crashes,
        )


@dataclass(frozen=True, slots=True)
class HandlerRecord:
    """What workers say of a handler.

    Attributes:
        kind: What has the handler: "job", "pool", "subscriber", "consumer", "schedule" or "leader".
        name: Name of the job type, pool, consumer group (`stream/group`), schedule or task of the leader.
        schema: JSON Schema of the payloads; None: any JSON.
        docs_url: Where it is documented, or None.
        owner: Who answers for it, or None.
        noted_at: When a worker last began to work with it; None: it is on its way to the database.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "kind": "job", "name": "invoice-shipments", "schema": {"type": "object"}, "docs_url": "https://wiki.example/invoices",
        "owner": "billing", "noted_at": _AT,
    })  # fmt: skip

    kind: str
    name: str
    schema: dict[str, Any] | None = None
    docs_url: str | None = None
    owner: str | None = None
    noted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class JobCounts:
    """Number of jobs of a type, by status.

    Attributes:
        name: Name of the job type.
        paused: Whether the type is paused.
        waiting: Number of jobs that wait for other jobs.
        ready: Number of jobs that could start now.
        deferred: Number of jobs that wait for their time.
        in_progress: Number of jobs that belong to a worker.
        oldest_ready_s: Seconds since the oldest ready job could start; None: no job is ready.
        succeeded_last_hour: Number of jobs that succeeded in the last hour.
        failed_last_hour: Number of jobs that failed in the last hour.
        expired_last_hour: Number of jobs that expired in the last hour.
        cancelled_last_hour: Number of jobs that were cancelled in the last hour.
    """

    name: str
    paused: bool
    waiting: int
    ready: int
    deferred: int
    in_progress: int
    oldest_ready_s: float | None
    succeeded_last_hour: int
    failed_last_hour: int
    expired_last_hour: int
    cancelled_last_hour: int
    quarantined_last_hour: Annotated[
        int, Field(description="Of the failed ones those that no worker can read, or that end their workers.")
    ]
