"""One typed function for each SQL function by which people, servers and scalers watch and change pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from penstock.core.records import from_json
from penstock.core.serialization import dump_options, load_json
from penstock.errors import NotFound
from penstock.jobs.records import Status, Why
from penstock.jobs.scaling import Load
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, QuarantinedKey, RunningJob, StandingState
from penstock.postgres.database import Database

# The columns of key_state beside `running`; those of why follow.
_OF_KEY = (
    "slot", "owner", "target", "epoch", "weight", "ready", "in_progress", "deferred", "oldest_ready_s", "standing", "paused_at",
    "quarantined_at", "quarantine_error", "next_job",
)  # fmt: skip


async def details(database: Database, name: str | None = None) -> list[PoolDetails]:
    """A pool, or all by name."""
    return [PoolDetails(*tuple(row)) for row in await database.fetch("select * from penstock.pool_details($1)", name)]


async def require(database: Database, name: str, may_see: Callable[[str], bool] | None = None) -> PoolDetails:
    """The pool with this name. Raises `NotFound`, which names the pools that there are; with `may_see`, of these only such."""
    found = await details(database, name)
    if not found:
        known = [pool.name for pool in await details(database) if may_see is None or may_see(pool.name)]
        raise NotFound(f"no such pool: {name}", hint=f"There are: {', '.join(known[:20]) or 'none'}.")
    return found[0]


async def change_pool(database: Database, name: str, options: Mapping[str, Any]) -> None:
    """Change limits of a pool. Raises `InvalidInput`, `NotFound`."""
    await database.fetch("select penstock.change_pool($1, $2::jsonb)", name, dump_options(f"pool {name}", options))


async def weights(database: Database, name: str) -> dict[str, int]:
    """The weights that were set, by key, at most 10,000. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.key_weights_of($1)", name)
    return {row["key"]: row["weight"] for row in rows}


async def quarantined_keys(
    database: Database, name: str, *, after: str | None = None, limit: int = 100, key: str | None = None
) -> list[QuarantinedKey]:
    """Quarantined keys behind the key `after`, or only `key`. Raises `NotFound` when the pool does not exist."""
    rows = await database.fetch("select * from penstock.quarantined_keys($1, $2, $3, $4)", name, after, limit, key)
    return [QuarantinedKey(*tuple(row)) for row in rows]


async def quarantined_counts(database: Database) -> dict[str, int]:
    """The number of quarantined keys of every pool."""
    return {row["name"]: row["keys"] for row in await database.fetch("select * from penstock.quarantined_counts()")}


async def key_state(database: Database, name: str, key: str) -> KeyState:
    """What is known of a key. Raises `NotFound` when the pool does not exist."""
    row = await database.fetchrow("select * from penstock.key_state($1, $2)", name, key)
    known = {column: row[column] for column in _OF_KEY}
    why = Why(*tuple(row)[len(_OF_KEY) + 1 :]) if row["next_job"] is not None else None
    return KeyState(key, **known, running=from_json(list[RunningJob], row["running"].encode()), why=why)


async def pool_jobs(
    database: Database, name: str, *, key: str | None = None, after: str | None = None, limit: int = 100
) -> list[KeyedJob]:
    """Jobs of a pool that wait or run, behind the cursor `after`. Raises `NotFound`, `InvalidInput`."""
    rows = await database.fetch("select * from penstock.pool_jobs($1, $2, $3, $4)", name, key, after, limit)
    return [KeyedJob(**{**row, "status": Status(row["status"])}) for row in rows]


async def paused_keys(database: Database, name: str, *, after: str | None = None, limit: int = 100) -> list[PausedKey]:
    """Paused keys behind the key `after`. Raises `NotFound` when the pool does not exist."""
    rows = await database.fetch("select * from penstock.paused_keys_of($1, $2, $3)", name, after, limit)
    return [PausedKey(*tuple(row)) for row in rows]


async def standing_jobs(
    database: Database,
    name: str,
    *,
    after: str | None = None,
    limit: int = 100,
    key: str | None = None,
    read: Callable[[str], Any] = load_json,
) -> list[StandingState]:
    """Standing jobs in the order of their keys, behind the key `after`, or only that of `key`.

    Raises `NotFound` when the pool does not exist.

    Args:
        database: Database to read from.
        name: Name of the pool.
        after: The last key of the page before.
        limit: The largest number of standing jobs.
        key: Return only the standing job of this key.
        read: Parses the JSON text of `data`, `state` and `error`.
    """
    rows = await database.fetch("select * from penstock.standing_list($1, $2, $3, $4)", name, after, limit, key)
    words = ("data", "state", "error")
    return [StandingState(**{**row, **{word: None if row[word] is None else read(row[word]) for word in words}}) for row in rows]


async def load_of_types(database: Database, over: timedelta) -> list[Load]:
    """The load of each job type, for scaling advice."""
    return [
        Load(
            row["name"], row["ready"], row["in_progress"], row["oldest_ready_s"], row["finished"], over.total_seconds(),
            row["workers"], row["most_workers"],
        )
        for row in await database.fetch("select * from penstock.load_of_types($1)", over)
    ]  # fmt: skip
