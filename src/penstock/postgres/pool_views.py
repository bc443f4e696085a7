"""One typed function for each SQL function by which people, servers and scalers see and steer pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.errors import NotFound
from penstock.job import Why
from penstock.postgres.database import Database
from penstock.scaling import Load


@dataclass(frozen=True, slots=True)
class PoolDetails:
    """A pool: its options, and how its workers and slots are. How its jobs are is in `JobCounts`.

    Attributes:
        slots: How many it has now; with the assignor custom one for each key that it knows.
        unowned_slots: Slots that nobody has.
        moving_slots: Slots whose owner is not the one that is to have them.
        standing: Standing jobs that are wanted.
        standing_running: Standing jobs that run.
    """

    name: str
    slots: int
    assignor: str
    on_retry: str
    key_concurrency: int
    key_rate_limit: int | None
    key_rate_period: timedelta | None
    workers: int
    unowned_slots: int
    moving_slots: int
    standing: int
    standing_running: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class KeyState:
    """Where a key is and what waits for it. Counts end at 10,000. `slot` None: nobody has asked for the key yet.

    `next_job` is the first that waits, and `why` says what it waits for.
    """

    slot: int | None
    owner: str | None
    target: str | None
    epoch: int | None
    weight: int
    ready: int
    in_progress: int
    oldest_ready_s: float | None
    standing: bool
    next_job: UUID | None = None
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class StandingState:
    """A standing job as people see it. `data`, `state` and `error` are JSON text; `messages`: how many wait for it.

    `entered_at`: when the start side of its last run had succeeded (None: not yet, or it failed); `crashes`: workers lost one
    after the other while they ran it; `quarantined_at`: since when it is set aside for that.
    """

    key: str
    slot: int
    owner: str | None
    running_by: str | None
    wanted: bool
    started_at: datetime | None
    failures: int
    retry_at: datetime | None
    messages: int
    created_at: datetime
    updated_at: datetime
    data: str
    state: str | None
    error: str | None
    entered_at: datetime | None
    crashes: int
    quarantined_at: datetime | None


async def details(database: Database, name: str | None = None) -> list[PoolDetails]:
    """A pool, or all by name."""
    return [PoolDetails(*tuple(row)) for row in await database.fetch("select * from penstock.pool_details($1)", name)]


async def require(database: Database, name: str) -> PoolDetails:
    """The pool of that name. Raises `NotFound`."""
    found = await details(database, name)
    if not found:
        known = [pool.name for pool in await details(database)]
        raise NotFound(f"no such pool: {name}", hint=f"There are: {', '.join(known[:20]) or 'none'}.")
    return found[0]


async def change_pool(database: Database, name: str, options: Mapping[str, Any]) -> None:
    """Change limits of a pool. Raises `InvalidInput`, `NotFound`."""
    await database.fetch("select penstock.change_pool($1, $2::jsonb)", name, orjson.dumps(options).decode())


async def weights(database: Database, name: str) -> dict[str, int]:
    """The keys that have a weight, 10,000 at most. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.key_weights_of($1)", name)
    return {row["key"]: row["weight"] for row in rows}


@dataclass(frozen=True, slots=True)
class QuarantinedKey:
    """A key for which the rule of its pool fails. `jobs`: how many wait, at most 10,000 are counted."""

    key: str
    slot: int
    error: str
    failed_at: datetime
    jobs: int


async def quarantined_keys(
    database: Database, name: str, *, after: str | None = None, limit: int = 100, key: str | None = None
) -> list[QuarantinedKey]:
    """Quarantined keys, from `after` on, or the one of a key. Raises `NotFound` when there is no such pool."""
    rows = await database.fetch("select * from penstock.quarantined_keys($1, $2, $3, $4)", name, after, limit, key)
    return [QuarantinedKey(*tuple(row)) for row in rows]


async def quarantined_counts(database: Database) -> dict[str, int]:
    """Every pool, and how many of its keys are quarantined."""
    return {row["name"]: row["keys"] for row in await database.fetch("select * from penstock.quarantined_counts()")}


async def key_state(database: Database, name: str, key: str) -> KeyState:
    """Where a key is, and what waits for it. Raises `NotFound` when there is no such pool."""
    row = await database.fetchrow("select * from penstock.key_state($1, $2)", name, key)
    why = Why(*tuple(row)[10:]) if row["next_job"] is not None else None
    state = {field.name: row[field.name] for field in fields(KeyState) if field.name != "why"}
    return KeyState(**state, why=why)


async def standing_jobs(
    database: Database, name: str, *, after: str | None = None, limit: int = 100, key: str | None = None
) -> list[StandingState]:
    """Standing jobs by key, from `after` on, or the one of a key. Raises `NotFound` when there is no such pool."""
    rows = await database.fetch("select * from penstock.standing_list($1, $2, $3, $4)", name, after, limit, key)
    return [StandingState(*tuple(row)) for row in rows]


async def load_of_types(database: Database, over: timedelta) -> list[Load]:
    """How each job type is doing, for scaling advice."""
    return [
        Load(
            row["name"], row["ready"], row["in_progress"], row["oldest_ready_s"], row["finished"], over.total_seconds(),
            row["workers"], row["most_workers"],
        )
        for row in await database.fetch("select * from penstock.load_of_types($1)", over)
    ]  # fmt: skip
