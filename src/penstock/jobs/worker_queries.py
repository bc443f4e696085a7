"""One typed function for each SQL function about workers, and about the maintenance that they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

import orjson

from penstock.jobs import claim_queries
from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to a heartbeat; `known` is False when the worker was declared dead."""

    known: bool
    cancelled: list[UUID]
    leases: list[int]
    workers: int


@dataclass(frozen=True, slots=True)
class DueWork:
    """The answer to `due_work`.

    Attributes:
        promoted: Number of jobs that were made ready.
        due_in_s: Seconds until the next job is due, by the database's clock; None: no job is deferred.
        due: What else has to be done, see `penstock.due_work`.
    """

    promoted: int
    due_in_s: float | None
    due: frozenset[str]


async def due_work(database: Database) -> DueWork:
    """Make due jobs ready, and ask what else has to be done for the whole database."""
    row = await database.fetchrow("select promoted, due_in_s, due from penstock.due_work()")
    return DueWork(int(row["promoted"]), row["due_in_s"], frozenset(row["due"]))


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
    ((recovered, xid),) = await database.fetch("select penstock.recover(), pg_current_xact_id_if_assigned()::text")
    if recovered:
        await claim_queries.count_quarantined(database, xid)
    return int(recovered)


async def prune(database: Database, keep: timedelta | None) -> dict[str, int]:
    """Drop the partitions of the archive whose jobs were kept for long enough. Returns the jobs dropped, by partition."""
    return {row["partition"]: row["jobs"] for row in await database.fetch("select * from penstock.prune($1)", keep)}


async def prune_due(database: Database) -> dict[str, int]:
    """As `prune`, by the retention that the database has, and a bounded part of it: until nothing is left to drop."""
    return {row["partition"]: row["jobs"] for row in await database.fetch("select * from penstock.prune_due()")}


async def may_change_retention(database: Database) -> bool:
    """Whether the role that is logged in may store any retention, and not only a longer one."""
    return bool(await database.fetchval("select has_function_privilege('penstock.change_retention(text, interval)', 'execute')"))


async def change_retention(database: Database, kind: str, keep: timedelta | None) -> bool:
    """Store how long workers keep finished jobs and messages (`jobs`), or what comes back from lakes (`history`). None: for ever.

    Returns whether that is a change.
    """
    return bool(await database.fetchval("select penstock.change_retention($1, $2)", kind, keep))


async def lengthen_retention(database: Database, kind: str, keep: timedelta | None) -> bool:
    """As `change_retention`, if it is longer than what is stored."""
    return bool(await database.fetchval("select penstock.lengthen_retention($1, $2)", kind, keep))


async def stored_retention(database: Database) -> dict[str, timedelta | None]:
    """How long workers keep things, by kind."""
    return {row["kind"]: row["keep"] for row in await database.fetch("select kind, keep from penstock.retention")}


async def register_worker(
    database: Database,
    worker: str,
    names: Sequence[str],
    host: str,
    pid: int,
    concurrency: int,
    dead_after: timedelta,
    works_on: Mapping[str, Sequence[str] | Mapping[str, str]] | None = None,
    *,
    version: str | None = None,
    code_version: str | None = None,
    supervisor: str | None = None,
) -> None:
    """Register a worker. Raises `Conflict` when its id is taken.

    `works_on`: names beside those of job types, by kind: pools, consumers, schedules, leader_tasks. `version`: of Penstock;
    `code_version`: of the application's code. `supervisor`: id of what starts it again when it ends.
    """
    versions = {"version": version, "code_version": code_version}
    await database.fetch(
        "select penstock.register_worker($1, $2, $3, $4, $5, $6, $7::jsonb, $8)",
        worker,
        names,
        host,
        pid,
        concurrency,
        dead_after,
        orjson.dumps({**(works_on or {}), **{name: value for name, value in versions.items() if value is not None}}).decode(),
        supervisor,
    )


async def end_workers(database: Database, supervisor: str, pids: Sequence[int], how: Sequence[str]) -> int:
    """Report processes of a supervisor that have ended, and how. Returns how many of them were workers that had not left."""
    return int(await database.fetchval("select penstock.end_workers($1, $2::integer[], $3)", supervisor, pids, how, retry=True))


async def heartbeat(database: Database, worker: str, in_flight: int, state: str) -> Heartbeat:
    """Report that a worker is alive."""
    row = await database.fetchrow("select * from penstock.heartbeat($1, $2, $3)", worker, in_flight, state)
    return Heartbeat(row["known"], row["cancelled"] or [], row["leases"] or [], row["workers"])


async def note_halted(database: Database, worker: str, consumer: str, error: str) -> None:
    """Record that a consumer of a worker has halted while the worker continues."""
    await database.fetch("select penstock.note_halted($1, $2, $3)", worker, consumer, error)


async def note_keys(database: Database, worker: str, key_ids: Sequence[str], no_key: Mapping[str, str | None]) -> None:
    """Record the ids of the keys that a worker has, and what it does not work on for want of a key; see `penstock.note_keys`."""
    await database.fetch("select penstock.note_keys($1, $2, $3::jsonb)", worker, key_ids, orjson.dumps(dict(no_key)).decode())


async def missing_keys(database: Database, names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Those of the types in which jobs wait that are encrypted with none of these keys, with the id of the key of one."""
    rows = await database.fetch("select * from penstock.missing_keys($1, $2)", names, keys)
    return {row["name"]: row["key_id"] for row in rows}


async def unregister_worker(database: Database, worker: str) -> None:
    """Unregister a worker that ends in order."""
    await database.fetch("select penstock.unregister_worker($1)", worker)


async def wait_for_jobs(database: Database, worker: str, names: Sequence[str]) -> None:
    """Register a worker as idle, so that new jobs notify it."""
    await database.fetch("select penstock.wait_for_jobs($1, $2)", worker, names)


@dataclass(frozen=True, slots=True)
class LockedWork:
    """A job type, pool or consumer group (stream/group) in which work waits for a key of encryption.

    Attributes:
        name: Its name.
        key_id: Id of the key; None: any key, since it is encrypted and who lacks it has none.
        lacking: Live workers and members of it that lack the key.
        holders: Live workers and members of it that have the key.
    """

    name: str
    key_id: str | None
    lacking: list[str]
    holders: list[str]


async def locked_work(database: Database) -> list[LockedWork]:
    """Up to 1,000 job types, pools and consumer groups with work for which a worker of them lacks the key."""
    return [LockedWork(*row) for row in await database.fetch("select * from penstock.locked_work()")]


@dataclass(frozen=True, slots=True)
class Quarantined:
    """How many jobs of a type were quarantined within a day, and the latest of them."""

    name: str
    jobs: int
    latest: UUID


async def recently_quarantined(database: Database) -> list[Quarantined]:
    """The types of the latest 1,000 jobs that were quarantined within a day."""
    return [Quarantined(*row) for row in await database.fetch("select * from penstock.recently_quarantined()")]
