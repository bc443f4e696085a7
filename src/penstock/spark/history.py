"""The history pipeline, which writes the archive in commit order to a lake, and its rollups to Postgres.

A micro-batch goes through these steps: Spark writes its files to a staging folder; the files are moved to their places; and one
transaction records the files, the rollups, the use of workers, the failures and the runs of workflows of the batch. A run is in
the first batch that sees the transaction which ended it. Before that transaction no part of
the batch counts, and a repeated batch first removes the files of its last attempt. After it the batch is never done again. A
crash between any two steps therefore costs only time.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.core.checks import check_choice, check_many
from penstock.core.logs import get_logger
from penstock.errors import Conflict, InvalidInput
from penstock.history import lake_queries as lakes
from penstock.history.delta import DeltaLog
from penstock.history.erasing import erase_from_lakes
from penstock.history.lake import Lake
from penstock.history.lake_queries import LakeFile, LakeRecord, PastRun
from penstock.jobs.spark_attempt import SparkAttempt, require_attempt
from penstock.spark import frames, schemas
from penstock.spark.blocking import Blocking
from penstock.spark.options import database_url
from penstock.spark.sketches import merged, quantiles
from penstock.spark.throttle import throttle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

log = get_logger("penstock.history")
MOST_HOT_KEYS = 8
_SMALL_FILES = 8
_SMALL_BYTES = 64 * 1024 * 1024
# Spark gives the Python process of a streaming query ten seconds to start, which no setting changes.
_STARTS = 3
_READS = 3
_LONGEST_FOLDER = 200
_STARTED_LATE = "Python worker failed to connect back"
# What the error of a query says that was being stopped. The stop closes the connection to the query's Python process, which Spark
# takes for a failure unless it was waiting at that moment.
_STOPPED = "Current State: TERMINATED"


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a run of the pipeline."""

    batches: int
    jobs: int


