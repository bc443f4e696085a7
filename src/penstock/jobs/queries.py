"""One typed function for each SQL function about jobs and workers. No logic beyond converting rows to models.

`retry=True` marks calls that a worker's loops repeat until the database is reachable again; all calls here are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import dump_options, load_json, plain_text
from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.jobs.models import (
    Admission,
    ClaimedJob,
    Delivery,
    HandlerRecord,
    JobCounts,
    JobRecord,
    JobTypeRecord,
    LogLine,
    Outcome,
    Settlement,
    Status,
    Why,
)
from penstock.postgres.database import Database, in_parts

# `ClaimedJob._make` takes half as long again.
_new_tuple = tuple.__new__
_SEQ, _LEASE = (itemgetter(ClaimedJob._fields.index(field)) for field in ("seq", "lease"))
_OF_JOB_TYPE = tuple(column.name for column in fields(JobTypeRecord))


@dataclass(frozen=True, slots=True)
class Batch:
    """Jobs of one type as columns, the form in which they travel to the database.

    `data` is JSON text; None instead of a column means the default for all jobs; a timedelta counts from now. `options` has the
    `OWN_OPTIONS` of the jobs that have any, spans in seconds.
    """

    name: str
    ids: Sequence[UUID]
    data: Sequence[str]
    keys: Sequence[str | None] | None = None
    priorities: Sequence[int] | None = None
    run_after: Sequence[datetime | timedelta | None] | None = None
    expires_at: Sequence[datetime | timedelta | None] | None = None
    unique: Sequence[str | None] | None = None
    options: Sequence[Mapping[str, Any] | None] | None = None

    @property
    def options_text(self) -> list[str | None] | None:
        """The options as JSON text."""
        return None if self.options is None else [None if own is None else _dump(own) for own in self.options]


@dataclass(frozen=True, slots=True)
class PlacesWanted:
    """Types at their limit for whose places a worker waits.

    Attributes:
        names: Names of the types.
        is_new: Whether the worker did not wait for one of them before. It then claims once more, since a place may have become
            free in between.
        due_in_s: Seconds until a rate limit admits its next job; None: no rate limit applies.
    """

    names: frozenset[str]
    is_new: bool
    due_in_s: float | None


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim. `horizon` and `ceiling` are transaction numbers, see `penstock.jobs.watermarks`."""

    jobs: list[ClaimedJob]
    horizon: int
    ceiling: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to a heartbeat; `known` is False when the worker was declared dead."""

    known: bool
    cancelled: list[UUID]
    leases: list[int]
    workers: int


async def create_job_type(database: Database, name: str, options: dict[str, Any]) -> JobTypeRecord:
    """Create a job type. Raises `Conflict` when it exists."""
    row = await database.fetchrow(
        "select * from penstock.create_job_type($1, $2::jsonb)", name, dump_options(f"job type {name}", options)
    )
    return job_type_of(row)


async def change_job_type(database: Database, name: str, options: dict[str, Any]) -> JobTypeRecord:
    """Change the given options of a job type. Raises `NotFound`."""
    row = await database.fetchrow(
        "select * from penstock.change_job_type($1, $2::jsonb)", name, dump_options(f"job type {name}", options)
    )
    return job_type_of(row)


async def declare_job_type(database: Database, name: str, options: dict[str, Any], *, retry: bool = False) -> JobTypeRecord:
    """Create a job type, or change it when this declaration differs from the last one."""
    row = await database.fetchrow(
        "select * from penstock.declare_job_type($1, $2::jsonb)", name, dump_options(f"job type {name}", options), retry=retry
    )
    return job_type_of(row)


async def job_types(database: Database, names: Sequence[str] | None = None) -> list[JobTypeRecord]:
    """Job types in the order of their names: these, or all."""
    rows = await database.fetch("select * from penstock.jobs where $1::text[] is null or name = any ($1) order by name", names)
    return [job_type_of(row) for row in rows]


async def note_handlers(database: Database, handlers: Sequence[HandlerRecord]) -> None:
    """Say which handlers a worker has that begins to work."""
    given = [{"kind": h.kind, "name": h.name, "schema": h.schema, "docs_url": h.docs_url, "owner": h.owner} for h in handlers]
    await database.fetch("select penstock.note_handlers($1::jsonb)", orjson.dumps(given).decode(), retry=True)


async def handlers(database: Database) -> list[HandlerRecord]:
    """What workers say of their handlers, by name."""
    rows = await database.fetch("select * from penstock.handler_list()")
    return [
        HandlerRecord(r["kind"], r["name"], None if r["schema"] is None else load_json(r["schema"]), *tuple(r)[3:]) for r in rows
    ]


async def pause(database: Database, name: str) -> None:
    """Pause a job type. Raises `NotFound`."""
    await database.fetch("select penstock.pause($1)", name)


async def resume(database: Database, name: str) -> None:
    """Resume a job type. Raises `NotFound`, and `Conflict` when its concurrency is 0."""
    await database.fetch("select penstock.resume($1)", name)


_ENQUEUE = "select * from penstock.enqueue_many($1, $2::jsonb[], $3::uuid[], $4, $5::smallint[], $6, $7, $8)"
_ENQUEUE_WITH_OPTIONS = _ENQUEUE.removesuffix(")") + ", p_options => $9::jsonb[])"
_ENQUEUE_JSON = "select * from penstock.enqueue_json($1, $2::jsonb) where outcome <> 'queued'"


def enqueue_call(batch: Batch) -> tuple[Any, ...]:
    """The statement that enqueues a batch, and its parameters. `exceptions_by_place` reads its rows."""
    if any(isinstance(time, timedelta) for column in (batch.run_after, batch.expires_at) for time in column or ()):
        return _ENQUEUE_JSON, batch.name, as_json(batch)
    if batch.options is not None:
        return _ENQUEUE_WITH_OPTIONS, *enqueue_arguments(batch), batch.options_text
    return _ENQUEUE, *enqueue_arguments(batch)


def enqueue_arguments(batch: Batch) -> tuple[Any, ...]:
    """A batch as the parameters of `penstock.enqueue_many`, which does not accept intervals; without the options of its jobs."""
    return (
        batch.name,
        batch.data,
        batch.ids,
        batch.keys,
        batch.priorities,
        batch.run_after,
        batch.expires_at,
        batch.unique,
    )


def as_json(batch: Batch) -> str:
    """A batch as the document of `penstock.enqueue_json`, in which a timedelta is a number of seconds."""
    columns = {
        "key": batch.keys,
        "priority": batch.priorities,
        "run_after": batch.run_after,
        "expires_at": batch.expires_at,
        "unique_key": batch.unique,
    }
    documents = []
    for place, (id, data) in enumerate(zip(batch.ids, batch.data, strict=True)):
        document: dict[str, Any] = {"id": str(id), "data": orjson.Fragment(data)}
        for name, values in columns.items():
            if values is not None and values[place] is not None:
                document[name] = values[place]
        if batch.options is not None:
            document.update(batch.options[place] or {})
        documents.append(document)
    return orjson.dumps(documents, default=timedelta.total_seconds).decode()


async def enqueue_many(database: Database, batch: Batch, *, retry: bool = False) -> dict[int, tuple[UUID, Admission]]:
    """Enqueue up to 100,000 jobs. Returns those with another outcome than `queued`, by their place from 0."""
    return exceptions_by_place(await database.fetch(*enqueue_call(batch), retry=retry))


def exceptions_by_place(rows: Sequence[Any]) -> dict[int, tuple[UUID, Admission]]:
    """The rows of `enqueue_call`, by place from 0."""
    return {row["ordinal"] - 1: (row["id"], Admission(row["outcome"])) for row in rows}


_CLAIM = "select * from penstock.claim($1, $2, $3, $4::jsonb, $5)"


async def claim(
    database: Database,
    worker: str,
    names: Sequence[str],
    limit: int,
    watermarks: dict[str, dict[str, int]],
    keys: Sequence[str] | None = None,
) -> Claim:
    """Claim up to `limit` ready jobs of these types, in their order. It is not retried: a lost answer leaves jobs claimed.

    `keys` are the ids of the worker's keys of encrypted payloads; None: it has none, and gets no job of an encrypted type.
    """
    rows = await database.fetch(_CLAIM, worker, names, limit, _dump(watermarks), keys)
    if not rows:
        return Claim([], 0, 0)
    jobs = [_new_tuple(ClaimedJob, row[:14]) for row in rows]
    # The rows of a lease come as they are stored: a released job, whose row is a new version, would start behind later ones.
    several = jobs[0].lease != jobs[-1].lease
    jobs.sort(key=_SEQ)
    if several:
        jobs.sort(key=_LEASE)
    return Claim(await only_readable(database, jobs), rows[0]["horizon"], rows[0]["ceiling"])


async def wait_for_places(
    database: Database, worker: str, names: Sequence[str], watermarks: dict[str, dict[str, int]], channel: str | None = None
) -> PlacesWanted | None:
    """Register the worker for places of those types that are at their limit while jobs are ready. None: no type is."""
    rows = await database.fetch(
        "select * from penstock.wait_for_places($1, $2, $3::jsonb, $4)", worker, names, _dump(watermarks), channel
    )
    if not rows:
        return None
    due = [row["due_in_s"] for row in rows if row["due_in_s"] is not None]
    return PlacesWanted(frozenset(row["name"] for row in rows), any(row["is_new"] for row in rows), min(due, default=None))


async def only_readable(database: Database, claimed: list[ClaimedJob]) -> list[ClaimedJob]:
    """The claimed jobs whose payload was returned. The others, whose payload is too large for any worker, are quarantined."""
    unreadable = [job for job in claimed if job.data is None]
    if not unreadable:
        return claimed
    detail = quarantined("its payload is larger than 4 MiB as text")
    await settle(database, [Settlement(job.id, job.attempt, job.lease, Outcome.QUARANTINED, detail) for job in unreadable])
    return [job for job in claimed if job.data is not None]


async def quarantine_unreadable(database: Database, worker: str, names: Sequence[str], known: Callable[[], Sequence[int]]) -> int:
    """Quarantine unreadable jobs, after a claim that failed, or whose answer could not be read, because of one of its jobs.

    Jobs that the worker holds without knowing are read one by one; those that can be read remain for `release_unknown`.

    Returns the number of quarantined jobs.
    """
    done = int(await database.fetchval("select penstock.quarantine_unreadable($1)", names))
    for held in await database.fetch("select * from penstock.held_jobs($1, $2::bigint[])", worker, known()):
        try:
            row = await database.fetchrow("select * from penstock.read_held($1, $2)", worker, held["id"])
            problem = "its payload is larger than 4 MiB as text" if row is not None and row["data"] is None else None
        except DatabaseUnavailable:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            given = Settlement(held["id"], held["attempt"], held["lease"], Outcome.QUARANTINED, quarantined(problem))
            await settle(database, [given])
            done += 1
    return done


def quarantined(problem: str) -> str:
    """The error of a quarantined job, as JSON text."""
    return orjson.dumps(quarantined_error(problem)).decode()


def quarantined_error(problem: str) -> dict[str, str]:
    """The error of a quarantined job."""
    return {"type": "Quarantined", "message": plain_text(problem[:2_000])}


async def claim_alone(
    database: Database,
    holder: str,
    names: Sequence[str],
    slots: Mapping[int, int] | None = None,
    keys: Sequence[str] | None = None,
) -> tuple[ClaimedJob, int] | None:
    """Claim one job that waits to run alone. Returns it with its slot, -1 for a job without one.

    `slots` has the epoch of each slot that the holder owns, when `names` is the name of a pool. `keys`: see `claim`.
    """
    row = await database.fetchrow(
        "select * from penstock.claim_alone($1, $2, $3, $4, $5)",
        holder,
        names,
        None if slots is None else list(slots.keys()),
        None if slots is None else list(slots.values()),
        keys,
    )
    return None if row is None else (ClaimedJob._make(row[:14]), -1 if row["at_slot"] is None else row["at_slot"])


async def promise_to_begin(database: Database, holder: str, kind: str, *, retry: bool = False) -> None:
    """Promise to call `begin` before an at_most_once job starts ("worker"), or before any job starts ("dispatcher")."""
    await database.fetch("select penstock.promise_to_begin($1, $2)", holder, kind, retry=retry)


async def begin(database: Database, ids: Sequence[UUID], leases: Sequence[int]) -> set[UUID]:
    """Mark claimed jobs as begun. Returns those that may be started."""
    rows = await database.fetch("select * from penstock.begin_jobs($1, $2::bigint[])", ids, leases, retry=True)
    return {row[0] for row in rows}


async def are_apart(database: Database, names: Sequence[str], keys: Sequence[str] | None = None) -> bool:
    """Whether jobs of these types wait to run alone. `keys`: see `claim`."""
    return bool(await database.fetchval("select penstock.has_isolated_jobs($1, $2)", names, keys))


async def next_alone(
    database: Database, names: Sequence[str], slots: Sequence[int] | None = None, keys: Sequence[str] | None = None
) -> UUID | None:
    """The first job of these types that waits to run alone and may run now; of a pool, in these slots. None: there is none."""
    found: UUID | None = await database.fetchval("select penstock.next_alone($1, $2, $3)", names, slots, keys)
    return found


async def isolate(database: Database, worker: str, begin: bool) -> bool:
    """Begin or end to run jobs alone. Returns False when enough other workers already do so."""
    return bool(await database.fetchval("select penstock.isolate($1, $2)", worker, begin))


async def settle(database: Database, settlements: Sequence[Settlement]) -> dict[UUID, str]:
    """Settle attempts. Returns the outcomes of those that are not plain successes; "stale" means that nothing changed."""
    if not settlements:
        return {}
    # By column, since a comprehension for each column takes several times as long.
    ids, attempts, leases, outcomes, details, delays, _, written, _ = zip(*settlements, strict=True)
    if any(written):
        return await settle(database, [settlement for settlement in settlements if not settlement.written])
    plain = outcomes.count(Outcome.SUCCEEDED) == details.count(None) == len(settlements)
    rows = await database.fetch(
        "select * from penstock.settle($1, $2::smallint[], $3::bigint[], $4, $5::jsonb[], $6)",
        ids,
        attempts,
        leases,
        None if plain else [str(outcome) for outcome in outcomes],
        None if plain else details,
        None if plain else delays,
        retry=True,
    )
    return {row["id"]: row["outcome"] for row in rows}


async def confirm_finished(database: Database, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Take jobs off their leases whose finish has committed. Returns the others: "open" during its transaction, or "held"."""
    rows = await database.fetch("select * from penstock.confirm_finished($1)", ids, retry=True)
    return {row["id"]: row["state"] for row in rows}


