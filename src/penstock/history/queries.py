"""One typed function for each SQL function about the archive in commit order. They only convert rows to plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

import orjson

from penstock.postgres.database import Database

CHANNEL = "penstock_archive"


@dataclass(frozen=True, slots=True)
class Blocks:
    """A table of the archive: its first day, the day after its last one, its size in blocks, and about how many jobs it has."""

    relation: str
    day: date
    until: date
    blocks: int
    jobs: int


async def snapshot(database: Database) -> str:
    """The current snapshot, as text."""
    return str(await database.fetchval("select pg_current_snapshot()::text"))


async def wait(database: Database, reader: str, waiting: bool) -> None:
    """Register a reader as idle, or remove its registration."""
    await database.fetch("select penstock.wait_for_history($1, $2)", reader, waiting)


async def counts(
    database: Database,
    late: Sequence[int],
    low: int,
    high: int,
    without: Sequence[int],
    part: int | None,
    after: UUID | None,
    limit: int,
) -> list[tuple[int, int]]:
    """The numbers of jobs by transaction, in order, for about the first `limit` jobs."""
    rows = await database.fetch(
        "select xid::text::bigint as xid, jobs from penstock.archive_counts("
        "$1::text[]::xid8[], $2::text::xid8, $3::text::xid8, $4::text[]::xid8[], $5::text::xid8, $6, $7)",
        [str(xid) for xid in late],
        str(low),
        str(high),
        [str(xid) for xid in without],
        None if part is None else str(part),
        after,
        limit,
    )
    return [(row["xid"], row["jobs"]) for row in rows]


async def cuts(database: Database, xid: int, after: UUID | None, until: UUID | None, every: int) -> list[UUID]:
    """Boundaries at which the jobs of one transaction are divided."""
    rows = await database.fetch("select id from penstock.archive_cuts($1::text::xid8, $2, $3, $4)", str(xid), after, until, every)
    return [row["id"] for row in rows]


async def start(database: Database, since: datetime) -> str:
    """A snapshot that sees no job that finished at `since` or later."""
    return str(await database.fetchval("select penstock.archive_start($1)", since))


async def lost(database: Database, seen: str) -> list[tuple[date, int]]:
    """Days with jobs that this snapshot does not see and that were pruned, and the numbers of their jobs."""
    rows = await database.fetch("select day, jobs from penstock.archive_lost($1::text::pg_snapshot)", seen)
    return [(row["day"], row["jobs"]) for row in rows]


async def restored(database: Database) -> list[tuple[int, int]]:
    """The restores in which something was lost: their numbers, and the next transaction of the database after each."""
    rows = await database.fetch("select number, next_xid::text::bigint as next_xid from penstock.restored()")
    return [(row["number"], row["next_xid"]) for row in rows]


async def blocks(database: Database) -> list[Blocks]:
    """The tables of the archive, by their first days."""
    return [Blocks(*tuple(row)) for row in await database.fetch("select * from penstock.archive_blocks()")]


async def queue_blocks(database: Database) -> int:
    """The number of blocks of the table of queued jobs."""
    return int(await database.fetchval("select pg_relation_size('penstock.queued_jobs') / current_setting('block_size')::bigint"))


async def scan(
    database: Database,
    relation: str,
    columns: Sequence[str],
    filters: Sequence[dict[str, Any]],
    range: dict[str, Any],
    seldom: Sequence[str] = (),
) -> str | None:
    """A query that reads a range of a table; None when the table was pruned."""
    text = await database.fetchval(
        "select penstock.scan($1, $2, $3::jsonb, $4::jsonb, $5)",
        relation,
        columns,
        orjson.dumps(filters).decode(),
        orjson.dumps(range).decode(),
        list(seldom),
    )
    return None if text is None else str(text)