class Pipeline:
    """Fills one lake.

    Args:
        spark: A session.
        url: URL of the database.
        lake: The lake.
        max_rows: Largest number of jobs in a micro-batch.
        delta: Whether to create Delta tables; a lake that has them keeps them.
        throttle_timeout: How long a micro-batch waits while other processes use more than half of the processors of this machine.
        after_step: Called with the name of each step when it is done, for tests that kill the process at each.
    """

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        lake: Lake,
        *,
        max_rows: int = 200_000,
        delta: bool = False,
        throttle_timeout: timedelta = timedelta(0),
        after_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._spark = spark
        self._url = url
        self._lake = lake
        self._max_rows = max_rows
        self._delta = delta or DeltaLog(lake).exists()
        self._throttle_timeout = throttle_timeout
        self._after_step = after_step
        self._ran: list[int] = []
        self._of = SparkAttempt.here()
        self._begun = False

    def run(self, *, continuous: bool = False, interval: str = "10 seconds") -> Ran:
        """Bring the lake up to date; with `continuous` keep it up to date until the query or the process is stopped.

        Spark ends a query whose Python process does not start within ten seconds, as on a machine under load. The query is then
        started again, three times in all, with the log entry `history_start_failed`; it had read nothing.

        Raises:
            StreamingQueryException: A batch failed; the next run repeats it.
            Conflict: The lake has another URI.
        """
        with Blocking(self._url) as database:
            record = database.run(lakes.open_lake(database.database, self._lake.name, self._lake.uri))
            if self._delta:
                follow(database, self._lake)
            database.run(erase_from_lakes(database.database, self._lake.name))
        log.info("history_run", lake=record.name, uri=record.uri, batch=record.batch)
        source = (
            self._spark.readStream.format("penstock")
            .option("url", self._url)
            .option("table", "archived_jobs")
            .option("startingOffsets", "earliest")
            .option("maxRowsPerTrigger", str(self._max_rows))
            .load()
        )
        writer = (
            source.writeStream.queryName(f"penstock-history-{self._lake.name}")
            .foreachBatch(self._batch)
            .option("checkpointLocation", self._lake.checkpoint)
        )
        writer = writer.trigger(processingTime=interval) if continuous else writer.trigger(availableNow=True)
        self._begun = False
        for start in range(1, _STARTS + 1):
            if self._to_its_end(writer, start):
                break
        return Ran(len(self._ran), sum(self._ran))

    def _to_its_end(self, writer: DataStreamWriter, start: int) -> bool:
        """Run the query; False when it is to be started again, because its Python process started too late."""
        from pyspark.errors import StreamingQueryException

        query = writer.start()
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if _STOPPED in str(error):
                return True
            if self._begun or start == _STARTS or _STARTED_LATE not in str(error):
                raise
            log.warning("history_start_failed", lake=self._lake.name, start=start, of=_STARTS, reason=_STARTED_LATE)
            return False
        finally:
            if query.isActive:
                query.stop()
        return True

    def _batch(self, archive: DataFrame, number: int) -> None:
        self._begun = True
        throttle(self._throttle_timeout)
        with Blocking(self._url) as database:
            self._check_attempt(database)
            record = database.run(lakes.open_lake(database.database, self._lake.name, self._lake.uri))
            if record.batch >= number:
                # A crash came after the commit to the lake, before Spark recorded the batch.
                self._lake.clear(number)
                return
            for attempt in range(1, _READS + 1):
                # What an erasure has deleted from the archive must not come to the lake after it was erased there.
                database.run(erase_from_lakes(database.database, self._lake.name))
                record = database.run(lakes.open_lake(database.database, self._lake.name, self._lake.uri))
                try:
                    return self._do(database, record, archive, number)
                except Exception:
                    now = database.run(lakes.open_lake(database.database, self._lake.name, self._lake.uri))
                    if attempt == _READS or now.erasures == record.erasures:
                        raise
                    log.info("history_batch_repeated", lake=self._lake.name, batch=number, reason="jobs were erased meanwhile")

    def _do(self, database: Blocking, record: LakeRecord, archive: DataFrame, number: int) -> None:
        lake = self._lake
        # Files of this number can only be those of an earlier attempt.
        lake.discard(number)
        self._write(frames.jobs(archive).drop("xid"), number, "jobs")
        self._after_step("jobs written")
        staged = self._staged(number)
        self._write(frames.attempts(staged), number, "attempts")
        self._after_step("attempts written")
        rolled = frames.rollups(staged).localCheckpoint()
        self._write(rolled, number, "rollups")
        rows = rolled.drop("day", "type").collect()
        hot = _hot_keys(frames.hot_keys(staged).collect())
        use = [_plain(row.asDict()) for row in frames.worker_use(staged).collect()]
        attempts = self._spark.read.schema(ATTEMPTS).parquet(lake.staging(number, "attempts"))
        failures = [_plain(row.asDict()) for row in frames.failures(attempts).collect()]
        runs = database.run(lakes.ended_runs(database.database, record.seen, self._seen(number)))
        if runs:
            self._write(self._spark.createDataFrame([_row_of(run) for run in runs], RUNS), number, "runs")
        self._after_step("rollups written")
        self._check_attempt(database)
        files = [file for kind in SCHEMAS for file in lake.adopt(number, kind, record.erasures)]
        self._after_step("files moved")
        known = database.run(
            lakes.sketches(database.database, lake.name, [row.name for row in rows], [_aware(row.minute) for row in rows])
        )
        done = sum(file.rows for file in files if file.kind == "jobs")
        committed = database.run(
            lakes.commit_batch(
                database.database,
                lake.name,
                number,
                self._seen(number),
                done,
                files,
                [_merged(row, known.get((row.name, _aware(row.minute))), hot[row.name, row.minute]) for row in rows],
                use,
                failures,
                record.erasures,
                self._of,
                runs,
            )
        )
        self._after_step("committed")
        if self._delta:
            follow(database, lake)
        lake.clear(number)
        if committed:
            self._ran.append(done)
            log.info("history_batch", lake=lake.name, batch=number, jobs=done, runs=len(runs), files=len(files))

    def _check_attempt(self, database: Blocking) -> None:
        """As a Spark job: leave the files of the lake to the attempt that runs. Raises `Conflict`."""
        if self._of is not None:
            database.run(require_attempt(database.database, self._of))

    def _write(self, frame: DataFrame, number: int, kind: str) -> None:
        # One file for each day and type, in the order of ids, so that a look-up by id skips most of the file.
        shuffled = frame.repartition("day", "type")
        ordered = shuffled.sortWithinPartitions("day", "type", "id") if "id" in frame.columns else shuffled
        target = self._lake.staging(number, kind)
        ordered.write.mode("overwrite").partitionBy("day", "type").option("compression", "zstd").parquet(target)

    def _staged(self, number: int) -> DataFrame:
        return self._spark.read.schema(JOBS).parquet(self._lake.staging(number, "jobs"))

    def _seen(self, number: int) -> str:
        """The position that Spark has recorded as the end of the batch."""
        lines = self._lake.text(f"_checkpoint/offsets/{number}").splitlines()
        return str(json.loads(lines[-1])["seen"])


