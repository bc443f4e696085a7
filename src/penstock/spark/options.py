"""The options of `format("penstock")`, checked once where they come in. See docs/spark.md for what each does."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import DatabaseUnavailable, InvalidInput
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from penstock.spark.jobs.offsets import Position

N = TypeVar("N", int, float)
_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPAN = re.compile(rf"(\d{{1,9}})\s*({'|'.join(_MILLISECONDS)})?")
_OF_TABLES = (
    "url", "dataDir", "table", "columns", "pushdown", "rowsPerPartition", "minPartitions", "startingOffsets", "startingTimestamp",
    "endingOffsets", "maxRowsPerTrigger", "maxOffsetsPerTrigger", "waitS", "failOnDataLoss", "timeZone",
    # So that a misspelt one of these is found among them; see StreamReadOptions.
    "subscribe", "subscribePattern", "assign",
)  # fmt: skip
_OF_STREAMS = ("startingOffsetsByTimestamp", "endingOffsetsByTimestamp", "endingTimestamp", "minOffsetsPerTrigger")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read.

    Attributes:
        url: The database.
        table: `archived_jobs` or `queued_jobs`.
        columns: Names with commas; None: all.
        pushdown: Whether filters go to the database.
        rows_per_partition: Jobs of one task, about.
        min_partitions: At least so many tasks, as far as there are blocks.
        starting: `earliest`, `latest`, a time, or a position; None: by the kind of read.
        ending: Of a batch read in commit order: `latest` or a position.
        max_rows: Most jobs of one micro-batch; None: all there are.
        wait: How long to wait for jobs before a micro-batch is given up as empty.
        fail_on_data_loss: Whether pruned days that were not read are an error.
        since, until: Of a batch read of the archive: times between which the jobs finished.
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
    def parse(cls, given: Mapping[str, str]) -> ReadOptions:
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


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write jobs.

    Attributes:
        url: The database.
        job: Job type of all rows; None: the column `name` says it.
        writer: Name under which batches are noted as done; None: that of the query, or a new one for each batch write.
        epoch: Number of a batch write of a named writer; it and all below are written once.
        checkpoint: Where a streaming query has its checkpoint, as far as Spark says so.
    """

    url: str
    job: str | None = None
    writer: str | None = None
    epoch: int | None = None
    checkpoint: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> WriteOptions:
        """From the options of a writer. Raises `InvalidInput`."""
        options = {name.lower(): value for name, value in given.items()}
        refuse_unknown(options, (*OF_WRITERS, "job"), "writing jobs")
        return cls(
            database_url(options), options.get("job"), options.get("writer"), epoch(options), options.get("checkpointlocation")
        )

    @property
    def target(self) -> str:
        """What is written, see `penstock.sink_epochs`."""
        return job_target(self.job)


OF_WRITERS = ("url", "dataDir", "writer", "epoch", "checkpointLocation", "queryName")


def job_target(job: str | None) -> str:
    """What a write of jobs is noted for."""
    return "jobs" if job is None else f"job {job}"


def epoch(options: Mapping[str, str]) -> int | None:
    """The option `epoch`."""
    return number(options, "epoch", 0, 0, 2**62) if "epoch" in options else None


def refuse_unknown(options: Mapping[str, str], known: Sequence[str], what: str) -> None:
    """Raise `InvalidInput` for an option that is not known: a misspelt one would be one that was left out.

    Args:
        options: Given, with names in lower case.
        known: Names that there are.
        what: What the options are for, in words.
    """
    by_lower = {name.lower(): name for name in known}
    if unknown := [name for name in options if name not in by_lower]:
        if unknown[0] == "path":
            raise InvalidInput("there is no path to read or to write", hint="Call load() and save() without one.")
        near = get_close_matches(unknown[0], by_lower, 1, 0.6)
        raise InvalidInput(
            f"there is no option {unknown[0]} for {what}",
            hint=f"Is it {by_lower[near[0]]}?" if near else f"There are: {', '.join(known)}.",
        )


def database_url(options: Mapping[str, str]) -> str:
    """The option `url`, the environment's, or the embedded server of `dataDir` when it runs. Raises when there is none."""
    if given := options.get("url"):
        return given
    settings = Settings.read()
    if settings.database_url is not None and "datadir" not in options:
        return settings.database_url.get_secret_value()
    folder = Path(options.get("datadir") or settings.data_dir)
    server = EmbeddedServer(folder)
    if not server.running:
        raise DatabaseUnavailable(
            f"no option url, no PENSTOCK_DATABASE_URL, and no embedded server runs in {folder}",
            hint='Set option("url", "postgresql://..."), or start the embedded server: penstock up.',
        )
    return server.url


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """An option that is true or false."""
    text = options.get(name.lower())
    if text is None:
        return default
    if text.lower() not in ("true", "false"):
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is true or false.")
    return text.lower() == "true"


def number(options: Mapping[str, str], name: str, default: N, least: N, most: N) -> N:
    """An option that is a number of the kind of its default, within limits."""
    text = options.get(name.lower())
    if text is None:
        return default
    try:
        value = type(default)(text)
    except ValueError:
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is a number.") from None
    if not least <= value <= most:
        raise InvalidInput(f"the option {name} is {text}", hint=f"It is between {least} and {most}.")
    return value


def span(options: Mapping[str, str], name: str, default: timedelta) -> timedelta:
    """An option that is a time span as Spark writes them: 90s, 15m; a bare number is milliseconds."""
    text = options.get(name.lower())
    if text is None:
        return default
    match = _SPAN.fullmatch(text.strip().lower())
    if match is None:
        raise InvalidInput(f"the option {name} is {text!r}", hint="It is a time span such as 500ms, 90s, 15m or 1h.")
    return timedelta(milliseconds=int(match.group(1)) * _MILLISECONDS[match.group(2) or "ms"])


def moment(name: str, text: str) -> datetime:
    """An option that is a time. Raises `InvalidInput`."""
    # Kafka's connector takes milliseconds; people write ISO 8601.
    try:
        found: Any = datetime.fromtimestamp(int(text) / 1000).astimezone() if text.isdigit() else datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidInput(
            f"the option {name} is {text!r}", hint="It is milliseconds since 1970, or 2026-01-31T12:00:00Z."
        ) from None
    if found.tzinfo is None:
        raise InvalidInput(f"the option {name} is {text!r}, without a time zone", hint="Add Z or +01:00.")
    return found  # type: ignore[no-any-return]


def parallelism() -> int:
    """The default number of tasks: the number of Spark's cores is not known where a read is planned."""
    return max(2, os.cpu_count() or 2)


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
