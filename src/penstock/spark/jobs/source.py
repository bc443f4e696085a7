"""Reads jobs for Spark.

A batch read is cut by blocks of the tables. It shows one snapshot, also over many tasks, without holding it: the numbers of
transactions leave out jobs that were archived after the planning. A streaming read follows the archive in commit order. Its
process stays with the query, so the reader keeps a connection, listens, and waits there instead of being asked fifty times a
second.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from penstock.errors import InvalidInput
from penstock.history import queries as history
from penstock.postgres.database import Database
from penstock.spark.blocking import DATABASES
from penstock.spark.filters import divide
from penstock.spark.jobs.archive import Archive
from penstock.spark.jobs.follower import ArchiveFollower
from penstock.spark.jobs.offsets import RESTORE, Position, check_restored
from penstock.spark.jobs.options import JobReadOptions
from penstock.spark.jobs.plan import even
from penstock.spark.options import ALWAYS_EMPTY, NO_END, parallelism
from penstock.spark.readers import FollowingReader
from penstock.spark.scans import read
from penstock.spark.schemas import arrow_schema, columns_of, seldom_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

T = TypeVar("T")
_MOST_LAG = 1_000_000


def job_reader(options: JobReadOptions, schema: StructType) -> JobReader:
    """Reads a table once. Raises `InvalidInput`."""
    if options.starting == "latest":
        raise InvalidInput("a batch read cannot begin at the latest position", hint=ALWAYS_EMPTY)
    # Spark fails a query whose reader overrides pushFilters while Spark's own setting is off, so that is a class of its own.
    return (PushingJobReader if options.pushdown else JobReader)(options, schema.fieldNames())


def job_stream_reader(options: JobReadOptions, schema: StructType) -> ArchiveStreamReader:
    """Follows the archive in commit order. Raises `InvalidInput`."""
    if options.table != "archived_jobs":
        raise InvalidInput(f"{options.table} cannot be read as a stream", hint="Set the option table to archived_jobs.")
    if options.ending is not None:
        raise InvalidInput("a streaming query has no end to be set", hint=NO_END)
    return ArchiveStreamReader(options, schema.fieldNames())


@dataclass
class Scan(InputPartition):
    """The query of one task."""

    query: str


class JobReader(DataSourceReader):
    """Reads a table once."""

    def __init__(self, options: JobReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._columns = _picked(options, names)
        self._filters: list[dict[str, Any]] = []

    def partitions(self) -> list[InputPartition]:
        """One scan for each range of blocks."""
        with DATABASES.lent(self._options.url) as database:
            plan = self._queue if self._options.table == "queued_jobs" else self._archive
            return database.run(plan(database.database))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one scan. When there is no scan, Spark runs one task nevertheless, which returns no rows."""
        if isinstance(partition, Scan):
            yield from read(self._options.url, partition.query, arrow_schema(self._columns))

    async def _queue(self, database: Database) -> list[InputPartition]:
        # The queue changes while it is read. Each task sees one moment, and several tasks see different ones.
        blocks = await history.queue_blocks(database)
        ranges: list[dict[str, Any]] = [{}]
        if self._options.min_partitions > 1:
            # The last range is open, since the table may grow.
            ranges = [{"blocks": [low, high]} for low, high in even(max(1, blocks), self._options.min_partitions)]
            ranges[-1]["blocks"][1] = 2**32 - 1
        return [await self._scan(database, "queued_jobs", range) for range in ranges]

    async def _archive(self, database: Database) -> list[InputPartition]:
        if self._options.starting not in (None, "earliest") or self._options.ending is not None:
            archive = Archive(database)
            start = await archive.starting(self._options.starting or "earliest")
            end = self._options.ending or await archive.now()
            slices = await archive.slices(start, end, self._options.rows_per_partition)
            return [await self._scan(database, "archived_jobs", part.as_range()) for part in slices]
        moment = await history.snapshot(database)
        tables = [table for table in await history.blocks(database) if table.blocks and self._may_have(table)]
        wanted = max(self._options.min_partitions, parallelism())
        blocks = sum(table.blocks for table in tables)
        scans: list[InputPartition] = []
        for table in tables:
            # Tasks by the number of jobs, where the planner knows it, and at least this table's share of the wanted tasks.
            parts = max(table.jobs // self._options.rows_per_partition, round(wanted * table.blocks / blocks), 1)
            ranges = even(table.blocks, parts)
            for place, (low, high) in enumerate(ranges):
                # The last range is open: the table may have grown before the snapshot was taken, which excludes later jobs.
                top = 2**32 - 1 if place == len(ranges) - 1 else high
                scans.append(await self._scan(database, table.relation, {"blocks": [low, top], "snapshot": str(moment)}))
        return scans

    async def _scan(self, database: Database, relation: str, range: dict[str, Any]) -> Scan:
        return await scan_of(database, relation, self._columns, range, self._filters)

    def _may_have(self, table: history.Blocks) -> bool:
        """Whether jobs of that table can pass the filters on `finished_at`."""
        for filter in self._filters:
            if filter["column"] == "finished_at" and isinstance(filter.get("value"), str):
                bound = filter["value"][:10]
                if filter["op"] in (">", ">=", "=") and table.until.isoformat() <= bound:
                    return False
                if filter["op"] in ("<", "<=", "=") and table.day.isoformat() > bound:
                    return False
        return True


class PushingJobReader(JobReader):
    """A reader whose filters the database applies."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Take the filters that mean the same in the database; return the others."""
        self._filters, others = divide(filters, columns_of(self._options.table))
        return iter(others)


class ArchiveStreamReader(FollowingReader[ArchiveFollower]):
    """Follows the archive in commit order. Offsets are positions, see `penstock.spark.jobs.offsets`.

    Spark asks for the initial offset several times, also after a restart that finds the first batch planned but not done, and
    "now" is then another position. The end of the first batch therefore records where that batch began (`since`), which has
    precedence.
    """

    def __init__(self, options: JobReadOptions, names: Sequence[str]) -> None:
        super().__init__(options.url, ArchiveFollower)
        self._options = options
        self._columns = _picked(options, names)
        self._target: Position | None = None
        self._last: Position | None = None
        self._initial: dict[str, Any] | None = None
        self._checked = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins."""
        if self._initial is None:
            self._initial = self._noted(self._archived(lambda archive: archive.starting(self._options.starting)))
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxRowsPerTrigger`."""
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch. While there are no jobs, it waits for up to `waitS`."""
        begin = Position.from_json(start)
        self._check_restored(start, begin)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        self._last = end = self._database.keep_trying(lambda: self._follower.next(begin, most, self._target, self._options.wait))
        # Days may be pruned before a query begins, and later when it falls behind: check with each batch, and once without one.
        if end != begin or not self._checked:
            self._archived(lambda archive: archive.check_complete(begin, self._options.fail_on_data_loss))
            self._checked = True
        if end == begin:
            return start
        found = self._noted(end)
        return {**found, "since": start["seen"]} if start == self._initial else found

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The end of the archive and the number of jobs behind the last batch (up to a million), for the query's progress."""
        end = self._archived(Archive.now).as_json()
        if (last := self._last) is not None:
            end["lag"] = self._archived(lambda archive: archive.lag(last, _MOST_LAG))
        return end

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the query at the present end of the archive."""
        self._target = self._archived(Archive.now)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One scan for each slice of the batch."""
        begin = {"seen": end["since"], RESTORE: end.get(RESTORE, 0)} if "since" in end else start
        self._check_restored(begin, Position.from_json(begin))
        self._check_restored(end, Position.from_json(end))
        return self._archived(lambda archive: self._scans(archive, Position.from_json(begin), Position.from_json(end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one scan. When there is no scan, Spark runs one task nevertheless, which returns no rows."""
        if isinstance(partition, Scan):
            yield from read(self._options.url, partition.query, arrow_schema(self._columns))

    async def _scans(self, archive: Archive, start: Position, end: Position) -> list[InputPartition]:
        slices = await archive.slices(start, end, self._options.rows_per_partition)
        database = self._database.database
        return [await scan_of(database, "archived_jobs", self._columns, part.as_range()) for part in slices]

    def _restored(self) -> list[tuple[int, int]]:
        return self._database.keep_trying(lambda: history.restored(self._database.database))

    def _noted(self, position: Position) -> dict[str, Any]:
        """A position as the checkpoint has it, with the number of the last restore of the database."""
        restored = self._restored()
        return position.as_json() | ({RESTORE: restored[-1][0]} if restored else {})

    def _check_restored(self, noted: dict[str, Any], position: Position) -> None:
        check_restored(position, int(noted.get(RESTORE, 0)), self._restored())

    def _archived(self, ask: Callable[[Archive], Coroutine[Any, Any, T]]) -> T:
        """Ask the archive a question."""
        return self._database.keep_trying(lambda: ask(self._follower.archive))


async def scan_of(
    database: Database, relation: str, columns: Mapping[str, str], range: dict[str, Any], filters: Sequence[dict[str, Any]] = ()
) -> Scan:
    """The query for a range of a table. Raises `InvalidInput` when the table does not exist (any more)."""
    query = await history.scan(database, relation, list(columns), filters, range, seldom_of(columns))
    if query is None:
        raise InvalidInput(f"{relation} is gone", hint="The day was pruned while the read was planned: read again.")
    return Scan(query)


def _picked(options: JobReadOptions, names: Sequence[str]) -> dict[str, str]:
    known = columns_of(options.table)
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"{options.table} has no column {unknown[0]}", hint=f"It has: {', '.join(known)}.")
    return {name: known[name] for name in names}
