"""One typed function for each SQL function that only the HTTP API calls. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from penstock.core.encryption import ENCRYPTED, Keyring, is_envelope, opened_entry
from penstock.core.serialization import dump_json, load_json
from penstock.core.signatures import signed_in_slices
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.queries import JobColumns, enqueue_arguments
from penstock.jobs.records import JobTypeRecord, Status, reached
from penstock.jobs.type_queries import job_type_of
from penstock.postgres.database import Database, in_parts

_NO_KEYS = Keyring()


@dataclass(frozen=True, slots=True)
class Put:
    """The result of one job of a put. `name` is None for an archived job; `data` is JSON text, None when it is as given."""

    outcome: EnqueueOutcome
    id: UUID
    name: str | None
    attempt: int
    max_attempts: int
    run_after: datetime
    expires_at: datetime | None
    created_at: datetime
    updated_at: datetime
    status: str
    data: str | None

    @property
    def attempts_left(self) -> int:
        """Number of attempts that are left, the present one included, as Rickover counts."""
        return self.max_attempts - self.attempt + 1


@dataclass(frozen=True, slots=True)
class Callback:
    """A downstream service's report of an attempt, which it names by the number of attempts that are left.

    `outcome` is succeeded, failed or failed-for-good; `detail` is JSON text.
    """

    name: str
    id: UUID
    attempts_left: int
    outcome: str
    detail: str | None = None


class SettledAttempt(NamedTuple):
    """What became of a callback: succeeded, retried, failed, cancelled, stale or unknown.

    `wait_s` and `run_s`: from when the job could run to its claim, and from there to the callback; None: it was not claimed.
    """

    outcome: str
    wait_s: float | None
    run_s: float | None


class Held(NamedTuple):
    """A job that is not finished: its type, how long it waited for its claim, and since when it runs; None: it is not claimed."""

    name: str
    wait_s: float | None
    run_s: float | None


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job as it is stored, queued or archived. JSON remains text, so that no parser rounds its numbers."""

    id: UUID
    name: str
    status: Status
    attempt: int
    max_attempts: int
    priority: int
    key: str | None
    unique: str | None
    data: str
    created_at: datetime
    run_after: datetime
    expires_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    errors: str | None
    result: str | None
    progress: str | None
    replay_of: UUID | None
    cancel_requested_at: datetime | None
    reason: str | None
    replayed_by: list[UUID]
    time_limit_s: float | None
    snoozes: int
    log: str | None
    encrypted: bool
    after: list[UUID]
    when: str
    workflow: UUID | None
    updated_at: datetime

    @property
    def not_before(self) -> datetime | None:
        """See `JobRecord.not_before`."""
        return reached(self.run_after)

    @property
    def attempts_left(self) -> int:
        """Number of attempts that are left, as Rickover counts: it does not count the last attempt of a job that failed."""
        return self.max_attempts - self.attempt + (not self.status.finished or self.status is Status.SUCCEEDED)


@dataclass(frozen=True, slots=True)
class Rates:
    """Jobs per second of one type over the last minute."""

    name: str
    enqueued_per_s: float
    finished_per_s: float
    failed_per_s: float


async def put_jobs(database: Database, batch: JobColumns) -> list[Put]:
    """Enqueue a batch and return each job as it is stored, in order."""
    rows = await database.fetch(
        "select * from penstock.put_jobs($1, $2::jsonb[], $3::uuid[], $4, $5::smallint[], $6, $7, $8, $9::jsonb[])",
        *enqueue_arguments(batch),
        batch.options_text,
    )
    return [Put(EnqueueOutcome(row[1]), *tuple(row)[2:]) for row in rows]


def put_of(outcome: EnqueueOutcome, job: StoredJob) -> Put:
    """A stored job in the place of the one that was enqueued."""
    return Put(
        outcome,
        job.id,
        job.name,
        job.attempt,
        job.max_attempts,
        job.run_after,
        job.expires_at,
        job.created_at,
        job.updated_at,
        job.status,
        job.data,
    )


async def settle_attempts(database: Database, callbacks: Sequence[Callback]) -> list[SettledAttempt]:
    """Settle jobs by the attempts left. Returns what became of each, in order."""
    errors = await signed_in_slices([None if one.outcome == "succeeded" else one.detail for one in callbacks])
    details = [one.detail if one.outcome == "succeeded" else error for one, error in zip(callbacks, errors, strict=True)]
    rows = await database.fetch(
        "select outcome, wait_s, run_s from penstock.settle_attempts($1, $2, $3::smallint[], $4, $5::jsonb[]) order by ordinal",
        [callback.name for callback in callbacks],
        [callback.id for callback in callbacks],
        [callback.attempts_left for callback in callbacks],
        [callback.outcome for callback in callbacks],
        details,
    )
    return [SettledAttempt(*row) for row in rows]


async def leave_to_callback(database: Database, jobs: Sequence[tuple[UUID, int, int]]) -> int:
    """Leave jobs (id, attempt, lease) to their callbacks. Returns how many still belonged to the caller."""
    ids, attempts, leases = [list(column) for column in zip(*jobs, strict=True)] if jobs else ([], [], [])
    return int(
        await database.fetchval("select penstock.leave_to_callback($1, $2::smallint[], $3::bigint[])", ids, attempts, leases)
    )


