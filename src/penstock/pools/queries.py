"""One typed function for each SQL function about pools and standing jobs. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import dump_options
from penstock.jobs import claim_queries
from penstock.jobs.models import ClaimedJob
from penstock.jobs.options import PoolOptions
from penstock.postgres.database import Database

OPTIONS = frozenset(PoolOptions().as_json())
"""The options of a pool by their names in SQL; all others are those of its job type."""


@dataclass(frozen=True, slots=True)
class KeyedClaim:
    """The answer to a claim in a pool.

    Attributes:
        jobs: The jobs, each with its slot.
        at: Slot and key at which the walk over the keys ended, and at which the next one begins; None: it saw every key.
        due_in_s: Seconds until the next job is due that holds its key; None: there is none.
        quantum_left: How much of its quantum the key at `at` has left, because limits of the type cut it short.
        quanta: The quanta of the keys whose quantum is larger than 1.
        lacking: Slots, and the ids of the keys of encryption for which the first jobs of keys in them wait.
        walked: False when there was no walk, because the type is paused or at its limit: the next one begins where the last one
            ended.
    """

    jobs: list[tuple[ClaimedJob, int]]
    at: tuple[int, str] | None
    due_in_s: float | None
    quantum_left: int | None = None
    quanta: Mapping[str, int] = field(default_factory=dict)
    lacking: Sequence[tuple[int, str]] = ()
    walked: bool = True


@dataclass(frozen=True, slots=True)
class StandingJob:
    """A standing job that a member must run. `data` and `state` are JSON text."""

    key: str
    slot: int
    epoch: int
    data: str
    state: str | None
    version: int
    start_in_s: float
    crashes: int


async def declare_pool(
    database: Database,
    name: str,
    options: Mapping[str, Any],
    type_options: Mapping[str, Any],
    *,
    again: bool = True,
    retry: bool = False,
) -> None:
    """Create a pool, or change it when this declaration differs from the last one. Raises `InvalidInput`, `Conflict`.

    `again`: also one that was dropped; otherwise that raises `NotFound`.
    """
    await database.fetch(
        "select penstock.declare_pool($1, $2::jsonb, $3::jsonb, $4)",
        name,
        dump_options(f"pool {name}", options),
        dump_options(f"pool {name}", type_options),
        again,
        retry=retry,
    )


async def create_pool(
    database: Database, name: str, options: Mapping[str, Any], type_options: Mapping[str, Any], *, convert: bool
) -> None:
    """Create a pool, or turn a plain job type, with its jobs, into one. Raises `NotFound`, `InvalidInput`, `Conflict`."""
    if not convert:
        await declare_pool(database, name, options, type_options)
        return
    await database.fetch(
        "select penstock.convert_to_pool($1, $2::jsonb, $3::jsonb)",
        name,
        dump_options(f"pool {name}", options),
        dump_options(f"job type {name}", type_options),
    )


async def drop_pool(database: Database, name: str, *, force: bool = False) -> None:
    """Drop a pool. Raises `NotFound`, `Conflict`."""
    await database.fetch("select penstock.drop_pool($1, $2)", name, force)


async def claim(
    database: Database,
    member: str,
    name: str,
    owned: Mapping[int, int],
    limit: int,
    depth: int,
    after: tuple[int, str] | None,
    held_keys: Sequence[str],
    quantum_left: int | None = None,
    keys: Sequence[str] | None = None,
) -> KeyedClaim:
    """Claim jobs from owned slots. Not retried, since a lost answer leaves jobs claimed. Raises `NotFound` when evicted.

    `keys` are the ids of the worker's keys of encrypted payloads; None: it has none.
    """
    slot, key = after if after is not None else (None, None)
    rows = await database.fetch(
        "select * from penstock.claim_keys($1, $2, $3, $4, $5, $6, $7, $8, $9::jsonb, $10, $11)",
        member,
        name,
        list(owned.keys()),
        list(owned.values()),
        limit,
        depth,
        slot,
        key,
        _dump(dict.fromkeys(held_keys, 1)),
        quantum_left,
        keys,
    )
    if not rows:
        return KeyedClaim([], None, None, walked=False)
    last = rows[-1]
    at = None if last["at_slot"] is None else (last["at_slot"], last["at_key"])
    quanta = {} if last["weights"] is None else orjson.loads(last["weights"])
    found = [(ClaimedJob._make(row[:15]), row["at_slot"]) for row in rows[:-1]]
    if any(job.data is None for job, _ in found):
        readable = {job.id for job in await claim_queries.only_readable(database, [job for job, _ in found])}
        found = [(job, slot) for job, slot in found if job.id in readable]
    lacking = () if last["lacking"] is None else [(slot, key) for slot, key in orjson.loads(last["lacking"])]
    return KeyedClaim(found, at, last["due_in_s"], last["turn_left"], quanta, lacking)


async def wait_for_slots(database: Database, name: str, member: str) -> None:
    """Register a member as idle, so that new jobs in its slots notify it."""
    await database.fetch("select penstock.wait_for_slots($1, $2)", name, member)


async def cancelled_of(database: Database, name: str, member: str) -> list[UUID]:
    """Running jobs of a member whose cancellation was requested."""
    return await database.fetchval("select penstock.cancelled_of($1, $2)", name, member) or []


async def paused_keys_held(database: Database, name: str, member: str) -> list[str]:
    """Paused keys of which a member has jobs."""
    return await database.fetchval("select penstock.paused_keys_held($1, $2)", name, member) or []


async def pause_key(database: Database, name: str, key: str) -> datetime:
    """Pause a key. Returns since when it is paused. Raises `InvalidInput`, `NotFound`."""
    since: datetime = await database.fetchval("select penstock.pause_key($1, $2)", name, key)
    return since


async def resume_key(database: Database, name: str, key: str) -> bool:
    """End the pause of a key. Returns False when it was not paused. Raises `NotFound`."""
    return bool(await database.fetchval("select penstock.resume_key($1, $2)", name, key))


async def resize(database: Database, name: str, slots: int) -> None:
    """Give a live pool more slots. Raises `Conflict`, `NotFound`, `DatabaseUnavailable` when another transaction blocks it."""
    await database.fetch("select penstock.resize_pool($1, $2)", name, slots)


async def set_weight(database: Database, name: str, key: str, weight: int) -> None:
    """Set the weight of a key. Raises `InvalidInput`, `NotFound`."""
    await database.fetch("select penstock.set_weight($1, $2, $3)", name, key, weight)


async def forget_keys(database: Database, name: str) -> int:
    """In a pool with its own `assign`, remove the slots of keys that were not used for long. Returns their number."""
    return int(await database.fetchval("select penstock.forget_keys($1)", name))


async def start_standing(database: Database, name: str, key: str, data: str, *, replace: bool) -> str:
    """Start a standing job. Returns "starting", "unchanged" or "replaced". Raises `Conflict`, `NotFound`, `InvalidInput`."""
    return str(await database.fetchval("select penstock.start_standing($1, $2, $3::jsonb, $4)", name, key, data, replace))


async def stop_standing(database: Database, name: str, key: str) -> bool:
    """Stop a standing job. Returns False when there was none."""
    return bool(await database.fetchval("select penstock.stop_standing($1, $2)", name, key))


async def notify_standing(database: Database, name: str, key: str, data: str) -> None:
    """Send a message to a standing job. Raises `NotFound`."""
    await database.fetch("select penstock.notify_standing($1, $2, $3::jsonb)", name, key, data)


async def reconcile_standing(database: Database, name: str, wanted: Mapping[str, str]) -> tuple[int, int, int]:
    """Make the standing jobs equal to a wanted set: JSON text by key. Returns the numbers started, replaced and stopped."""
    document = _dump({key: orjson.Fragment(data) for key, data in wanted.items()})
    row = await database.fetchrow("select * from penstock.reconcile_standing($1, $2::jsonb)", name, document)
    return row["started"], row["replaced"], row["stopped"]


async def standing_of(database: Database, name: str, member: str, owned: Mapping[int, int]) -> list[StandingJob]:
    """The standing jobs that a member must run."""
    rows = await database.fetch(
        "select * from penstock.standing_of($1, $2, $3, $4)", name, member, list(owned.keys()), list(owned.values())
    )
    return [StandingJob(*tuple(row)) for row in rows]


async def refuse_standing(database: Database, name: str, member: str, owned: Mapping[int, int]) -> int:
    """Note of the standing jobs in the member's slots that it has no handler for them. Returns how many were not noted before."""
    owned_slots, epochs = list(owned.keys()), list(owned.values())
    return int(await database.fetchval("select penstock.refuse_standing($1, $2, $3, $4)", name, member, owned_slots, epochs))


