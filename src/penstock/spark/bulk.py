"""Bulk runs: enqueue from any source that Spark reads, replay jobs of a lake, export.

A source is cut into slices by a hash of its rows, which is the same each time. Each slice is written under its number as the
epoch of one writer. A run that was interrupted therefore continues with the first slice that is not in the queue, and a run
that was finished does nothing.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql.types import MapType, StructType

from penstock.errors import InvalidInput, NotFound
from penstock.jobs import type_queries
from penstock.jobs.queries import own_ids
from penstock.spark import staging
from penstock.spark.blocking import Blocking
from penstock.spark.jobs.options import job_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLICE = 500_000
_SECONDS_OF_A_SLICE = 5.0


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a source from which the fields of jobs are taken.

    Attributes:
        data: Column with the payload: JSON text, a struct or a map; None: all columns together.
        key, id, priority, run_after, expires_at, unique_key: Columns with these fields; None: the default of the field.
    """

    data: str | None = None
    key: str | None = None
    id: str | None = None
    priority: str | None = None
    run_after: str | None = None
    expires_at: str | None = None
    unique_key: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a bulk enqueue: the rows of the source, and those that earlier attempts at the run had enqueued."""

    run: str
    rows: int
    skipped: int


def as_jobs(frame: DataFrame, columns: Columns) -> DataFrame:
    """The rows with the columns of the sink. Raises `InvalidInput` when a column does not exist."""
    chosen = {field.name: getattr(columns, field.name) for field in fields(columns) if getattr(columns, field.name)}
    if missing := [name for name in chosen.values() if name not in frame.columns]:
        raise InvalidInput(f"the source has no column {missing[0]}", hint=f"It has: {', '.join(frame.columns)}.")
    kinds = {"key": "string", "id": "string", "unique_key": "string", "priority": "int"}
    data = F.col(f"`{columns.data}`") if columns.data else F.struct(*(F.col(f"`{name}`") for name in frame.columns))
    if columns.data is None or isinstance(frame.schema[columns.data].dataType, (StructType, MapType)):
        # Maps become text before the rows are hashed for the slices, since Spark does not hash maps.
        data = F.to_json(data)
    made = {name: F.col(f"`{source}`") for name, source in chosen.items() if name != "data"}
    return frame.select(
        data.alias("data"),
        *((column.cast(kinds[name]) if name in kinds else column.cast("timestamp")).alias(name) for name, column in made.items()),
    )


def check_type(url: str, job: str) -> None:
    """Raise `NotFound` unless the job type exists."""
    with Blocking(url) as database:
        if job not in {record.name for record in database.run(type_queries.job_types(database.database))}:
            raise NotFound(f"no such job type: {job}", hint=f"Create it first: penstock types create {job}")


def enqueue(
    frame: DataFrame,
    url: str,
    job: str,
    *,
    run: str | None = None,
    rate: float | None = None,
    slice_rows: int = SLICE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Done:
    """Enqueue every row of a frame of the sink's columns (see `as_jobs`), once.

    Args:
        frame: The jobs. It has to give the same rows when the run is repeated.
        url: URL of the database.
        job: Job type, which has to exist.
        run: Name of the run; a run of the same name continues where it was interrupted. None: a new name.
        rate: Largest number of jobs a second.
        slice_rows: Approximate number of jobs that one transaction enqueues.
        progress: Called after each slice with the number of rows done and of all rows.

    Raises:
        NotFound: The job type does not exist.
        InvalidInput: The columns are not those of jobs.
    """
    check_type(url, job)
    run = run or secrets.token_hex(4)
    prefix = f"bulk {run} in "
    with Blocking(url) as database:
        known = database.run(staging.writers(database.database, prefix, job_target(job)))
    total = frame.count()
    if known:
        # The run was begun before, so its slices have to be the same.
        writer, done = known[0]
        slices = int(writer.removeprefix(prefix))
    else:
        if rate is not None:
            slice_rows = max(1, min(slice_rows, int(rate * _SECONDS_OF_A_SLICE)))
        slices = max(1, math.ceil(total / slice_rows))
        writer, done = f"{prefix}{slices}", -1
    place = F.pmod(F.xxhash64(*(F.col(f"`{name}`") for name in frame.columns)), F.lit(slices))
    skipped = frame.where(place <= done).count() if done >= 0 else 0
    written = skipped
    started = time.monotonic()
    for number in range(done + 1, slices):
        part = frame.where(place == number)
        (part.write.format("penstock").options(url=url, job=job, writer=writer, epoch=str(number)).mode("append").save())
        # The database has the number of rows written, so the source need not be read again to count them.
        with Blocking(url) as database:
            written += database.run(staging.written(database.database, writer, job_target(job)))
        progress(written, total)
        if rate is not None and (ahead := (written - skipped) / rate - (time.monotonic() - started)) > 0:
            time.sleep(ahead)
    return Done(run, total, skipped)


def replayed(history: DataFrame, salt: str) -> DataFrame:
    """Jobs of a lake as new jobs. Their ids follow from the old ids and the salt of the run, so a repeated run adds no jobs."""
    digest = F.sha2(F.concat_ws("\n", F.lit(salt), F.col("id")), 256)
    groups = [F.substring(digest, at, length) for at, length in ((1, 8), (9, 4), (14, 3), (18, 3), (21, 12))]
    # RFC 9562: the application chooses the bits of version 8.
    id = F.concat(groups[0], F.lit("-"), groups[1], F.lit("-8"), groups[2], F.lit("-8"), groups[3], F.lit("-"), groups[4])
    return history.select("name", "data", "key", "priority", id.alias("id"))


def replay(history: DataFrame, url: str, run: str) -> int:
    """Replay jobs of a lake, each once for each name of a run and role. Returns their number."""
    with Blocking(url) as database:
        # No other role can find the ids out, and enqueue other jobs under them.
        [salt] = database.run(own_ids(database.database, "bulk replay", [run]))
    frame = replayed(history, str(salt))
    count = frame.count()
    # The ids alone make each replay count once. Under the name of a writer, a run with another condition would do nothing.
    frame.write.format("penstock").options(url=url).mode("append").save()
    return count


def source(
    spark: SparkSession, format: str, paths: Sequence[str], options: dict[str, str], select: str | None = None
) -> DataFrame:
    """A source as a DataFrame. `select` is a query in SQL over it, as the table `source`."""
    reader = spark.read.format(format).options(**options)
    frame = reader.load(list(paths)) if paths else reader.load()
    if select is None:
        return frame
    frame.createOrReplaceTempView("source")
    return spark.sql(select)
