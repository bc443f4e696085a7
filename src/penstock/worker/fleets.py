"""One typed function for each SQL function about fleets."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import orjson

from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """A fleet: how many workers it should have, and how many were present in the last ten seconds."""

    name: str
    target: str
    wanted: int
    present: int
    draining: bool
    started_at: datetime


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker, where it runs, and its fleet (None: it belongs to none). `alive`: it has not been silent for too long.

    `blocked_since`: the time since when its event loop has made no progress (None: it makes progress). `blocked_by`: type and id
    of the job that blocks it, if known. `halted`: its consumers (stream/group) that have ended, with their errors.
    `no_key`: the encrypted job types and pools that it does not work on, with the id of the key that it lacks (None: any key).
    """

    worker: str
    state: str
    host: str
    pid: int
    fleet: str | None
    names: list[str]
    concurrency: int
    in_flight: int
    alive: bool
    started_at: datetime
    seen_at: datetime
    blocked_since: datetime | None
    blocked_by: str | None
    halted: dict[str, str]
    no_key: dict[str, str | None]


async def workers(database: Database) -> list[WorkerRecord]:
    """All workers that have a row."""
    rows = await database.fetch("select * from penstock.worker_list()")
    return [WorkerRecord(**{**row, "halted": orjson.loads(row["halted"]), "no_key": orjson.loads(row["no_key"])}) for row in rows]


async def drain_worker(database: Database, worker: str) -> str:
    """Tell one worker of a fleet to stop. Returns the fleet. Raises `NotFound`, and `Conflict` for a worker of no fleet."""
    return str(await database.fetchval("select penstock.drain_worker($1)", worker))


async def start(database: Database, fleet: str, target: str, workers: int) -> None:
    """Announce a fleet. Raises `Conflict` when a fleet of that name runs."""
    await database.fetch("select penstock.start_fleet($1, $2, $3)", fleet, target, workers)


async def look(database: Database, fleet: str, worker: str, host: str, python: str) -> bool:
    """Report that a worker serves a fleet. Returns whether the worker should stop."""
    return bool(await database.fetchval("select penstock.serve_fleet($1, $2, $3, $4)", fleet, worker, host, python))


async def drain(database: Database, fleet: str) -> None:
    """Tell the workers of a fleet to stop. Raises `NotFound`."""
    await database.fetch("select penstock.drain_fleet($1)", fleet)


async def end(database: Database, fleet: str) -> None:
    """Remove a fleet that has ended."""
    await database.fetch("select penstock.end_fleet($1)", fleet)


async def fleets(database: Database) -> list[FleetRecord]:
    """All fleets."""
    return [FleetRecord(*tuple(row)) for row in await database.fetch("select * from penstock.fleet_counts()")]