JOBS = (
    schemas.ddl({name: kind for name, kind in schemas.ARCHIVED_JOBS.items() if name != "xid"})
    + ", minute timestamp, delay_s double, run_s double, day date, type string"
)
ATTEMPTS = (
    "id string, name string, key string, number int, outcome string, worker string, started_at timestamp, ended_at timestamp,"
    " error_type string, error_message string, day date, type string"
)
ROLLUPS = (
    "name string, minute timestamp, succeeded long, failed long, expired long, cancelled long, retries long, delay_s double,"
    " run_s double, delay_sketch binary, run_sketch binary, day date, type string"
)
RUNS = (
    "id string, name string, workflow string, status string, retry_of string, started_at timestamp, finished_at timestamp,"
    " duration_s double, steps long, shared long, succeeded long, failed long, cancelled long, expired long, day date,"
    " type string"
)
SCHEMAS = {"jobs": JOBS, "attempts": ATTEMPTS, "rollups": ROLLUPS, "runs": RUNS}


def follow(database: Blocking, lake: Lake) -> None:
    """Bring the Delta tables of a lake up to its manifest."""
    record = next(known for known in database.run(lakes.lakes(database.database)) if known.name == lake.name)
    for kind in SCHEMAS:
        DeltaLog(lake).follow(kind, database.run(lakes.files(database.database, lake.name, kind)), record.batch)


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """What a scheduled run of the pipeline gets: the payload of its job.

    Attributes:
        lake: Name of the lake.
        uri: Where the lake is.
        max_rows: Largest number of jobs in a micro-batch.
        delta: Whether to create Delta tables.
    """

    lake: str
    uri: str
    max_rows: int = 200_000
    delta: bool = False


def run_scheduled(spark: SparkSession, run: ScheduledRun) -> dict[str, int]:
    """Bring a lake up to date, as the function of a Spark job. Returns the numbers of batches and jobs."""
    ran = Pipeline(spark, database_url({}), Lake(run.lake, run.uri), max_rows=run.max_rows, delta=run.delta).run()
    return {"batches": ran.batches, "jobs": ran.jobs}


def read_lake(
    spark: SparkSession,
    url: str,
    lake: str = "main",
    kind: str = "jobs",
    *,
    days: tuple[date, date] | None = None,
    types: Sequence[str] | None = None,
    version: int | None = None,
) -> DataFrame:
    """A lake as a DataFrame.

    Args:
        spark: A session.
        url: URL of the database.
        lake: Name of the lake.
        kind: `jobs`, `attempts`, `rollups`, or `runs` of workflows.
        days: First and last day (both included); None: all.
        types: Job types, or workflows of runs; None: all.
        version: Version of the Delta table, whose files are read whole, without `days` and `types`; None: the present state.

    Raises:
        InvalidInput: There is no such kind, or the days or types are of the wrong kind.
        NotFound: The version does not exist.
    """
    check_choice("kind", kind, tuple(SCHEMAS))
    if types is not None:
        check_many("types", types, 'types=["invoice"]')
    if days is not None and not (len(days) == 2 and all(isinstance(day, date) for day in days)):
        raise InvalidInput(
            f"days must be two dates, not {days!r:.100}", hint="For example: days=(date(2026, 1, 1), date(2026, 1, 31))"
        )
    with Blocking(url) as database:
        record = next((known for known in database.run(lakes.lakes(database.database)) if known.name == lake), None)
        files = database.run(lakes.files(database.database, lake, kind, days, types)) if record else []
    if record is not None and version is not None:
        uris = DeltaLog(Lake(record.name, record.uri)).files(kind, version)
        return spark.read.schema(SCHEMAS[kind]).option("basePath", f"{record.uri}/{kind}").parquet(*uris)
    if record is None or not files:
        return spark.createDataFrame([], SCHEMAS[kind])
    reader = spark.read.schema(SCHEMAS[kind]).option("basePath", f"{record.uri}/{kind}")
    return reader.parquet(*(f"{record.uri}/{file.path}" for file in files))