async def extend(database: Database, job: ClaimedJob | Settlement, lease: int, duration: timedelta | None) -> int | None:
    """Extend the lease of one job. Returns its new lease, or None when the job no longer belongs to the caller."""
    return (await extend_many(database, [job.id], [job.attempt], [lease], duration)).get(job.id)


async def extend_many(
    database: Database, ids: Sequence[UUID], attempts: Sequence[int], leases: Sequence[int], duration: timedelta | None
) -> dict[UUID, int]:
    """Extend the leases of jobs. Returns the new leases; a job that is missing no longer belongs to the caller."""
    rows = await database.fetch(
        "select * from penstock.extend($1, $2::smallint[], $3::bigint[], $4)", ids, attempts, leases, duration, retry=True
    )
    return {row["id"]: int(row["lease"]) for row in rows}


async def run_now(database: Database, ids: Sequence[UUID]) -> set[UUID]:
    """Make deferred jobs due at once, at most 10,000 in one call. Returns those that were deferred."""
    return {row["run_now"] for row in await database.fetch("select * from penstock.run_now($1)", ids, retry=True)}


async def report_progress(database: Database, progress: Sequence[tuple[UUID, int, str]]) -> None:
    """Write the progress of running jobs: (id, lease, JSON text)."""
    await database.fetch(
        "select penstock.report_progress($1, $2::bigint[], $3::jsonb[])",
        [id for id, _, _ in progress],
        [lease for _, lease, _ in progress],
        [text for _, _, text in progress],
        retry=True,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the log of a running job, and how many seconds ago it was logged."""

    id: UUID
    lease: int
    text: str
    age_s: float


async def append_log(database: Database, lines: Sequence[Line], *, wait: bool) -> list[UUID]:
    """Append lines to the logs of running jobs.

    Without `wait`, returns the jobs that other transactions have locked, whose lines are not written.
    """
    rows = await database.fetch(
        "select * from penstock.append_log($1, $2::bigint[], $3, $4, $5)",
        [line.id for line in lines],
        [line.lease for line in lines],
        [line.text for line in lines],
        [line.age_s for line in lines],
        wait,
        retry=True,
    )
    return [row[0] for row in rows]


async def promote(database: Database, limit: int = 1000) -> tuple[int, datetime | None]:
    """Make due jobs ready. Returns their number, and when the next job is due."""
    row = await database.fetchrow("select * from penstock.promote($1)", limit)
    return int(row["promoted"]), row["next_due"]


async def due_in(database: Database) -> tuple[int, float | None]:
    """`promote`, with the seconds until the next job is due, by the database's clock."""
    row = await database.fetchrow(
        "select promoted, extract(epoch from next_due - penstock.clock())::double precision as due_in from penstock.promote()"
    )
    return int(row["promoted"]), row["due_in"]


async def expire(database: Database, limit: int = 1000) -> int:
    """Archive queued jobs whose `expires_at` has passed. Returns their number."""
    return int(await database.fetchval("select penstock.expire($1)", limit))


async def recover(database: Database) -> int:
    """Recover the jobs of dead workers and of expired leases. Returns their number."""
    return int(await database.fetchval("select penstock.recover()"))


async def prune(database: Database, keep: timedelta) -> dict[str, int]:
    """Drop the days of the archive that ended longer ago than `keep`. Returns the jobs dropped, by partition."""
    return {row["partition"]: row["jobs"] for row in await database.fetch("select * from penstock.prune($1)", keep)}


async def register_worker(
    database: Database, worker: str, names: Sequence[str], host: str, pid: int, concurrency: int, dead_after: timedelta
) -> None:
    """Register a worker. Raises `Conflict` when its id is taken."""
    await database.fetch(
        "select penstock.register_worker($1, $2, $3, $4, $5, $6)", worker, names, host, pid, concurrency, dead_after
    )


async def heartbeat(database: Database, worker: str, in_flight: int, state: str) -> Heartbeat:
    """Report that a worker is alive."""
    row = await database.fetchrow("select * from penstock.heartbeat($1, $2, $3)", worker, in_flight, state)
    return Heartbeat(row["known"], row["cancelled"] or [], row["leases"] or [], row["workers"])


async def note_halted(database: Database, worker: str, consumer: str, error: str) -> None:
    """Record that a consumer of a worker has halted while the worker continues."""
    await database.fetch("select penstock.note_halted($1, $2, $3)", worker, consumer, error)


async def note_keys(database: Database, worker: str, key_ids: Sequence[str], no_key: Mapping[str, str | None]) -> None:
    """Record the ids of the keys that a worker has, and what it does not work on for want of a key; see `penstock.note_keys`."""
    await database.fetch("select penstock.note_keys($1, $2, $3::jsonb)", worker, key_ids, _dump(dict(no_key)))


async def missing_keys(database: Database, names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Those of the types in which jobs wait that are encrypted with none of these keys, with the id of the key of one."""
    rows = await database.fetch("select * from penstock.missing_keys($1, $2)", names, keys)
    return {row["name"]: row["key_id"] for row in rows}


async def unregister_worker(database: Database, worker: str) -> None:
    """Unregister a worker that ends in order."""
    await database.fetch("select penstock.unregister_worker($1)", worker)


async def release_unknown(database: Database, worker: str, known: Callable[[], Sequence[int]]) -> int:
    """Release leases that the worker holds without knowing. Returns the number of jobs.

    `known` is evaluated for each attempt, before the call: a job that finishes meanwhile stays known until it is settled.
    """

    async def once() -> int:
        return int(await database.fetchval("select penstock.release_unknown($1, $2::bigint[])", worker, known()))

    return await database.retrying(once)


async def wait_for_jobs(database: Database, worker: str, names: Sequence[str]) -> None:
    """Register a worker as idle, so that new jobs notify it."""
    await database.fetch("select penstock.wait_for_jobs($1, $2)", worker, names)


async def cancel(database: Database, id: UUID) -> str:
    """Cancel a job. Returns "cancelled", "cancelling", or the status of a finished job. Raises `NotFound`."""
    return str(await database.fetchval("select penstock.cancel($1)", id, retry=False))


async def replay(database: Database, id: UUID, new_id: UUID, data: str | None = None, *, force: bool = True) -> UUID:
    """Enqueue a copy of a running or finished job, with its own payload or another (JSON text). Raises `NotFound`, `Conflict`.

    Without `force`, the database refuses the replay while an earlier one waits, runs or has succeeded.
    """
    replayed: UUID = await database.fetchval("select penstock.replay($1, $2, $3::jsonb, $4)", id, new_id, data, force)
    return replayed


async def find(database: Database, ids: Sequence[UUID], *, log: bool = False) -> dict[UUID, JobRecord]:
    """The records of these jobs, with or without the lines of their logs; unknown ids are left out."""
    found: dict[UUID, JobRecord] = {}
    for some in in_parts(ids):
        rows = await database.fetch("select * from penstock.find_jobs($1, $2)", some, log)
        found |= {row["id"]: _record(row) for row in rows}
    return found


async def why(database: Database, id: UUID) -> Why:
    """Why a job waits. Raises `NotFound`."""
    return Why(*tuple(await database.fetchrow("select * from penstock.why($1)", id)))


async def list_ids(
    database: Database, name: str | None, status: str | None, key: str | None, limit: int, reason: str | None = None
) -> list[UUID]:
    """Ids of jobs, latest first."""
    query = "select * from penstock.list_jobs($1, $2, $3, $4, p_reason => $5)"
    rows = await database.fetch(query, name, status, key, limit, reason)
    return [row[0] for row in rows]


async def counts(database: Database) -> list[JobCounts]:
    """Number of jobs of each type, by status."""
    return [JobCounts(*tuple(row)) for row in await database.fetch("select * from penstock.job_counts()")]


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()


def load_or_text(text: str | None) -> Any:
    """The value of a JSON text for display: the text itself when it cannot be parsed."""
    if text is None:
        return None
    try:
        return load_json(text)
    except InvalidInput:
        return text


def log_of(text: str | None) -> tuple[LogLine, ...]:
    """The lines of a log, from JSON text."""
    lines = [] if text is None else orjson.loads(text)
    return tuple(LogLine(datetime.fromisoformat(line["at"]), line["attempt"], _text_of(line)) for line in lines)


def _text_of(line: dict[str, Any]) -> str:
    """The text of a line: its envelope when it is encrypted."""
    return line["line"] if "line" in line else _dump({"penstock": line["penstock"]})


def _record(row: Any) -> JobRecord:
    return JobRecord(
        id=row["id"],
        name=row["name"],
        status=Status(row["status"]),
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        priority=row["priority"],
        key=row["key"],
        unique=row["unique_key"],
        data=load_or_text(row["data"]),
        created_at=row["created_at"],
        run_after=row["run_after"],
        expires_at=row["expires_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        worker=row["worker"],
        errors=load_or_text(row["errors"]) or [],
        result=load_or_text(row["result"]),
        progress=load_or_text(row["progress"]),
        replay_of=row["replay_of"],
        replayed_by=tuple(row["replayed_by"]),
        cancel_requested_at=row["cancel_requested_at"],
        reason=row["reason"],
        time_limit=None if row["time_limit_s"] is None else timedelta(seconds=row["time_limit_s"]),
        snoozes=row["snoozes"],
        log=log_of(row["log"]),
        encrypted=row["encrypted"],
    )


def job_type_of(row: Any) -> JobTypeRecord:
    """A row of `penstock.jobs` as a record."""
    columns = {column: row[column] for column in _OF_JOB_TYPE}
    return JobTypeRecord(**columns | {"delivery_strategy": Delivery(row["delivery_strategy"])})
