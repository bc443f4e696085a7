"""One typed function for each SQL function about lakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

import orjson

from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class LakeRecord:
    """A lake with its position. `batch` is -1 before the first batch."""

    name: str
    uri: str
    batch: int
    seen: str
    jobs: int
    guards: bool
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A file that is part of a lake; `path` is below its URI."""

    kind: str
    day: date
    type: str
    path: str
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Rollup:
    """The rollup of a job type in a minute, as Postgres stores it."""

    name: str
    minute: datetime
    succeeded: int
    failed: int
    expired: int
    cancelled: int
    retries: int
    delay_s: float
    run_s: float
    delay_sketch: bytes | None
    run_sketch: bytes | None
    hot_keys: dict[str, int]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error signature with its number of occurrences in a period and in the one before it."""

    name: str
    kind: str
    message: str
    signature: str
    failures: int
    failures_before: int
    new: bool
    sample: str
    sample_id: UUID
    first_at: datetime
    last_at: datetime


_LAKE = "name, uri, batch, seen, jobs, guards, updated_at"


async def open_lake(database: Database, name: str, uri: str) -> LakeRecord:
    """A lake by name, which is created unless it exists. Raises `Conflict` when it has another URI."""
    row = await database.fetchrow(f"select {_LAKE} from penstock.open_lake($1, $2)", name, uri)  # noqa: S608
    return LakeRecord(*tuple(row))


async def lakes(database: Database) -> list[LakeRecord]:
    """All lakes."""
    rows = await database.fetch(f"select {_LAKE} from penstock.lakes order by name")  # noqa: S608
    return [LakeRecord(*tuple(row)) for row in rows]


async def files(
    database: Database, lake: str, kind: str, days: tuple[date, date] | None = None, types: Sequence[str] | None = None
) -> list[LakeFile]:
    """The files of a lake, of all days or from the first to the last (both included), and of all or some job types."""
    rows = await database.fetch(
        "select kind, day, type, path, rows, bytes from penstock.lake_files"
        " where lake = $1 and kind = $2 and ($3::date is null or day between $3 and $4)"
        " and ($5::text[] is null or type = any ($5))"
        " order by day, type, path",
        lake,
        kind,
        days[0] if days else None,
        days[1] if days else None,
        types,
    )
    return [LakeFile(*tuple(row)) for row in rows]


async def sketches(
    database: Database, lake: str, names: Sequence[str], minutes: Sequence[datetime]
) -> dict[tuple[str, datetime], tuple[bytes | None, bytes | None, dict[str, int]]]:
    """The stored sketches and hot keys, by type and minute."""
    rows = await database.fetch("select * from penstock.lake_sketches($1, $2, $3)", lake, names, minutes)
    return {(row["name"], row["minute"]): (row["delay_sketch"], row["run_sketch"], orjson.loads(row["hot_keys"])) for row in rows}


async def commit_batch(
    database: Database,
    lake: str,
    batch: int,
    seen: str,
    jobs: int,
    files: Sequence[LakeFile],
    rollups: Sequence[dict[str, Any]],
    use: Sequence[dict[str, Any]],
    failures: Sequence[dict[str, Any]],
) -> bool:
    """Make a batch part of a lake. Returns False when it already is."""
    done = await database.fetchval(
        "select penstock.commit_lake_batch($1, $2, $3, $4, $5::jsonb, $6::jsonb, $7::jsonb, $8::jsonb)",
        lake,
        batch,
        seen,
        jobs,
        *(_dump(value) for value in (files, rollups, use, failures)),
    )
    return bool(done)


async def swap_files(database: Database, lake: str, gone: Sequence[str], batch: int, files: Sequence[LakeFile]) -> None:
    """Replace files by others with the same rows. Raises `Conflict`."""
    await database.fetch("select penstock.swap_lake_files($1, $2, $3, $4::jsonb)", lake, gone, batch, _dump(files))


async def rollups(database: Database, lake: str, since: datetime, until: datetime) -> list[Rollup]:
    """The rollups of a period, by type and minute."""
    rows = await database.fetch(
        "select name, minute, succeeded, failed, expired, cancelled, retries, delay_s, run_s, delay_sketch, run_sketch, hot_keys"
        " from penstock.rollups where lake = $1 and minute >= $2 and minute < $3 order by name, minute",
        lake,
        since,
        until,
    )
    return [Rollup(**{**dict(row), "hot_keys": orjson.loads(row["hot_keys"])}) for row in rows]


async def worker_use(database: Database, lake: str, since: datetime, until: datetime) -> list[tuple[str, int, float, int]]:
    """The jobs, the seconds that handlers ran, and the minutes with work of each worker."""
    rows = await database.fetch(
        "select worker, sum(jobs)::bigint, sum(busy_s), count(*) from penstock.worker_use"
        " where lake = $1 and minute >= $2 and minute < $3 group by worker order by 2 desc",
        lake,
        since,
        until,
    )
    return [(row[0], row[1], row[2], row[3]) for row in rows]


async def failures(database: Database, lake: str, until: date, days: int) -> list[Failure]:
    """Error signatures of a number of days, and their failures in as many days before."""
    rows = await database.fetch("select * from penstock.failure_report($1, $2, $3)", lake, until, days)
    return [Failure(*tuple(row)) for row in rows]


def _dump(value: object) -> str:
    return orjson.dumps(value).decode()
