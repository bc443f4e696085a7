"""Models of jobs and job types: plain data, no input or output."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypedDict
from uuid import UUID

import asyncpg.pgproto.pgproto
import uuid_utils
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, SkipValidation, WithJsonSchema

from penstock.core.records import Seconds, example
from penstock.errors import InvalidInput

Executor = Literal["auto", "thread", "process"]
_AT = "2026-01-11T18:26:26Z"


def parse_id(value: UUID | str) -> UUID:
    """A job id from a UUID or text, with or without the prefix `job_`. Raises `InvalidInput`."""
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value.removeprefix("job_") if isinstance(value, str) else "")
    except ValueError:
        raise InvalidInput(
            f"invalid job id: {value!r:.100}", hint="A job id is a UUID, with or without the prefix job_."
        ) from None


JobId = Annotated[
    UUID,
    BeforeValidator(parse_id),
    PlainSerializer(lambda id: f"job_{id}", return_type=str),
    WithJsonSchema({"type": "string"}),
]
"""The id of a job: a UUID, in JSON with its prefix."""


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


class Delivery(enum.StrEnum):
    """How often a job may be started.

    Attributes:
        AT_LEAST_ONCE: A job is retried until it ends.
        AT_MOST_ONCE: A job starts at most once, whatever crashes.
    """

    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"


class Status(enum.StrEnum):
    """Status of a job; the last four are terminal.

    Attributes:
        QUEUED: It waits, for a worker or for its time.
        IN_PROGRESS: It belongs to a worker.
        SUCCEEDED: Its handler returned.
        FAILED: Its last attempt failed, or it cannot be read.
        EXPIRED: It had not started when its `expires_at` came.
        CANCELLED: It was cancelled.
    """

    QUEUED = "queued"
    IN_PROGRESS = "in-progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def finished(self) -> bool:
        """Whether the job is archived."""
        return self not in (Status.QUEUED, Status.IN_PROGRESS)


class Admission(enum.StrEnum):
    """What an enqueue did with a job.

    Attributes:
        QUEUED: It is queued.
        DUPLICATE: A job with its id is queued or running already.
        COALESCED: A job with its unique key is queued already.
        ARCHIVED: A job with its id is finished already.
    """

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    COALESCED = "coalesced"
    ARCHIVED = "archived"


class Outcome(enum.StrEnum):
    """Outcome of an attempt, as a worker reports it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_FOR_GOOD = "failed-for-good"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    RELEASED = "released"
    SNOOZED = "snoozed"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between attempts: `base * factor ** n`, at most `cap`, with a random jitter of the share `jitter`.

    Attributes:
        base: Delay before the second attempt.
        factor: By how much each further delay is longer.
        cap: Longest delay.
        jitter: Share of the delay that is random, 0 to 1.
    """

    base: timedelta = timedelta(seconds=2)
    factor: float = 2.0
    cap: timedelta = timedelta(hours=1)
    jitter: float = 0.1


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most `limit` starts within any `period`, over all workers.

    Attributes:
        limit: Number of starts.
        period: Length of the period.
    """

    limit: int
    period: timedelta


