"""Bulk work: enqueue from whatever Spark reads, replay what the lake knows, export.

A source is cut into slices by a hash of its rows, the same ones every time. Each slice is written under its number as the
epoch of one writer, so a run that was interrupted goes on with the first slice that is not in the queue, and one that was
finished does nothing.
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
from penstock.jobs import queries as jobs
from penstock.spark import staging
from penstock.spark.blocking import Blocking
from penstock.spark.options import job_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SLICE = 500_000
_SECONDS_OF_A_SLICE = 5.0


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a source are what of a job.

    Attributes:
        data: Column with the payload: JSON text, a struct or a map; None: all columns together.
        key, id, priority, run_after, expires_at, unique_key: Columns of these; None: left at their defaults.
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
    """What a bulk enqueue did: the rows of the source, and those that earlier tries of the run had enqueued."""

    run: str
    rows: int
    skipped: int


def as_jobs(frame: DataFrame, columns: Columns) -> DataFrame:
    """The rows as the sink takes them. Raises `InvalidInput` when a column is not there."""
    chosen = {field.name: getattr(columns, field.name) for field in fields(columns) if getattr(columns, field.name)}
    if missing := [name for name in chosen.values() if name not in frame.columns]:
        raise InvalidInput(f"the source has no column {missing[0]}", hint=f"It has: {', '.join(frame.columns)}.")
    kinds = {"key": "string", "id": "string", "unique_key": "string", "priority": "int"}
    data = F.col(f"`{columns.data}`") if columns.data else F.struct(*(F.col(f"`{name}`") for name in frame.columns))
    if columns.data is None or isinstance(frame.schema[columns.data].dataType, (StructType, MapType)):
        # As text here already, since slices are made by a hash, and Spark hashes no maps.
        data = F.to_json(data)
    made = {name: F.col(f"`{source}`") for name, source in chosen.items() if name != "data"}
    return frame.select(
        data.alias("data"),
        *((column.cast(kinds[name]) if name in kinds else column.cast("timestamp")).alias(name) for name, column in made.items()),
    )


def check_type(url: str, job: str) -> None:
    """Raise `NotFound` unless there is such a job type."""
    with Blocking(url) as database:
        if job not in {record.name for record in database.run(jobs.job_types(database.database))}:
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
        url: The database.
        job: Their job type, which has to exist.
        run: Name of the run; a run of the same name goes on where it was interrupted. None: a new one.
        rate: Most jobs a second.
        slice_rows: Jobs that are enqueued in one transaction, about.
        progress: Called with the rows done and all rows, after each slice.

    Raises:
        NotFound: There is no such job type.
        InvalidInput: The columns are not those of jobs.
    """
    check_type(url, job)
    run = run or secrets.token_hex(4)
    prefix = f"bulk {run} in "
    with Blocking(url) as database:
        known = database.run(staging.writers(database.database, prefix, job_target(job)))
    total = frame.count()
    if known:
        # The run was begun: the slices have to be those of then.
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
        # What was written is counted where it was written, so that the source is not read again for it.
        with Blocking(url) as database:
            written += database.run(staging.written(database.database, writer, job_target(job)))
        progress(written, total)
        if rate is not None and (ahead := (written - skipped) / rate - (time.monotonic() - started)) > 0:
            time.sleep(ahead)
    return Done(run, total, skipped)


def replayed(history: DataFrame, run: str) -> DataFrame:
    """Jobs of the lake as new jobs, whose ids follow from the old ones and the name of the run: repeating it is harmless."""
    digest = F.md5(F.concat_ws("\n", F.lit(run), F.col("id")))
    groups = [F.substring(digest, at, length) for at, length in ((1, 8), (9, 4), (14, 3), (18, 3), (21, 12))]
    # RFC 9562: version 8, whose bits are ours to choose.
    id = F.concat(groups[0], F.lit("-"), groups[1], F.lit("-8"), groups[2], F.lit("-8"), groups[3], F.lit("-"), groups[4])
    return history.select("name", "data", "key", "priority", id.alias("id"))


def replay(history: DataFrame, url: str, run: str) -> int:
    """Enqueue jobs of the lake again, each once for each name of a run. Returns how many there were."""
    frame = replayed(history, run)
    count = frame.count()
    # Once by the ids alone. A writer's name would have a run of another condition do nothing.
    frame.write.format("penstock").options(url=url).mode("append").save()
    return count


def source(
    spark: SparkSession, format: str, paths: Sequence[str], options: dict[str, str], select: str | None = None
) -> DataFrame:
    """What Spark reads from somewhere; `select` is SQL over it as the table `source`."""
    reader = spark.read.format(format).options(**options)
    frame = reader.load(list(paths)) if paths else reader.load()
    if select is None:
        return frame
    frame.createOrReplaceTempView("source")
    return spark.sql(select)
