"""One typed function for each SQL function about schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from penstock.errors import NotFound
from penstock.jobs.records import Status
from penstock.postgres.database import Database
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun


@dataclass(frozen=True, slots=True)
class Due:
    """The time for which a schedule runs next, the current time, and whether it can run now.

    `spec`: its times.
    `running`: the schedule is due, and the run before has not ended. `taken`: this worker runs the schedule in place.
    `requested`: it runs for `now`, as was requested, and stays due at `at`.
    """

    at: datetime
    now: datetime
    in_s: float
    spec: str
    running: bool = False
    taken: bool = False
    requested: bool = False


async def now(database: Database) -> datetime:
    """The database's clock."""
    moment: datetime = await database.fetchval("select penstock.clock()", retry=True)
    return moment


async def declare(database: Database, name: str, kind: str, spec: str, first_at: datetime, runs_as: str) -> None:
    """Create a schedule, or restart it when its times have changed."""
    query = "select penstock.declare_schedule($1, $2, $3, $4, $5)"
    await database.fetch(query, name, kind, spec, first_at, runs_as, retry=True)


async def look(database: Database, name: str) -> Due:
    """When a schedule is due. Raises `NotFound`."""
    row = await database.fetchrow("select * from penstock.look_at_schedule($1)", name)
    if row["due_at"] is None:
        raise _deleted(name)
    return Due(row["due_at"], row["now_at"], row["due_in"], row["spec"], running=row["running"])


async def enqueue_run(
    database: Database,
    name: str,
    spec: str,
    due_at: datetime,
    run_at: datetime | None,
    next_at: datetime,
    key: str | None = None,
) -> UUID | None:
    """Move a schedule to its next slot, and enqueue the run for `run_at` (None: skip it).

    Returns None when another worker was faster, the run before has not ended, or the schedule has other times than `spec` by now.
    The call is safe to repeat.
    """
    query = "select penstock.enqueue_run($1, $2, $3, $4, $5, $6)"
    found: UUID | None = await database.fetchval(query, name, spec, due_at, run_at, next_at, key, retry=True)
    return found


async def bring_forward(database: Database, name: str, spec: str, due_at: datetime) -> None:
    """Begin the intervals of a timer from now, since the clock has stepped back by more than one of them."""
    await database.fetch("select penstock.bring_forward($1, $2, $3)", name, spec, due_at, retry=True)


async def take(database: Database, name: str, spec: str, worker: str, duration: timedelta) -> Due:
    """Take a schedule that runs in place, if it is due and has these times. Raises `NotFound`."""
    row = await database.fetchrow("select * from penstock.take_schedule($1, $2, $3, $4)", name, spec, worker, duration)
    if row["due_at"] is None:
        raise _deleted(name)
    taken, requested = bool(row["taken"]), bool(row["requested"])
    return Due(row["due_at"], row["now_at"], row["due_in"], row["spec"], taken=taken, requested=requested)


async def extend(database: Database, name: str, worker: str, due_at: datetime, duration: timedelta) -> bool:
    """Extend a worker's run of a schedule. Returns False when another worker has taken it."""
    return bool(
        await database.fetchval("select penstock.extend_schedule($1, $2, $3, $4)", name, worker, due_at, duration, retry=True)
    )


async def end(
    database: Database,
    name: str,
    worker: str,
    due_at: datetime,
    next_at: datetime,
    ran_at: datetime | None = None,
    started_at: datetime | None = None,
    error: str | None = None,
) -> bool:
    """End a run in place, for `ran_at` (None: it was skipped). Returns False when another worker has taken it."""
    query = "select penstock.end_schedule($1, $2, $3, $4, $5, $6, $7)"
    return bool(await database.fetchval(query, name, worker, due_at, next_at, ran_at, started_at, error, retry=True))


async def note(database: Database, names: Sequence[str]) -> None:
    """Record that a running worker declares these schedules, and the outcomes of their runs."""
    await database.fetch("select penstock.note_schedules($1)", list(names), retry=True)


async def note_run(
    database: Database,
    name: str,
    worker: str,
    at: datetime,
    started_at: datetime,
    finished_at: datetime,
    error: str | None,
) -> None:
    """Record the outcome of a run of a schedule with `per_worker`."""
    query = "select penstock.note_run($1, $2, $3, $4, $5, $6)"
    await database.fetch(query, name, worker, at, started_at, finished_at, error, retry=True)


async def differences(database: Database) -> list[tuple[str, str | None, str, list[str]]]:
    """What running workers say differently of a schedule, or of a time zone: see `schedule_differences` in SQL."""
    rows = await database.fetch("select subject, stored, said, workers from penstock.schedule_differences()", retry=True)
    return [(row["subject"], row["stored"], row["said"], list(row["workers"])) for row in rows]


async def schedules(database: Database) -> list[ScheduleRecord]:
    """All schedules, by name."""
    return [ScheduleRecord(*tuple(row)) for row in await database.fetch("select * from penstock.schedule_list()")]


async def run_now(database: Database, name: str, key: str | None = None) -> UUID | None:
    """Run a schedule now. Returns its job, None for a run in place. Raises `NotFound`, `Conflict`, `InvalidInput`."""
    found: UUID | None = await database.fetchval("select penstock.run_schedule($1, $2)", name, key)
    return found


async def runs(database: Database, name: str, status: str | None = None, limit: int = 20) -> list[ScheduleRun]:
    """The last runs of a schedule, latest first. Raises `NotFound`, `InvalidInput`."""
    rows = await database.fetch("select * from penstock.schedule_runs($1, $2, $3)", name, status, limit)
    return [ScheduleRun(row["id"], Status(row["status"]), *tuple(row)[2:]) for row in rows]


async def drop(database: Database, name: str) -> None:
    """Drop a schedule. Raises `NotFound`; `Conflict` while a running worker declares it."""
    await database.fetch("select penstock.drop_schedule($1)", name)


def _deleted(name: str) -> NotFound:
    return NotFound(f"schedule {name} was deleted", hint="Declare it again.")
