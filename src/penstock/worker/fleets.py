"""Workers and fleets as all surfaces show them, and one typed function for each SQL function about them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, ClassVar

import orjson
from pydantic import ConfigDict, Field

from penstock.core.records import example
from penstock.postgres.database import Database

_AT = "2026-01-11T18:26:26Z"


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """A fleet of workers on Spark.

    Attributes:
        name: Name of the fleet.
        target: The application that its workers run, as `MODULE:APP`.
        wanted: Number of workers that it should have.
        present: Number of workers that were present in the last ten seconds.
        draining: Whether its workers were told to stop.
        started_at: When it was started.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "name": "night", "target": "shop.app:app", "wanted": 8, "present": 8, "draining": False, "started_at": _AT,
    })  # fmt: skip

    name: str
    target: str
    wanted: int
    present: int
    draining: bool
    started_at: datetime


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker process.

    Attributes:
        id: Id of the worker.
        host: Name of its machine.
        pid: Number of its process.
        fleet: The fleet that it is of, or None.
        names: Job types that it claims.
        pools: Pools in which it takes part.
        topics: Topics of whose subscribers it works on the copies.
        consumers: Consumer groups in which it takes part, as stream/group.
        schedules: Timers and cron schedules that it runs when they are due.
        leader_tasks: Tasks of which it may be the leader.
        concurrency: Most jobs that it runs at once.
        state: "running", "draining" or "dead".
        in_flight: Jobs that it held at its last heartbeat.
        alive: Whether it has not been silent for too long.
        started_at: When it registered.
        seen_at: When its last heartbeat came.
        silent_s: Seconds since then.
        blocked_since: Since when its event loop has made no progress, or None when it makes progress.
        blocked_by: Type and id of the job that blocks its event loop, if known.
        halted: Its consumers (stream/group) that have ended, each with its error.
        no_key: The encrypted job types and pools that it does not work on, with the id of the key that it lacks (None: any key).
        version: Version of Penstock in its process, or None for a worker over HTTP.
        code_version: Version of the application's code, such as a commit, if it is known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = example({
        "id": "web-3.4711.a1b2c3", "host": "web-3", "pid": 4711, "fleet": None, "names": ["invoice-shipments"],
        "pools": ["shipments"], "topics": [], "consumers": ["orders/billing"], "schedules": ["report"], "leader_tasks": [],
        "concurrency": 10,
        "state": "running", "in_flight": 2, "alive": True, "started_at": _AT, "seen_at": _AT, "silent_s": 1.5,
        "blocked_since": None, "blocked_by": None, "halted": {"orders/billing": "orders/billing, partition 3, offset 17: ..."},
        "no_key": {}, "version": "0.1.0", "code_version": "8f3c2ad",
    })  # fmt: skip

    id: str
    host: str
    pid: int
    fleet: str | None
    names: list[str]
    concurrency: int
    state: str
    in_flight: int
    alive: bool
    started_at: datetime
    seen_at: datetime
    silent_s: float
    blocked_since: Annotated[
        datetime | None, Field(description="Since when its event loop has made no progress; null: it makes progress.")
    ]
    blocked_by: Annotated[
        str | None, Field(description="Type and id of the job that blocks its event loop, as far as that is known.")
    ]
    halted: Annotated[dict[str, str], Field(description="Its consumers (stream/group) that have ended, each with its error.")]
    no_key: Annotated[
        dict[str, str | None],
        Field(description="Encrypted job types and pools that it does not work on, with the id of the key that it lacks."),
    ]
    pools: Annotated[list[str], Field(description="Pools in which it takes part.")]
    topics: Annotated[list[str], Field(description="Topics of whose subscribers it works on the copies.")]
    consumers: Annotated[list[str], Field(description="Consumer groups in which it takes part, as stream/group.")]
    schedules: Annotated[list[str], Field(description="Timers and cron schedules that it runs when they are due.")]
    leader_tasks: Annotated[list[str], Field(description="Tasks of which it may be the leader.")]
    version: Annotated[str | None, Field(description="Version of Penstock in its process; null: a worker over HTTP.")]
    code_version: Annotated[str | None, Field(description="Version of the application's code, such as a commit, if it is known.")]


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
