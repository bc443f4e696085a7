"""`format("penstock")`: what Spark asks of a data source, handed to the parts that know.

A batch read is cut by blocks of the tables and shows one snapshot, also over many tasks, without holding one: jobs that
were archived after the planning are left out by their transaction's number. A streaming read follows the archive in commit
order; its process stays with the query, so it keeps a connection, listens, and waits there instead of being asked fifty
times a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from penstock.errors import InvalidInput
from penstock.history import queries as history
from penstock.postgres.database import Database
from penstock.spark.blocking import KEPT, Blocking
from penstock.spark.filters import pushed
from penstock.spark.jobs.offsets import Position
from penstock.spark.jobs.plan import even
from penstock.spark.options import ReadOptions, WriteOptions, parallelism
from penstock.spark.readers import FollowingReader
from penstock.spark.scans import read
from penstock.spark.schemas import arrow_schema, columns_of, ddl, seldom_of
from penstock.spark.streams import rows as stream_rows
from penstock.spark.streams.options import StreamReadOptions
from penstock.spark.streams.source import EventReader, EventStreamReader, PushingEventReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter, Filter
    from pyspark.sql.types import StructType

_MOST_LAG = 1_000_000
_IN_SQL = (
    "In Spark SQL use create temporary view v using penstock options (...), or give the options where the table is used: "
    "select * from t with (subscribe = 'orders'), insert into t with (stream = 'orders') values (...)."
)
_NOTHING = "It would always be empty. Begin at earliest, at offsets or at a time, or read as a stream."


class PenstockSource(DataSource):
    """The data source. Reads streams, `archived_jobs` and `queued_jobs`; writes jobs to the queue and events to streams."""

    zone: str | None = None
    """Default of the option `timeZone`."""

    @classmethod
    def name(cls) -> str:
        """What stands in `format(...)`."""
        return "penstock"

    def schema(self) -> str:
        """The columns, all or those of the option `columns`."""
        if any(name.lower().startswith("option.") for name in self.options):
            # Spark hands them over while it makes the table, and never again.
            raise InvalidInput("a table of Spark SQL keeps no options for a format in Python", hint=_IN_SQL)
        if StreamReadOptions.wanted(self.options):
            streams = self._of_streams()
            return ddl(stream_rows.columns_of(streams.columns, streams.include_headers))
        options = ReadOptions.parse(self.options)
        return ddl(columns_of(options.table, options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch reader."""
        if StreamReadOptions.wanted(self.options):
            streams = self._of_streams()
            if streams.ends_at_start:
                raise InvalidInput("a batch read cannot begin at the latest offsets", hint=_NOTHING)
            return (PushingEventReader if streams.pushdown else EventReader)(streams, schema)
        options = self._of_jobs(schema)
        if options.starting == "latest":
            raise InvalidInput("a batch read cannot begin at the latest position", hint=_NOTHING)
        # Spark fails a query whose reader overrides pushFilters while its own switch is off, so that is a class of its own.
        return (PushingReader if options.pushdown else Reader)(options, schema.fieldNames())

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of streams, or of the archive in commit order."""
        if StreamReadOptions.wanted(self.options):
            streams = self._of_streams()
            if streams.ending is not None:
                raise InvalidInput("a streaming query has no end to be set", hint="Use Trigger.AvailableNow, or a batch read.")
            return EventStreamReader(streams, schema)
        options = self._of_jobs(schema)
        if options.table != "archived_jobs":
            raise InvalidInput(f"{options.table} cannot be read as a stream", hint="Set the option table to archived_jobs.")
        if options.ending is not None:
            raise InvalidInput("a streaming query has no end to be set", hint="Use Trigger.AvailableNow, or a batch read.")
        return ArchiveStreamReader(options, schema.fieldNames())

    def _of_streams(self) -> StreamReadOptions:
        given = dict(self.options)
        if self.zone is not None and not any(name.lower() == "timezone" for name in given):
            given["timeZone"] = self.zone
        return StreamReadOptions.parse(given)

    def _of_jobs(self, schema: StructType) -> ReadOptions:
        if not self.options and schema.fieldNames() != list(columns_of("archived_jobs")):
            # A table of Spark SQL that was made for something else, or a schema for streams without one.
            raise InvalidInput("there are no options that say what to read", hint=f"Set subscribe, or table. {_IN_SQL}")
        return ReadOptions.parse(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch writer to the queue or to streams."""
        from penstock.spark.jobs.sink import job_writer
        from penstock.spark.streams.sink import EventWriteOptions, event_writer

        if EventWriteOptions.wanted(self.options, schema):
            return event_writer(EventWriteOptions.parse(self.options), schema, overwrite)
        return job_writer(WriteOptions.parse(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A streaming writer to the queue or to streams."""
        from penstock.spark.jobs.sink import job_stream_writer
        from penstock.spark.streams.sink import EventWriteOptions, event_stream_writer

        if EventWriteOptions.wanted(self.options, schema):
            return event_stream_writer(EventWriteOptions.parse(self.options), schema, overwrite)
        return job_stream_writer(WriteOptions.parse(self.options), schema, overwrite)


@dataclass
class Scan(InputPartition):
    """What one task reads: the text of a query."""

    query: str


class Reader(DataSourceReader):
    """Reads a table once."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options = options
        self._columns = _picked(options, names)
        self._filters: list[dict[str, Any]] = []

    def partitions(self) -> list[InputPartition]:
        """One scan for each range of blocks."""
        with KEPT.lent(self._options.url) as database:
            if self._options.table == "queued_jobs":
                return database.run(self._queue(database))
            return database.run(self._archive(database))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one scan; none when there is none, for which Spark makes a task too."""
        if isinstance(partition, Scan):
            yield from read(self._options.url, partition.query, arrow_schema(self._columns))

    async def _queue(self, database: Blocking) -> list[InputPartition]:
        # The queue changes while it is read: one task sees one moment. Several see a moment each.
        blocks = await history.queue_blocks(database.database)
        ranges: list[dict[str, Any]] = [{}]
        if self._options.min_partitions > 1:
            # The last range is open, since the table may grow.
            ranges = [{"blocks": [low, high]} for low, high in even(max(1, blocks), self._options.min_partitions)]
            ranges[-1]["blocks"][1] = 2**32 - 1
        return [await self._scan(database, "queued_jobs", range) for range in ranges]

    async def _archive(self, database: Blocking) -> list[InputPartition]:
        if self._options.starting not in (None, "earliest") or self._options.ending is not None:
            start = await database.starting(self._options.starting or "earliest")
            end = self._options.ending or await database.archive.now()
            slices = await database.archive.slices(start, end, self._options.rows_per_partition)
            return [await self._scan(database, "archived_jobs", part.as_range()) for part in slices]
        moment = await history.snapshot(database.database)
        days = [day for day in await history.blocks(database.database) if day.blocks and self._may_have(day)]
        wanted = max(self._options.min_partitions, parallelism())
        blocks = sum(day.blocks for day in days)
        scans: list[InputPartition] = []
        for day in days:
            # By size in jobs where the planner knows it, and at least this day's share of the wanted number.
            parts = max(day.jobs // self._options.rows_per_partition, round(wanted * day.blocks / blocks), 1)
            ranges = even(day.blocks, parts)
            for place, (low, high) in enumerate(ranges):
                # The day may have grown since; what came later is not in the snapshot, but what came before may be there.
                top = 2**32 - 1 if place == len(ranges) - 1 else high
                scans.append(await self._scan(database, day.relation, {"blocks": [low, top], "snapshot": str(moment)}))
        return scans

    async def _scan(self, database: Blocking, relation: str, range: dict[str, Any]) -> Scan:
        return await scan_of(database.database, relation, self._columns, range, self._filters)

    def _may_have(self, day: history.Blocks) -> bool:
        """Whether jobs of that day can pass the filters on `finished_at`."""
        for filter in self._filters:
            if filter["column"] == "finished_at" and isinstance(filter.get("value"), str):
                bound = filter["value"][:10]
                if filter["op"] in (">", ">=", "=") and day.day.isoformat() < bound:
                    return False
                if filter["op"] in ("<", "<=", "=") and day.day.isoformat() > bound:
                    return False
        return True


class PushingReader(Reader):
    """A reader that has the database filter."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Take the filters that mean the same to the database; return the others."""
        columns = columns_of(self._options.table)
        for filter in filters:
            taken = pushed(filter, columns)
            if taken is None:
                yield filter
            else:
                self._filters.append(taken)


class ArchiveStreamReader(FollowingReader):
    """Follows the archive in commit order. Offsets are positions, see `penstock.spark.jobs.offsets`.

    Spark asks for the initial offset several times, also after a restart that finds the first batch planned but not done,
    and "now" is then another one. So the end of the first batch says where the batch began (`since`), and that is believed.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        super().__init__(options.url)
        self._options = options
        self._columns = _picked(options, names)
        self._target: Position | None = None
        self._last: Position | None = None
        self._initial: dict[str, Any] | None = None
        self._checked = False

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins."""
        if self._initial is None:
            self._initial = self._here.keep_trying(lambda: self._here.starting(self._options.starting)).as_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The option `maxRowsPerTrigger`."""
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch. Waits for jobs for a while when there are none."""
        begin = Position.from_json(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        self._last = end = self._here.keep_trying(lambda: self._here.next(begin, most, self._target, self._options.wait))
        # Days may be pruned before a query begins, and later too when it falls behind. With each batch, and once without.
        if end != begin or not self._checked:
            self._here.keep_trying(lambda: self._here.archive.check_complete(begin, self._options.fail_on_data_loss))
            self._checked = True
        if end == begin:
            return start
        return {**end.as_json(), "since": start["seen"]} if start == self._initial else end.as_json()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where the archive ends, and the jobs behind the last batch (up to a million), for the progress of the query."""
        end = self._here.keep_trying(self._here.archive.now).as_json()
        if (last := self._last) is not None:
            end["lag"] = self._here.keep_trying(lambda: self._here.archive.lag(last, _MOST_LAG))
        return end

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """From here on nothing that is archived later counts."""
        self._target = self._here.keep_trying(self._here.archive.now)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """One scan for each slice of the batch."""
        begin = {"seen": end["since"]} if "since" in end else start
        return self._here.keep_trying(lambda: self._scans(Position.from_json(begin), Position.from_json(end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one scan; none when there is none, for which Spark makes a task too."""
        if isinstance(partition, Scan):
            yield from read(self._options.url, partition.query, arrow_schema(self._columns))

    async def _scans(self, start: Position, end: Position) -> list[InputPartition]:
        slices = await self._here.archive.slices(start, end, self._options.rows_per_partition)
        database = self._here.database
        return [await scan_of(database, "archived_jobs", self._columns, part.as_range()) for part in slices]


async def scan_of(
    database: Database, relation: str, columns: Mapping[str, str], range: dict[str, Any], filters: Sequence[dict[str, Any]] = ()
) -> Scan:
    """What a task has to read of a table in a range. Raises `InvalidInput` when the table is not there (any more)."""
    query = await history.scan(database, relation, list(columns), filters, range, seldom_of(columns))
    if query is None:
        raise InvalidInput(f"{relation} is gone", hint="The day was pruned while the read was planned: read again.")
    return Scan(query)


def _picked(options: ReadOptions, names: Sequence[str]) -> dict[str, str]:
    known = columns_of(options.table)
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"{options.table} has no column {unknown[0]}", hint=f"It has: {', '.join(known)}.")
    return {name: known[name] for name in names}


def in_zone(zone: str) -> type[PenstockSource]:
    """The data source with a time zone as the default of the option `timeZone`."""
    # Not importable by a name, so it travels to Spark's processes whole.
    return type("PenstockSourceInZone", (PenstockSource,), {"zone": zone, "__doc__": PenstockSource.__doc__})