async def begin_standing(
    database: Database, name: str, member: str, job: StandingJob, tried_with: int | None = None
) -> tuple[str, str | None] | None:
    """Begin a run. Returns its payload and the state of the last run as JSON text; None: the run may not begin.

    `tried_with`: the number of suspects in its trial, itself included; None: it is not on trial.
    """
    query = "select * from penstock.begin_standing($1, $2, $3, $4, $5, $6, $7)"
    row = await database.fetchrow(query, name, job.key, member, job.slot, job.epoch, job.version, tried_with)
    return None if row is None else (row["data"], row["state"])


async def enter_standing(database: Database, name: str, member: str, runs: Sequence[StandingJob]) -> None:
    """Record that the start sides of these runs have succeeded."""
    keys, epochs = [job.key for job in runs], [job.epoch for job in runs]
    await database.fetch("select penstock.enter_standing($1, $2, $3, $4)", name, member, keys, epochs)


async def acquit_standing(database: Database, name: str, member: str, keys: Sequence[str]) -> None:
    """End the trial of standing jobs that have survived it."""
    await database.fetch("select penstock.acquit_standing($1, $2, $3)", name, member, list(keys), retry=True)


async def save_standing(database: Database, name: str, member: str, job: StandingJob, state: str) -> bool:
    """Save the state of a run. Returns False when the run no longer belongs to the caller."""
    return bool(
        await database.fetchval(
            "select penstock.save_standing($1, $2, $3, $4, $5::jsonb)", name, job.key, member, job.epoch, state
        )
    )


async def end_standing(
    database: Database, name: str, member: str, job: StandingJob, state: str | None, error: Mapping[str, Any] | None
) -> bool:
    """End a run. Returns False when it no longer belonged to the caller."""
    return bool(
        await database.fetchval(
            "select penstock.end_standing($1, $2, $3, $4, $5::jsonb, $6::jsonb)",
            name,
            job.key,
            member,
            job.epoch,
            state,
            None if error is None else _dump(error),
        )
    )


async def take_messages(database: Database, name: str, member: str, keys: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """Take the messages for those of these standing jobs that a member runs, oldest first, as (key, JSON text)."""
    rows = await database.fetch("select * from penstock.take_messages($1, $2, $3, $4)", name, member, keys, limit)
    return [(row["key"], row["data"]) for row in rows]


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()
