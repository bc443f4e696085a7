"""One typed function for each SQL function that only the dashboard calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.core.tracing import trace_id_of
from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session as it is stored. `types` None: all job types; `proof` None: there is nothing to compare."""

    user: str
    role: str
    types: list[str] | None
    proof: bytes | None
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class Change:
    """A change that a user made through the dashboard. `ended_at` None: it is not known whether it was made."""

    id: int
    at: datetime
    user: str
    action: str
    filter: dict[str, Any]
    ended_at: datetime | None
    changed: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class JobSearch:
    """The conditions of a search, all of which a job has to meet. None: it is no condition.

    Attributes:
        names: Job types.
        status: Status.
        key: Key.
        since: Enqueued, of finished jobs finished, not before.
        until: Enqueued, of finished jobs finished, before.
        worker: Id of the worker of the last attempt.
        error: Type of the last error, or a part of its message; of finished jobs also its signature.
        path: A field of the payload.
        value: Its value as text.
        group: Id of the job group of which it is a child.
    """

    names: tuple[str, ...] | None = None
    status: str | None = None
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    worker: str | None = None
    error: str | None = None
    path: tuple[str, ...] | None = None
    value: str | None = None
    group: UUID | None = None

    def only(self, names: Sequence[str] | None) -> JobSearch:
        """The same search within these job types; None: within all."""
        if names is None:
            return self
        wanted = names if self.names is None else [name for name in self.names if name in names]
        return replace(self, names=tuple(wanted))


@dataclass(frozen=True, slots=True)
class SearchPage:
    """What a search found.

    Attributes:
        ids: Ids of the jobs, latest first.
        place: Where the next call goes on; None: there are no more.
        until: Time of the last job that was looked at; None: all were.
    """

    ids: list[UUID]
    place: str | None
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Named:
    """A job or a job group: the id, and of a group the name."""

    id: UUID
    name: str | None


@dataclass(frozen=True, slots=True)
class StepOfRun:
    """The step of a run of a workflow that a job is, or is one of the jobs of."""

    name: str
    workflow: str
    run: Named


