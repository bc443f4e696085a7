"""The options of reading and writing jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from penstock.errors import InvalidInput
from penstock.spark.jobs.offsets import Position
from penstock.spark.options import OF_WRITERS, WriteOptions, database_url, flag, moment, number, refuse_unknown

_OF_TABLES = (
    "url", "dataDir", "table", "columns", "pushdown", "rowsPerPartition", "minPartitions", "startingOffsets", "startingTimestamp",
    "endingOffsets", "maxRowsPerTrigger", "maxOffsetsPerTrigger", "waitS", "failOnDataLoss", "timeZone",
    # These select streams. They are listed so that the error for a misspelt one names the right one.
    "subscribe", "subscribePattern", "assign",
)  # fmt: skip
_OF_STREAMS = ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "endingTimestamp", "minOffsetsPerTrigger")


@dataclass(frozen=True, slots=True)
class JobReadOptions:
    """How to read jobs.

    Attributes:
        url: URL of the database.
        table: `archived_jobs` or `queued_jobs`.
        columns: Names of columns, separated by commas; None: all.
        pushdown: Whether the database evaluates filters.
        rows_per_partition: Approximate number of jobs of one task.
        min_partitions: Smallest number of tasks, as far as there are blocks.
        starting: `earliest`, `latest`, a time, or a position; None: the default of the kind of read.
        ending: End of a batch read in commit order; None: the latest position.
        max_rows: Largest number of jobs in one micro-batch; None: no limit.
        wait: How long to wait for jobs before a micro-batch ends empty.
        fail_on_data_loss: Whether it is an error when days were pruned before they were read.
    """

    url: str
    table: str
    columns: str | None
    pushdown: bool
    rows_per_partition: int
    min_partitions: int
    starting: str | datetime | Position | None
    ending: Position | None
    max_rows: int | None
    wait: timedelta
    fail_on_data_loss: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> JobReadOptions:
        """From the options of a reader. Raises `InvalidInput`."""
        options = {name.lower(): value for name, value in given.items()}
        if foreign := next((name for name in _OF_STREAMS if name.lower() in options), None):
            raise InvalidInput(f"the option {foreign} is for streams, not for tables", hint="Leave it out; see docs/spark.md.")
        refuse_unknown(options, _OF_TABLES, "reading jobs")
        most = options.get("maxrowspertrigger", options.get("maxoffsetspertrigger"))
        return cls(
            url=database_url(options),
            table=options.get("table", "archived_jobs").removeprefix("penstock."),
            columns=options.get("columns"),
            pushdown=flag(options, "pushdown", False),
            rows_per_partition=number(options, "rowsPerPartition", 250_000, 1, 10_000_000),
            min_partitions=number(options, "minPartitions", 1, 1, 10_000),
            starting=_starting(options),
            ending=_ending(options),
            max_rows=None if most is None else number({"maxrowspertrigger": most}, "maxRowsPerTrigger", 1, 1, 10**9),
            wait=timedelta(seconds=number(options, "waitS", 2.0, 0.0, 60.0)),
            fail_on_data_loss=flag(options, "failOnDataLoss", True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWriteOptions(WriteOptions):
    """How to write jobs.

    Attributes:
        job: Job type of all rows; None: the column `name` has it.
    """

    place: ClassVar[str] = "queue"
    events: ClassVar[bool] = False
    job: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> JobWriteOptions:
        """From the options of a writer. Raises `InvalidInput`."""
        options = {name.lower(): value for name, value in given.items()}
        refuse_unknown(options, (*OF_WRITERS, "job"), "writing jobs")
        return cls._parse(options, job=options.get("job"))

    @property
    def target(self) -> str:
        """What is written, see `penstock.sink_epochs`."""
        return job_target(self.job)


def job_target(job: str | None) -> str:
    """The target of a write of jobs of a type, or of several types (None)."""
    return "jobs" if job is None else f"job {job}"


def _starting(options: Mapping[str, str]) -> str | datetime | Position | None:
    offsets, time = options.get("startingoffsets"), options.get("startingtimestamp")
    if offsets is not None and time is not None:
        raise InvalidInput("startingOffsets and startingTimestamp exclude each other", hint="Give one of them.")
    if time is not None:
        return moment("startingTimestamp", time)
    if offsets is None or offsets in ("earliest", "latest"):
        return offsets
    return Position.from_json(offsets)


def _ending(options: Mapping[str, str]) -> Position | None:
    offsets = options.get("endingoffsets")
    return None if offsets in (None, "latest") else Position.from_json(str(offsets))
