"""One typed function for each SQL function about claimed jobs: claim, begin, extend, settle, release.

No logic beyond converting rows to models. `retry=True` marks calls that a worker's loops repeat until the database is reachable
again; all calls here are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter
from uuid import UUID

import orjson

from penstock.core import measuring
from penstock.core.garbage_collection import CollectedLater
from penstock.core.logs import get_logger
from penstock.core.serialization import plain_text
from penstock.core.signatures import signed_in_slices
from penstock.jobs import workflow_ticks
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.postgres.database import Database

log = get_logger("penstock.worker")
# `ClaimedJob._make` takes half as long again.
_new_tuple = tuple.__new__


# A released job with an error had been started, and fails when it may start only once.
_WITH_ERRORS = frozenset((Outcome.FAILED, Outcome.FAILED_FOR_GOOD, Outcome.QUARANTINED, Outcome.RELEASED))
_SEQ, _LEASE = (itemgetter(ClaimedJob._fields.index(field)) for field in ("seq", "lease"))


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


_CLAIM = "select * from penstock.claim($1, $2, $3, $4::jsonb, $5, $6, $7)"


async def claim(
    database: Database,
    worker: str,
    names: Sequence[str],
    limit: int,
    watermarks: dict[str, dict[str, int]],
    keys: Sequence[str] | None = None,
    most: Sequence[int] | None = None,
    shared: bool = True,
) -> Claim:
    """Claim up to `limit` ready jobs of these types. It is not retried: a lost answer leaves jobs claimed.

    Args:
        database: Database to claim from.
        worker: Id of the worker.
        names: The job types.
        limit: The most jobs of all.
        watermarks: Where the search begins in each queue.
        keys: Ids of the worker's keys of encrypted payloads; None: it has none, and gets no job of an encrypted type.
        most: The most jobs of each type; None: the limit.
        shared: Whether the types that have ready jobs get equal parts; otherwise the first takes what it has, then the next one.
    """
    rows = await database.fetch(_CLAIM, worker, names, limit, orjson.dumps(watermarks).decode(), keys, most, shared)
    if not rows:
        return Claim([], 0, 0)
    with CollectedLater():
        jobs = [_new_tuple(ClaimedJob, row[:15]) for row in rows]
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
        "select * from penstock.wait_for_places($1, $2, $3::jsonb, $4)", worker, names, orjson.dumps(watermarks).decode(), channel
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
    for job in unreadable:
        log.warning("job_quarantined", job_id=str(job.id), job_type=job.name, key=job.key, attempt=job.attempt)
    return [job for job in claimed if job.data is not None]


async def quarantine_unreadable(database: Database, names: Sequence[str]) -> int:
    """Quarantine ready jobs at the front of these queues that no client can read. Returns their number."""
    ((done, xid),) = await database.fetch(
        "select penstock.quarantine_unreadable($1), pg_current_xact_id_if_assigned()::text", names
    )
    if done:
        await count_quarantined(database, xid)
    return int(done)


async def count_quarantined(database: Database, xid: str) -> None:
    """Count the jobs that a transaction of this process has quarantined, unless the process measures nothing."""
    if measuring.meter is not None:
        for name, jobs in await database.fetch("select * from penstock.quarantined_in($1::text::xid8)", xid):
            measuring.meter.quarantined(name, jobs)


async def held_jobs(database: Database, worker: str, known: Sequence[int]) -> list[tuple[UUID, int, int]]:
    """Id, attempt and lease of the jobs that a worker holds under other leases than those that it knows."""
    rows = await database.fetch("select * from penstock.held_jobs($1, $2::bigint[])", worker, known)
    return [(row["id"], row["attempt"], row["lease"]) for row in rows]


async def can_show(database: Database, worker: str, id: UUID) -> bool:
    """Read one job that a worker holds, as a claim would return it. False: the database does not return its payload."""
    row = await database.fetchrow("select * from penstock.read_held($1, $2)", worker, id)
    return row is None or row["data"] is not None


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
) -> list[tuple[ClaimedJob, int]]:
    """Claim the suspects of one trial, to run beside nothing else. Returns them with their slots, -1 for a job without one.

    `slots` has the epoch of each slot that the holder owns, when `names` is the name of a pool. `keys`: see `claim`.
    """
    rows = await database.fetch(
        "select * from penstock.claim_alone($1, $2, $3, $4, $5)",
        holder,
        names,
        None if slots is None else list(slots.keys()),
        None if slots is None else list(slots.values()),
        keys,
    )
    return [(ClaimedJob._make(row[:15]), -1 if row["at_slot"] is None else row["at_slot"]) for row in rows]


async def promise_to_begin(database: Database, holder: str, kind: str, *, retry: bool = False) -> None:
    """Promise to call `begin` before an at_most_once job starts ("worker"), or before any job starts ("dispatcher")."""
    await database.fetch("select penstock.promise_to_begin($1, $2)", holder, kind, retry=retry)


async def begin(database: Database, ids: Sequence[UUID], leases: Sequence[int]) -> set[UUID]:
    """Mark claimed jobs as begun. Returns those that may be started."""
    rows = await database.fetch("select * from penstock.begin_jobs($1, $2::bigint[])", ids, leases, retry=True)
    return {row[0] for row in rows}


async def are_apart(database: Database, names: Sequence[str], keys: Sequence[str] | None = None) -> bool:
    """Whether suspects of these types wait for their trial. `keys`: see `claim`."""
    return bool(await database.fetchval("select penstock.has_isolated_jobs($1, $2)", names, keys))


async def next_alone(
    database: Database, names: Sequence[str], slots: Sequence[int] | None = None, keys: Sequence[str] | None = None
) -> UUID | None:
    """The first suspect of these types (of a pool: in these slots) whose trial may begin now. None: there is none."""
    found: UUID | None = await database.fetchval("select penstock.next_alone($1, $2, $3)", names, slots, keys)
    return found


async def isolate(database: Database, worker: str, begin: bool, idle: bool = False) -> bool:
    """Begin (`idle`: empty already) or end to run trials. Returns False when enough other workers already do so."""
    return bool(await database.fetchval("select penstock.isolate($1, $2, $3)", worker, begin, idle))


async def settle(database: Database, settlements: Sequence[Settlement], version: str | None = None) -> dict[UUID, str]:
    """Settle attempts. Returns the outcomes of those that are not plain successes; "stale" means that nothing changed.

    Args:
        database: Database.
        settlements: The attempts.
        version: Version of the code that ran them, which their errors get; None: it is not known.
    """
    if not settlements:
        return {}
    # By column, since a comprehension for each column takes several times as long.
    ids, attempts, leases, outcomes, details, delays, _, written, _, _ = zip(*settlements, strict=True)
    if any(written):
        return await settle(database, [settlement for settlement in settlements if not settlement.written], version)
    plain = outcomes.count(Outcome.SUCCEEDED) == details.count(None) == len(settlements)
    rows = await database.fetch(
        "select * from penstock.settle($1, $2::smallint[], $3::bigint[], $4, $5::jsonb[], $6)",
        ids,
        attempts,
        leases,
        None if plain else [str(outcome) for outcome in outcomes],
        None if plain else await _with_signatures(outcomes, details, version),
        None if plain else delays,
        retry=True,
    )
    others = {row["id"]: row["outcome"] for row in rows}
    if None in others:
        del others[None]
        workflow_ticks.tell(database)
    return others


async def _with_signatures(
    outcomes: Sequence[Outcome], details: Sequence[str | None], version: str | None
) -> Sequence[str | None]:
    if _WITH_ERRORS.isdisjoint(outcomes):
        return details
    failed = [outcome in _WITH_ERRORS for outcome in outcomes]
    errors = [detail if one else None for one, detail in zip(failed, details, strict=True)]
    signed = await signed_in_slices(errors, version)
    return [error if one else detail for one, error, detail in zip(failed, signed, details, strict=True)]


async def confirm_finished(database: Database, ids: Sequence[UUID]) -> dict[UUID, str]:
    """Take jobs off their leases whose finish has committed. Returns the others: "open" during its transaction, or "held"."""
    rows = await database.fetch("select * from penstock.confirm_finished($1)", ids, retry=True)
    return {row["id"]: row["state"] for row in rows}


async def is_open(database: Database, transactions: Sequence[str]) -> bool:
    """Whether one of these transactions goes on."""
    statement = "select bool_or(pg_xact_status(each::xid8) = 'in progress') from unnest($1::text[]) as each"
    return bool(await database.fetchval(statement, transactions, retry=True))


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


async def report_progress(database: Database, progress: Sequence[tuple[UUID, int, str]]) -> list[UUID]:
    """Write the progress of running jobs: (id, lease, JSON text).

    Returns the jobs that other transactions have locked, whose progress is not written.
    """
    rows = await database.fetch(
        "select * from penstock.report_progress($1, $2::bigint[], $3::jsonb[])",
        [id for id, _, _ in progress],
        [lease for _, lease, _ in progress],
        [text for _, _, text in progress],
        retry=True,
    )
    return [row[0] for row in rows]


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


async def release_unknown(database: Database, worker: str, known: Callable[[], Sequence[int]]) -> int:
    """Release leases that the worker holds without knowing. Returns the number of jobs.

    `known` is evaluated for each attempt, before the call: a job that finishes meanwhile stays known until it is settled.
    """

    async def once() -> int:
        return int(await database.fetchval("select penstock.release_unknown($1, $2::bigint[])", worker, known()))

    return await database.retrying(once)
