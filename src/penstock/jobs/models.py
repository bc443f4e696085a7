"""Jobs on their way: what an enqueue takes and returns, what a claim returns, and the result of an attempt. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypedDict
from uuid import UUID

import asyncpg.pgproto.pgproto
import uuid_utils

from penstock.core.checks import check_names
from penstock.errors import Conflict, InvalidInput
from penstock.jobs.records import parse_id

Executor = Literal["auto", "thread", "process"]
When = Literal["succeeded", "finished"]


class HasId(Protocol):
    """What has an id, such as a job group."""

    @property
    def id(self) -> UUID:
        """Its id."""


JobReference: TypeAlias = "UUID | str | HasId"
"""A job, or a job group: its id, the receipt of its enqueue, or the group."""

GroupReference: TypeAlias = "UUID | HasId"
"""A job group, or its id."""


class EnqueueOutcome(enum.StrEnum):
    """What an enqueue did with a job.

    Attributes:
        QUEUED: It is queued.
        DUPLICATE: A job with its id is queued or running already.
        COALESCED: A job with its unique key is queued already.
        ARCHIVED: A job with its id is finished already.
        WAITING: It waits for the jobs after which it is to run.
        TAKEN: Its id is that of a job of another type, and it is not enqueued. A call for one job raises `Conflict` instead.
    """

    QUEUED = "queued"
    DUPLICATE = "duplicate"
    COALESCED = "coalesced"
    ARCHIVED = "archived"
    WAITING = "waiting"
    TAKEN = "taken"


class Outcome(enum.StrEnum):
    """Outcome of an attempt, as a worker reports it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    FAILED_FOR_GOOD = "failed-for-good"
    QUARANTINED = "quarantined"
    CANCELLED = "cancelled"
    RELEASED = "released"
    SNOOZED = "snoozed"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job of a bulk enqueue.

    Attributes:
        data: Payload: JSON, or a value of the job type's payload type.
        id: Identity of the job; a repeated enqueue of the same id is the same job. None: a new UUIDv7.
        key: Key of the job (a tenant, an account).
        priority: -100 to 100, lower first, within a type.
        run_after: Earliest start: a time, or a timedelta from now by the database's clock.
        expires_at: Time after which no worker gets it: a job that waits then, also for a retry or in one of its steps, is
            archived as expired. A time, or a timedelta from now.
        unique: Coalescing key: while a job of the type with this key is queued, an enqueue returns that job.
        max_attempts: Maximum number of attempts of this job; None: that of its type.
        time_limit: How long its handler may run, at most the visibility timeout; None: the time limit of its type.
        unique_for: How long the job holds its unique key from the enqueue on, also when it has ended; it always holds the key
            while it waits or runs. None: it holds the key while it is queued.
        after: Jobs for which it waits, at most 100: ids, or receipts of an enqueue; one, or a sequence. When one of them does not
            succeed, it is cancelled with the reason `dependency`. None: it waits for none.
        when: "finished": it runs when those jobs have ended, however they ended. None and "succeeded": when they have succeeded.
        group: Job group of which it is a child: the group, or its id. None: it is in none.
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
    after: JobReference | Sequence[JobReference] | None = None
    when: When | None = None
    group: GroupReference | None = None

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
    after: JobReference | Sequence[JobReference] | None
    when: When | None
    group: GroupReference | None


class NewJobOptions(KeyedJobOptions, total=False):
    """Options of one job, the keyword arguments of every call that enqueues one. `NewJob` says what each means."""

    key: str | None
    priority: int


def new_job(name: str, data: Any, options: KeyedJobOptions, key: str | None = None) -> NewJob:
    """A job of a type with this payload, these options and, in a pool, this key. Raises `InvalidInput` for an unknown option."""
    check_names(f"a job of {name}", options, NewJobOptions.__annotations__)
    return NewJob(data, **options) if key is None else NewJob(data, key=key, **options)


OWN_OPTIONS: Mapping[str, type] = {
    "max_attempts": int,
    "time_limit": timedelta,
    "unique_for": timedelta,
    "after": list,
    "when": str,
    "group": UUID,
}
"""The options of a job that travel in one document, `p_options` of penstock.enqueue_many, with their types."""


MOST_AFTER = 100
"""For how many jobs a job can wait; `penstock.checked_after` has the same number."""


OWN_FIELDS = {name: f"{name}_s" if kind is timedelta else name for name, kind in OWN_OPTIONS.items()}
"""The same options, and their names over HTTP, where spans are numbers of seconds."""


class Enqueued(NamedTuple):
    """The receipt of an enqueue.

    Each job of a bulk enqueue has one: a tuple is made several times as fast as a frozen dataclass.

    Attributes:
        id: Id of the job; of the queued job when coalesced.
        outcome: What the enqueue did.
    """

    id: UUID
    outcome: EnqueueOutcome


def jobs_after(given: Any) -> list[UUID]:
    """The ids of the jobs that `after` names: ids or receipts, one or several. Raises `InvalidInput`."""
    jobs = [given] if isinstance(given, (UUID, str)) or hasattr(given, "id") else given
    if not isinstance(jobs, Sequence) or not jobs:
        raise InvalidInput(f"after names no job: {given!r:.100}", hint="Give ids or receipts of jobs: after=[pdf, invoice].")
    return list(dict.fromkeys(parse_id(job if isinstance(job, (UUID, str)) else getattr(job, "id", "")) for job in jobs))


def group_id(given: Any, what: str = "group") -> UUID:
    """The id of the job group that the option `what` names. Raises `InvalidInput`."""
    id = getattr(given, "id", given)
    if not isinstance(id, UUID):
        raise InvalidInput(
            f"{what} must be a job group, or its id, not {given!r:.100}",
            hint="Open it, async with app.job_group(...) as group, or find it by its name: await app.find_group(name).",
        )
    return id


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
    traceparent: str | None = None  # trace context of its producer


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
    trace_id: str | None = None  # likewise


def make_id() -> UUID:
    """A new UUIDv7 of the database driver's own class, which is several times as fast to make and to send as `uuid.UUID`."""
    return asyncpg.pgproto.pgproto.UUID(uuid_utils.uuid7().bytes)


def the_only(receipts: Sequence[Enqueued]) -> Enqueued:
    """The receipt of a call that enqueued one job. Raises `Conflict` when its id is that of a job of another type."""
    [receipt] = receipts
    if receipt.outcome is EnqueueOutcome.TAKEN:
        raise Conflict(
            f"the id {receipt.id} belongs to another job",
            hint="Every job needs an id of its own. Leave the id out to get a new one.",
        )
    return receipt