@dataclass(frozen=True, slots=True)
class SignalledStep:
    """A step of a run whose handler waits for a signal, since `at`, until `due` (None: for ever)."""

    step: str
    job: UUID
    signal: str
    encrypted: bool
    at: datetime
    due: datetime | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The job group of which a job is a child, the step that it is, and the id of its trace. None: it has none."""

    group: Named | None
    step: StepOfRun | None
    trace_id: str | None


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """The failures of one cause in one job type, of those that were looked at.

    Attributes:
        name: Job type.
        signature: Signature of their last errors.
        failures: How many.
        first_at: When the first one failed that the archive still has.
        last_at: When the last one failed.
        trend: Their number in each of some equal parts of the time that was looked at, oldest first.
        type: Type of the last error, of the newest of them.
        message: The beginning of its message.
        reason: Why it ended, where the status does not say it.
        versions: Versions of the code in which the newest ones failed, as far as they are known.
        examples: The newest ones.
        looked: How many failures of all groups were looked at.
        until: How far back; None: all that the archive has.
    """

    name: str
    signature: str
    failures: int
    first_at: datetime
    last_at: datetime
    trend: list[int]
    type: str | None
    message: str | None
    reason: str | None
    versions: list[str] | None
    examples: list[UUID]
    looked: int
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Mute:
    """Since when failures are muted, and who did it."""

    at: datetime
    by: str


@dataclass(frozen=True, slots=True)
class PastLoad:
    """The finished jobs of a type in a period.

    Attributes:
        name: Job type.
        succeeded: Number of jobs that succeeded.
        failed: Number of jobs that failed.
        expired: Number of jobs that expired.
        cancelled: Number of jobs that were cancelled.
        retries: Number of attempts beside the first ones.
        delay_s: Sum of the queueing delays.
        run_s: Sum of the run times.
        delay_p95: The 95th percentile of the delays in the worst minute.
        run_p95: The 95th percentile of the run times in the worst minute.
        parts: Number of jobs in each of 24 equal parts of the period.
    """

    name: str
    succeeded: int
    failed: int
    expired: int
    cancelled: int
    retries: int
    delay_s: float | None
    run_s: float | None
    delay_p95: float | None
    run_p95: float | None
    parts: list[int]

    @property
    def finished(self) -> int:
        """Number of jobs that ran to their end."""
        return self.succeeded + self.failed


async def open_session(
    database: Database, id: bytes, user: str, role: str, types: Sequence[str] | None, proof: bytes | None, lasts: timedelta,
    *, single_use: bool = False,
) -> None:  # fmt: skip
    """Store the session of a login, or a link that logs a user in."""
    await database.fetch(
        "select penstock.open_session($1, $2, $3, $4, $5, $6, $7)", id, user, role, types, proof, lasts, single_use
    )


async def find_session(database: Database, id: bytes) -> StoredSession | None:
    """The session with this id, unless it has ended."""
    row = await database.fetchrow("select * from penstock.find_session($1)", id)
    return None if row is None else StoredSession(*tuple(row))


async def use_link(database: Database, id: bytes) -> StoredSession | None:
    """Use up a link. None: it was used, or has ended."""
    row = await database.fetchrow("select * from penstock.use_link($1)", id)
    return None if row is None else StoredSession(row["user_name"], row["role"], row["types"], None, row["expires_at"])


async def close_session(database: Database, id: bytes) -> bool:
    """Log out. Returns whether there was such a session."""
    return bool(await database.fetchval("select penstock.close_session($1)", id, retry=False))


async def list_changes(database: Database, before: int | None = None, limit: int = 100) -> list[Change]:
    """The audit, latest first."""
    rows = await database.fetch("select * from penstock.list_changes($1, $2)", before, limit)
    return [
        Change(
            row["id"], row["at"], row["user_name"], row["action"],
            orjson.loads(row["filter"]) if isinstance(row["filter"], str) else row["filter"],
            row["ended_at"], row["changed"], row["error"],
        )
        for row in rows
    ]  # fmt: skip


async def search(
    database: Database, wanted: JobSearch, *, finished: bool, after: str | None = None, limit: int = 50, most: int = 20_000
) -> SearchPage:
    """Jobs that meet the conditions, of the next `most` behind the place `after`: finished ones, or those that are not."""
    function = "search_finished" if finished else "search_waiting"
    rows = await database.fetch(
        f"select * from penstock.{function}($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",  # noqa: S608 - one of two names
        wanted.names, wanted.status, wanted.key, wanted.since, wanted.until, wanted.worker, wanted.error, wanted.path,
        wanted.value, after, limit, most, wanted.group,
    )  # fmt: skip
    found = [row["id"] for row in rows if row["found"]]
    last = rows[-1] if rows else None
    if last is None or (last["found"] and len(found) < limit):
        return SearchPage(found, None, None)
    return SearchPage(found, last["place"], None if last["found"] else last["at"])


async def surroundings_of(database: Database, job: UUID) -> Surroundings:
    """The job group, the run and the trace of a job, whether it waits, runs or has ended."""
    row = await database.fetchrow(
        """
        select job_group.id, job_group.name, job.traceparent, step.name as step, run.id as run, run.name as run_name, run.graph
        from (
            select workflow, options ->> 'traceparent' as traceparent from penstock.queued_jobs where id = $1
            union all
            select workflow, options ->> 'traceparent' from penstock.waiting_jobs where id = $1
            union all
            select workflow, options ->> 'traceparent' from penstock.archived_jobs where id = $1
        ) as job
        left join penstock.job_groups as job_group on job_group.id = job.workflow
        -- Runs that share the step are left out: that in which it ran has it as its own.
        left join penstock.graph_steps as step on step.job in ($1, job.workflow) and not step.shared
        left join penstock.job_groups as run on run.id = step.run
        limit 1
        """,
        job,
    )
    if row is None:
        return Surroundings(None, None, None)
    return Surroundings(
        None if row["id"] is None else Named(row["id"], row["name"]),
        None if row["run"] is None else StepOfRun(row["step"], row["graph"], Named(row["run"], row["run_name"])),
        trace_id_of(row["traceparent"]),
    )


async def signalled_steps(database: Database, run: UUID, limit: int) -> list[SignalledStep]:
    """The first steps of a run whose handlers wait for signals, of those that are one job."""
    rows = await database.fetch(
        """
        select step.name, job.id, job.waits_for, type.encrypted, wait.at, wait.due
        from penstock.graph_steps as step
        join penstock.queued_jobs as job on job.id = step.job
        join penstock.jobs as type on type.name = job.name
        join penstock.job_steps as wait on wait.job = job.id and wait.name = job.waits_for and wait.kind = 'wait'
        where step.run = $1 and step.jobs is null and not step.shared
            and job.status = 'queued' and job.run_after > penstock.clock()
        order by step.place
        limit $2
        """,
        run,
        limit,
    )
    return [SignalledStep(*row) for row in rows]


async def awaited_by(database: Database, jobs: Sequence[UUID]) -> dict[UUID, list[Named]]:
    """What each of these waiting jobs still waits for."""
    rows = await database.fetch(
        """
        select dependency.job, dependency.after, job_group.name
        from penstock.job_dependencies as dependency
        left join penstock.job_groups as job_group on job_group.id = dependency.after
        where dependency.job = any ($1)
        order by dependency.id
        """,
        jobs,
    )
    found: dict[UUID, list[Named]] = {}
    for row in rows:
        found.setdefault(row["job"], []).append(Named(row["after"], row["name"]))
    return found


async def named_groups(database: Database, ids: Sequence[UUID]) -> dict[UUID, str]:
    """The names of those of these ids that are job groups."""
    rows = await database.fetch("select id, name from penstock.job_groups where id = any ($1)", ids)
    return {row["id"]: row["name"] for row in rows}


async def groups_in(database: Database, parent: UUID, limit: int = 100) -> list[Named]:
    """The job groups that are children of a group, in the order in which they were opened."""
    rows = await database.fetch(
        "select id, name from penstock.job_groups where parent = $1 order by created_at, id limit $2", parent, limit
    )
    return [Named(row["id"], row["name"]) for row in rows]


async def failure_groups(
    database: Database, names: Sequence[str] | None = None, since: datetime | None = None, limit: int = 100
) -> list[FailureGroup]:
    """The jobs that failed, by the signature of their last error, the largest groups first."""
    rows = await database.fetch("select * from penstock.failure_groups($1, $2, $3)", names, since, limit)
    return [FailureGroup(*tuple(row)) for row in rows]


async def mute_failures(database: Database, name: str, signature: str, user: str) -> bool:
    """Mute the failures of a job type with this signature. Returns whether they were not. Raises `InvalidInput`, `Conflict`."""
    return bool(await database.fetchval("select penstock.mute_failures($1, $2, $3)", name, signature, user))


async def unmute_failures(database: Database, name: str, signature: str) -> bool:
    """Take a mute back. Returns whether there was one."""
    return bool(await database.fetchval("select penstock.unmute_failures($1, $2)", name, signature))


async def muted_failures(database: Database) -> dict[tuple[str, str], Mute]:
    """What is muted, by job type and signature."""
    rows = await database.fetch("select name, signature, muted_at, muted_by from penstock.muted_failures")
    return {(row["name"], row["signature"]): Mute(row["muted_at"], row["muted_by"]) for row in rows}


async def history_of(
    database: Database, lake: str, since: datetime, until: datetime, names: Sequence[str] | None = None
) -> list[PastLoad]:
    """The finished jobs of a period by type, the types that ran longest first."""
    rows = await database.fetch("select * from penstock.history_of($1, $2, $3, $4)", lake, since, until, names)
    return [PastLoad(*tuple(row)) for row in rows]