async def stored_jobs(database: Database, ids: Sequence[UUID], *, log: bool = False) -> dict[UUID, StoredJob]:
    """The stored jobs with these ids, with or without the lines of their logs; unknown ids are left out."""
    found: dict[UUID, StoredJob] = {}
    for row in await database.fetch("select * from penstock.stored_jobs($1, $2)", ids, log):
        values = list(row)
        values[2] = Status(values[2])
        stored = StoredJob(*values)
        found[row["id"]] = hidden(stored) if stored.encrypted else stored
    return found


def hidden(job: StoredJob) -> StoredJob:
    """A job with the word "encrypted" in the place of each encrypted document, since the server needs no key."""
    return replace(
        job,
        data=hidden_text(job.data) or "null",
        errors=hidden_text(job.errors),
        result=hidden_text(job.result),
        progress=hidden_text(job.progress),
        log=hidden_text(job.log, "line"),
    )


def hidden_text(text: str | None, word: str = "message") -> str | None:
    """JSON text with the word "encrypted" in the place of an envelope; in errors, as the field `word` of what has one."""
    if text is None or '"penstock"' not in text:
        return text
    value = load_json(text)
    if isinstance(value, list):
        return dump_json([opened_entry(_NO_KEYS, b"", one, word) for one in value], "errors")
    if isinstance(value, dict) and "type" in value:
        return dump_json(opened_entry(_NO_KEYS, b"", value, word), "an error")
    return f'"{ENCRYPTED}"' if is_envelope(value) else text


def hidden_step(text: str | None) -> str | None:
    """The result of a step of an encrypted job, or a signal, as JSON text: the word "encrypted" in the place of an envelope."""
    return f'"{ENCRYPTED}"' if text is not None and is_envelope(load_json(text)) else text


async def attempts_of(database: Database, ids: Sequence[UUID]) -> dict[UUID, tuple[int, int | None]]:
    """Attempt and lease of the jobs that are not finished."""
    found: dict[UUID, tuple[int, int | None]] = {}
    for some in in_parts(ids):
        rows = await database.fetch("select * from penstock.attempts_of($1)", some)
        found |= {row["id"]: (row["attempt"], row["lease"]) for row in rows}
    return found


async def page_of_jobs(
    database: Database,
    *,
    archived: bool,
    names: Sequence[str] | None = None,
    status: str | None = None,
    key: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    limit: int = 100,
    before: tuple[datetime, UUID] | None = None,
    reason: str | None = None,
    workflow: UUID | None = None,
) -> list[tuple[UUID, datetime]]:
    """Ids and times of one page of jobs, latest first."""
    rows = await database.fetch(
        "select * from penstock.page_of_jobs($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        archived,
        names,
        status,
        key,
        since,
        until,
        limit,
        *(before or (None, None)),
        reason,
        workflow,
    )
    return [(row["id"], row["at"]) for row in rows]


async def job_rates(database: Database, over: timedelta = timedelta(minutes=1)) -> dict[str, Rates]:
    """Rates of each job type."""
    return {row["name"]: Rates(*tuple(row)) for row in await database.fetch("select * from penstock.job_rates($1)", over)}


async def names_of(database: Database, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Names of the job types of the jobs that are not finished."""
    rows = await database.fetch("select id, name from penstock.queued_jobs where id = any($1)", ids)
    return {row["id"]: row["name"] for row in rows}


async def held(database: Database, ids: Sequence[UUID]) -> dict[UUID, Held]:
    """The jobs that are not finished, with their times until now."""
    rows = await database.fetch(
        """
        select job.id, job.name,
            extract(epoch from lease.started_at - greatest(penstock.shown_time(job.run_after), job.created_at))::double precision,
            extract(epoch from penstock.clock() - lease.started_at)::double precision
        from penstock.queued_jobs as job
        left join penstock.leases as lease on lease.id = job.lease
        where job.id = any($1)
        """,
        ids,
    )
    return {id: Held(*times) for id, *times in map(tuple, rows)}


@dataclass(frozen=True, slots=True)
class WorkOf:
    """What a worker works on, by name; the consumers as stream/group."""

    names: list[str]
    pools: list[str]
    consumers: list[str]
    schedules: list[str]
    leader_tasks: list[str]


async def work_of(database: Database, id: str) -> WorkOf | None:
    """What a worker works on; None: there is no such worker."""
    row = await database.fetchrow("select names, metadata::text as metadata from penstock.workers where id = $1", id)
    if row is None:
        return None
    told = load_json(row["metadata"])

    def of(kind: str) -> list[str]:
        # A worker says of itself what it likes.
        given = told.get(kind) if isinstance(told, dict) else None
        return [str(name) for name in given if name is not None] if isinstance(given, list) else []

    return WorkOf(list(row["names"]), of("pools"), of("consumers"), of("schedules"), of("leader_tasks"))


async def job_type(database: Database, name: str) -> JobTypeRecord | None:
    """One job type, or None."""
    row = await database.fetchrow("select * from penstock.jobs where name = $1", name)
    return None if row is None else job_type_of(row)