@dataclass(frozen=True, slots=True)
class Options:
    """How the jobs of a type are delivered, retried and limited.

    Attributes:
        delivery: `at_least_once` retries a job; `at_most_once` starts it at most once, whatever crashes.
        max_attempts: Maximum number of attempts before a job counts as failed; None: 5, or 1 for `at_most_once`.
        concurrency: Maximum number of jobs in flight over all workers; None: no limit, 0: paused.
        visibility_timeout: How long a claimed job belongs to its worker.
        time_limit: How long a handler may run; None: nine tenths of the visibility timeout.
        backoff: Delays between attempts.
        rate_limit: Maximum number of starts in a period; None: no limit.
        keep_result: Whether the value that the handler returns is kept.
        encrypted: Whether payloads, results, progress and errors are stored encrypted, with the keys of the application.
        max_waiting: Maximum number of jobs that wait, ready or deferred; an enqueue beyond it raises `QueueFull`. None: no limit.
        docs_url: Address of the documentation of the type, for people who look at its jobs: `https://...`.
        owner: Who answers for the type: a team, an address.
    """

    delivery: Delivery = Delivery.AT_LEAST_ONCE
    max_attempts: int | None = None
    concurrency: int | None = None
    visibility_timeout: timedelta = timedelta(minutes=5)
    time_limit: timedelta | None = None
    backoff: Backoff = field(default_factory=Backoff)
    rate_limit: RateLimit | None = None
    keep_result: bool = False
    encrypted: bool = False
    max_waiting: int | None = None
    docs_url: str | None = None
    owner: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The options in the form that the SQL functions accept."""
        once = self.delivery == Delivery.AT_MOST_ONCE
        return {
            "delivery_strategy": str(self.delivery),
            "max_attempts": self.max_attempts if self.max_attempts is not None else (1 if once else 5),
            "concurrency": self.concurrency,
            "visibility_timeout": _interval(self.visibility_timeout),
            "time_limit": _interval(self.time_limit),
            "backoff_base": _interval(self.backoff.base),
            "backoff_factor": self.backoff.factor,
            "backoff_cap": _interval(self.backoff.cap),
            "backoff_jitter": self.backoff.jitter,
            "rate_limit": self.rate_limit.limit if self.rate_limit else None,
            "rate_period": _interval(self.rate_limit.period) if self.rate_limit else None,
            "keep_result": self.keep_result,
            "max_waiting": self.max_waiting,
            # A declaration turns encryption on, and never off.
            **({"encrypted": True} if self.encrypted else {}),
        }


def _interval(span: timedelta | None) -> str | None:
    return None if span is None else f"{span.total_seconds():.6f} seconds"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of a pool beyond those of its job type.

    Attributes:
        slots: Number of parts into which the keys are divided, and of the workers that a pool can keep busy. It can grow later.
        assignor: "sticky" moves the fewest slots; "jump" orders the workers by age; "custom" applies a rule of the application.
        on_retry: "block": a job that waits for its retry blocks its key; "skip": later jobs of the key run before it.
        key_concurrency: Maximum number of jobs of one key at once; more than 1 means no order among them.
        key_rate: Maximum number of starts of one key in a period; None: no limit.
        weights: Quantum of each key that gets more than one job in its turn.
        key_max_waiting: Maximum number of jobs of one key that wait, ready or deferred; an enqueue beyond it raises `QueueFull`.
            None: no limit.
        prefetch_per_key: Maximum number of jobs of one key that a worker claims at once. After a crash, jobs whose results were
            not written run again, in order; with 1, a job starts only when the result of the one before it is written.
    """

    slots: int = 256
    assignor: Literal["sticky", "jump", "custom"] = "sticky"
    on_retry: Literal["block", "skip"] = "block"
    key_concurrency: int = 1
    key_rate: RateLimit | None = None
    weights: Mapping[str, int] = field(default_factory=dict)
    prefetch_per_key: int = 500
    key_max_waiting: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The options in the form that the SQL function accepts."""
        return {
            "slots": self.slots,
            "assignor": self.assignor,
            "on_retry": self.on_retry,
            "key_concurrency": self.key_concurrency,
            "key_rate_limit": self.key_rate.limit if self.key_rate else None,
            "key_rate_period": _interval(self.key_rate.period) if self.key_rate else None,
            "key_max_waiting": self.key_max_waiting,
            "weights": dict(self.weights),
        }


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job of a bulk enqueue.

    Attributes:
        data: Payload: JSON, or a value of the job type's payload type.
        id: Identity of the job; a repeated enqueue of the same id is the same job. None: a new UUIDv7.
        key: Key of the job (a tenant, an account).
        priority: -100 to 100, lower first, within a type.
        run_after: Earliest start: a time, or a timedelta from now by the database's clock.
        expires_at: Time after which a job that has not started is archived as expired: a time, or a timedelta from now.
        unique: Coalescing key: while a job of the type with this key is queued, an enqueue returns that job.
        max_attempts: Maximum number of attempts of this job; None: that of its type.
        time_limit: How long its handler may run, at most the visibility timeout; None: the time limit of its type.
        unique_for: How long the job holds its unique key from the enqueue on, also when it has ended; it always holds the key
            while it waits or runs. None: it holds the key while it is queued.
    """

    data: Any = field(default_factory=dict)
    id: UUID | str | None = None
    key: str | None = None
    priority: int = 0
    run_after: datetime | timedelta | None = None
    expires_at: datetime | timedelta | None = None
    unique: str | None = None
    max_attempts: int | None = None
    time_limit: timedelta | None = None
    unique_for: timedelta | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The options that it has in place of those of its type."""
        return {name: value for name in OWN_OPTIONS if (value := getattr(self, name)) is not None}


class KeyedJobOptions(TypedDict, total=False):
    """Options of one job of a pool, whose key is an argument. `NewJob` says what each means."""

    id: UUID | str | None
    run_after: datetime | timedelta | None
    expires_at: datetime | timedelta | None
    unique: str | None
    max_attempts: int | None
    time_limit: timedelta | None
    unique_for: timedelta | None


class NewJobOptions(KeyedJobOptions, total=False):
    """Options of one job, the keyword arguments of every call that enqueues one. `NewJob` says what each means."""

    key: str | None
    priority: int


OWN_OPTIONS: Mapping[str, type] = {"max_attempts": int, "time_limit": timedelta, "unique_for": timedelta}
"""The options of a job that travel in one document, `p_options` of penstock.enqueue_many, with their types."""

OWN_FIELDS = {name: f"{name}_s" if kind is timedelta else name for name, kind in OWN_OPTIONS.items()}
"""The same options, and their names over HTTP, where spans are numbers of seconds."""


class Enqueued(NamedTuple):
    """The receipt of an enqueue.

    Each job of a bulk enqueue has one: a tuple is made several times as fast as a frozen dataclass.

    Attributes:
        id: Id of the job; of the queued job when coalesced.
        admission: What the enqueue did.
    """

    id: UUID
    admission: Admission


class ClaimedJob(NamedTuple):
    """A job as a claim returns it. Times are by the database's clock, `data` is JSON text.

    This and `Settlement` are tuples, since each job needs one of both: a frozen dataclass takes several times as long to make.
    """

    id: UUID
    name: str
    attempt: int
    max_attempts: int
    priority: int
    key: str | None
    data: str
    created_at: datetime
    run_after: datetime
    seq: int
    lease: int
    lease_s: float
    time_limit_s: float | None = None
    snoozes: int = 0


class Settlement(NamedTuple):
    """The result of one attempt, on its way to the database."""

    id: UUID
    attempt: int
    lease: int
    outcome: Outcome
    detail: str | None = None
    retry_after: timedelta | None = None
    name: str = ""  # name of the job type, for the log and the metrics
    written: bool = False  # the job is finished: its handler's own transaction wrote that
    key: str | None = None  # for the log, of results that it shows


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
        run_after: Earliest start.
        expires_at: Time at which it expires unless it has started, or None.
        started_at: Start of its latest attempt, or None.
        finished_at: Time of its end, or None.
        worker: Id of the worker of its latest attempt, or None.
        errors: One object for each failed attempt, oldest first.
        result: Value that the handler returned, when the type keeps results.
        progress: Last progress that the handler reported.
        replay_of: Id of the job that this one repeats, or None.
        cancel_requested_at: Time at which its cancellation was requested, or None.
        reason: Why the job ended where its status does not say it: `quarantined` when no worker can read it or it kills its
            workers.
        replayed_by: Ids of the jobs that repeat this one.
        time_limit: The job's own time limit; None: that of its type.
        snoozes: How often its handler put it off.
        log: The newest lines that its handler logged; lists of jobs leave it out.
        encrypted: Whether documents of it (data, result, progress, errors) are stored encrypted. In the place of a document for
            which the reader has no key stands the text "encrypted"; an error then has its type, and this text as its message.
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


@dataclass(frozen=True, slots=True)
class Why:
    """Why a job waits: the first condition that must change before it can start.

    Attributes:
        reason: Machine-readable reason: `deferred`, `retry`, `snoozed`, `expired`, `paused`, `no-worker` (no live worker has its
            type), `no-key` (it is encrypted, and no live worker has its key), `quarantined-key`, `paused-key`, `unplaced`,
            `moving`, `key-alone`, `key-retry`, `key-snoozed`, `key-busy`, `key-rate`, `alone` (to run alone after crashes),
            `concurrency`, `rate`, `behind`, `ready`; of a job that does not wait `running` or `finished`.
        message: A sentence for people.
        since: Time at which the reason began, where that is known.
        until: Time at which the reason ends by itself, where that is known.
        by_job: Job that holds its key.
        worker: Worker, or member of the pool, that holds it or its key.
        used: Number of places of the limit that are taken.
        most: Number of places of the limit.
        ahead: Number of jobs in front of it, at most 1,000.
        expires_at: Time at which it expires unless it has started.
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
    by_job: Annotated[JobId | None, Field(description="The job that holds its key.")]
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
        "updated_at": _AT, "encrypted": False, "encrypted_at": None, "max_waiting": None,
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

    @property
    def options(self) -> Options:
        """The options of the job type, in the form in which an application declares them."""
        limit, period = self.rate_limit, self.rate_period
        return Options(
            delivery=self.delivery_strategy,
            max_attempts=self.max_attempts,
            concurrency=self.concurrency,
            visibility_timeout=self.visibility_timeout,
            time_limit=self.time_limit,
            backoff=Backoff(self.backoff_base, self.backoff_factor, self.backoff_cap, self.backoff_jitter),
            rate_limit=None if limit is None or period is None else RateLimit(limit, period),
            keep_result=self.keep_result,
            encrypted=self.encrypted,
            max_waiting=self.max_waiting,
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


def make_id() -> UUID:
    """A new UUIDv7 of the database driver's own class, which is several times as fast to make and to send as `uuid.UUID`."""
    return asyncpg.pgproto.pgproto.UUID(uuid_utils.uuid7().bytes)