def compact(url: str, lake: Lake, *, at_least: int = _SMALL_FILES) -> int:
    """Replace the small files of each day and type by one file. Readers see the old files or the new one.

    In a lake with Delta tables the old files stay, for time travel, until `DeltaLog.vacuum`.

    Args:
        url: URL of the database.
        lake: The lake.
        at_least: Number of small files of a day and type from which on they are replaced.

    Returns:
        The number of files that were replaced.
    """
    replaced = 0
    delta = DeltaLog(lake).exists()
    with Blocking(url) as database:
        for kind in SCHEMAS:
            groups: dict[tuple[date, str], list[LakeFile]] = defaultdict(list)
            for file in database.run(lakes.files(database.database, lake.name, kind)):
                if file.bytes < _SMALL_BYTES:
                    groups[file.day, file.type].append(file)
            for (day, type), files in groups.items():
                if len(files) < at_least:
                    continue
                paths = [file.path for file in files]
                batch = max(int(path.rpartition("/b")[2].partition("-")[0].partition("c")[0]) for path in paths)
                table = lake.table(paths)
                path = f"{paths[0].rpartition('/')[0]}/b{batch:09}c{len(files)}-{datetime.now(UTC):%Y%m%d%H%M%S%f}.parquet"
                size = lake.write(path, table)
                new = LakeFile(kind, day, type, path, table.num_rows, size)
                try:
                    database.run(lakes.swap_files(database.database, lake.name, paths, batch, [new]))
                except Conflict:
                    # It may have jobs that were erased meanwhile.
                    lake.remove([path])
                    raise
                replaced += len(paths)
                if delta:
                    follow(database, lake)
                else:
                    lake.remove(paths)
    return replaced


def _row_of(run: PastRun) -> tuple[Any, ...]:
    """A run as a row of the lake."""
    values = {**asdict(run), "id": str(run.id), "day": run.finished_at.astimezone(UTC).date(), "type": _folder_of(run.workflow)}
    return tuple(values.values())


def _folder_of(workflow: str) -> str:
    """The name of a folder for the runs of a workflow: its name, or where that is too long for a folder, a hash of it."""
    return workflow if len(quote(workflow)) <= _LONGEST_FOLDER else hashlib.sha256(workflow.encode()).hexdigest()


def _hot_keys(rows: Sequence[Any]) -> dict[tuple[str, datetime], dict[str, int]]:
    found: dict[tuple[str, datetime], dict[str, int]] = defaultdict(dict)
    for row in rows:
        found[row.name, row.minute][row.key] = row["count"]
    return found


def _merged(row: Any, known: tuple[bytes | None, bytes | None, dict[str, int]] | None, hot: dict[str, int]) -> dict[str, Any]:
    """A rollup whose sketches and hot keys are merged with those that are stored."""
    old_delay, old_run, old_hot = known or (None, None, {})
    delay, run = merged([old_delay, row.delay_sketch]), merged([old_run, row.run_sketch])
    keys = {key: old_hot.get(key, 0) + hot.get(key, 0) for key in {**old_hot, **hot}}
    document = _plain(row.asDict())
    document |= {
        "delay_sketch": None if delay is None else base64.b64encode(delay).decode(),
        "run_sketch": None if run is None else base64.b64encode(run).decode(),
        "hot_keys": dict(sorted(keys.items(), key=lambda item: (-item[1], item[0]))[:MOST_HOT_KEYS]),
    }
    for name, sketch in (("delay", delay), ("run", run)):
        document |= dict(zip((f"{name}_p50", f"{name}_p95", f"{name}_p99"), quantiles(sketch), strict=True))
    return document


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _aware(value) if isinstance(value, datetime) else value for name, value in row.items()}


def _aware(moment: datetime) -> datetime:
    # Spark passes timestamps to Python without a zone, in the local one.
    return moment.astimezone(UTC)
