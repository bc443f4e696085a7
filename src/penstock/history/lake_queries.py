"""One typed function for each SQL function about lakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.jobs.spark_attempt import SparkAttempt, fenced
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
    erasures: int = 0


@dataclass(frozen=True, slots=True)
class LakeErasure:
    """An erasure that waits for lakes: what it removes, and the lakes from which it has."""

    id: UUID
    subject: dict[str, Any]
    lakes: list[str]

    @property
    def key(self) -> str | None:
        """The key of the jobs."""
        return self.subject.get("key")

    @property
    def job(self) -> str | None:
        """The id of the one job."""
        return self.subject.get("job")

    @property
    def field(self) -> str | None:
        """The field of their payloads."""
        return self.subject.get("field")

    @property
    def value(self) -> str | None:
        """The value of the field."""
        return self.subject.get("value")

    @property
    def word(self) -> str:
        """The key, the value or the id: what no text may have as a word."""
        return str(self.key or self.value or self.job)


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


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run of a workflow that has ended.

    Attributes:
        id: Id of the run, which is a job group.
        name: Id that was given at its start.
        workflow: Name of the workflow.
        status: How it ended.
        retry_of: Id of the run that it retried, or None.
        started_at: Time of its start.
        finished_at: Time of its end.
        duration_s: Seconds from its start to its end.
        steps: Number of its steps.
        shared: Number of steps that succeeded in the run that it retried, and did not run again.
        succeeded: Number of the other steps that succeeded.
        failed: Number of steps that failed.
        cancelled: Number of steps that were cancelled.
        expired: Number of steps that expired.
    """

    id: UUID
    name: str
    workflow: str
    status: str
    retry_of: str | None
    started_at: datetime
    finished_at: datetime
    duration_s: float
    steps: int
    shared: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int


@dataclass(frozen=True, slots=True)
class WorkflowSummary:
    """The runs of a workflow that ended in a period: how many, how they ended, and the median and the longest duration."""

    workflow: str
    runs: int
    succeeded: int
    failed: int
    others: int
    median_s: float
    longest_s: float
    last_at: datetime


_RUN = (
    "id, name, workflow, status::text, retry_of, started_at, finished_at, duration_s, steps, shared, succeeded, failed,"
    " cancelled, expired"
)
_LAKE = "name, uri, batch, seen, jobs, guards, updated_at, erasures"


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
    erasures: int,
    of: SparkAttempt | None = None,
    runs: Sequence[PastRun] = (),
) -> bool:
    """Make a batch part of a lake. Returns False when it already is.

    Raises:
        Conflict: Jobs were erased meanwhile, or the attempt of the Spark job that wrote it (`of`) does not run any more.
    """
    done = await database.fetchval(
        *fenced(
            "select done from penstock.commit_lake_batch("
            "$1, $2, $3, $4, $5::jsonb, $6::jsonb, $7::jsonb, $8::jsonb, $9, $10::jsonb) as done",
            lake,
            batch,
            seen,
            jobs,
            *(_dump(value) for value in (files, rollups, use, failures)),
            erasures,
            _dump(list(runs)),
            of=of,
        )
    )
    return bool(done)


async def ended_runs(database: Database, seen: str, until: str) -> list[PastRun]:
    """The runs of workflows that ended between two positions in the archive; an empty text is the beginning."""
    rows = await database.fetch("select * from penstock.ended_runs($1, $2::text::pg_snapshot)", seen, until)
    return [PastRun(*tuple(row)) for row in rows]


async def runs(
    database: Database, lake: str, workflow: str | None = None, limit: int = 50, since: datetime | None = None
) -> list[PastRun]:
    """The runs of a workflow, or of all, that ended last, the latest first."""
    rows = await database.fetch(
        f"select {_RUN} from penstock.run_history"  # noqa: S608
        " where lake = $1 and ($2::text is null or workflow = $2) and ($3::timestamptz is null or finished_at >= $3)"
        " order by finished_at desc, id desc limit $4",
        lake,
        workflow,
        since,
        limit,
    )
    return [PastRun(*tuple(row)) for row in rows]


async def workflow_summaries(
    database: Database, lake: str, since: datetime, until: datetime, limit: int = 100
) -> list[WorkflowSummary]:
    """The workflows of which most runs ended in a period."""
    rows = await database.fetch(
        "select workflow, count(*), count(*) filter (where status = 'succeeded'), count(*) filter (where status = 'failed'),"
        " count(*) filter (where status not in ('succeeded', 'failed')),"
        " percentile_cont(0.5) within group (order by duration_s), max(duration_s), max(finished_at)"
        " from penstock.run_history where lake = $1 and finished_at >= $2 and finished_at < $3"
        " group by workflow order by 2 desc, 1 limit $4",
        lake,
        since,
        until,
        limit,
    )
    return [WorkflowSummary(*tuple(row)) for row in rows]


async def prune_history(database: Database, keep: timedelta) -> int:
    """Delete a bounded number of rows that came back from lakes and are older. Returns the number of them."""
    return int(await database.fetchval("select penstock.prune_history($1)", keep))


async def prune_history_due(database: Database) -> int:
    """As `prune_history`, by the retention that the database has."""
    return int(await database.fetchval("select penstock.prune_history_due()"))


async def swap_files(database: Database, lake: str, gone: Sequence[str], batch: int, files: Sequence[LakeFile]) -> None:
    """Replace files by others with the same rows. Raises `Conflict`."""
    await database.fetch("select penstock.swap_lake_files($1, $2, $3, $4::jsonb)", lake, gone, batch, _dump(files))


async def erasures(database: Database) -> list[LakeErasure]:
    """The erasures that wait for lakes, the oldest first."""
    rows = await database.fetch(
        "select operations.id, operations.filter, erasures.lakes from penstock.operations"
        " join penstock.erasures on erasures.operation = operations.id"
        " where operations.state = 'running' and operations.phase = 'lake'"
        " and exists (select from penstock.lakes where name <> all (erasures.lakes))"
        " order by operations.started_at, operations.id"
    )
    return [LakeErasure(row[0], orjson.loads(row[1]), row[2]) for row in rows]


async def erase_lake_file(database: Database, lake: str, path: str, files: Sequence[LakeFile]) -> None:
    """Put a file with fewer rows, or none, in the place of another one. Raises `Conflict`."""
    await database.fetch("select penstock.erase_lake_file($1, $2, $3::jsonb)", lake, path, _dump(files))


async def fence_lake(database: Database, lake: str, batch: int, subject: dict[str, Any], ids: Sequence[str]) -> None:
    """Refuse batches that were read before, and forget what came back of these jobs. Raises `Conflict` after a further batch."""
    await database.fetch(
        "select penstock.fence_lake($1, $2, $3::jsonb, $4::uuid[])", lake, batch, _dump(subject), [UUID(id) for id in ids]
    )


async def finish_lake(database: Database, operation: UUID, lake: str, jobs: int) -> None:
    """Note that an erasure is done with a lake."""
    await database.fetch("select penstock.finish_lake($1, $2, $3)", operation, lake, jobs)


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
    # An id from the driver of PostgreSQL is a class of its own.
    return orjson.dumps(value, default=str).decode()
