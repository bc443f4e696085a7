"""Reads streams for Spark.

Offsets have the form of Kafka's connector. Since they are dense and follow the order of commits, two of them determine a batch,
whenever it is read again. The process of a streaming read stays with the query, so the reader keeps a connection and waits there
for a notification instead of being asked fifty times a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import orjson
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

from penstock.errors import InvalidInput
from penstock.spark.blocking import DATABASES
from penstock.spark.filters import divide
from penstock.spark.options import ALWAYS_EMPTY, NO_END, parallelism
from penstock.spark.readers import FollowingReader
from penstock.spark.streams.follower import StreamFollower
from penstock.spark.streams.log import StreamLog
from penstock.spark.streams.offsets import LAG, LATEST, SINCE, Offsets, Run, as_json, from_json, identities_of, tasks
from penstock.spark.streams.options import EventReadOptions
from penstock.spark.streams.rows import check_schema
from penstock.spark.streams.scans import read_events

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

_SMALL = 10_000
_PUSHED = {"key": "string", "topic": "string", "partition": "long", "offset": "long", "timestamp": "timestamp"}


def event_reader(options: EventReadOptions, schema: StructType) -> EventReader:
    """Reads streams once. Raises `InvalidInput`."""
    if options.ends_at_start:
        raise InvalidInput("a batch read cannot begin at the latest offsets", hint=ALWAYS_EMPTY)
    # Spark fails a query whose reader overrides pushFilters while Spark's own setting is off, so that is a class of its own.
    return (PushingEventReader if options.pushdown else EventReader)(options, schema)


def event_stream_reader(options: EventReadOptions, schema: StructType) -> EventStreamReader:
    """Follows streams. Raises `InvalidInput`."""
    if options.ending is not None:
        raise InvalidInput("a streaming query has no end to be set", hint=NO_END)
    return EventStreamReader(options, schema)


@dataclass
class Events(InputPartition):
    """The events that one task reads."""

    runs: list[Run]


class _Events:
    """The part of both readers of streams that runs in a task."""

    _options: EventReadOptions
    _schema: StructType
    _filters: list[dict[str, Any]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. When there are no events, Spark runs one task nevertheless, which returns no rows."""
        if isinstance(partition, Events):
            from pyspark.sql.pandas.types import to_arrow_schema

            shape = to_arrow_schema(self._schema, timezone="UTC")
            for _, runs in groupby(partition.runs, lambda run: run.stream):
                yield from read_events(self._options, list(runs), shape, orjson.dumps(self._filters).decode())

    def _tasks(self, found: Sequence[Run]) -> list[InputPartition]:
        # A task costs some milliseconds, so a small batch is one task, unless the options ask for more.
        total = sum(run.end - run.begin for run in found)
        least = max(self._options.min_partitions, min(parallelism(), -(-total // _SMALL)))
        return [Events(dealt) for dealt in tasks(found, self._options.rows_per_partition, least)]


class EventReader(_Events, DataSourceReader):
    """Reads streams once, as one snapshot over all partitions shows them, without holding the snapshot."""

    def __init__(self, options: EventReadOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._filters: list[dict[str, Any]] = []

    def partitions(self) -> list[InputPartition]:
        """The events, dealt to tasks evenly."""
        with DATABASES.lent(self._options.url) as database:
            found = database.run(StreamLog(database.database, self._options).whole())
        return self._tasks([run for run in map(self._narrowed, found) if run is not None])

    def _narrowed(self, run: Run) -> Run | None:
        """The run without the events at its ends that the filters exclude; the filters are also applied to each event."""
        begin, end = run.begin, run.end
        for filter in self._filters:
            column, operation, value = filter["column"], filter["op"], filter.get("value")
            constant = {"topic": run.stream, "partition": str(run.partition)}.get(column)
            if constant is not None and (
                (operation == "=" and value != constant) or (operation == "in" and constant not in (value or ()))
            ):
                return None
            if column == "offset" and isinstance(value, str):
                number = int(value)
                begin = max(begin, {">=": number, ">": number + 1, "=": number}.get(operation, begin))
                end = min(end, {"<=": number + 1, "<": number, "=": number + 1}.get(operation, end))
        return replace(run, begin=begin, end=end) if begin < end else None


class PushingEventReader(EventReader):
    """A reader whose filters the database applies."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802
        """Take the filters that mean the same in the database; return the others."""
        self._filters, others = divide(filters, _PUSHED)
        return iter(others)


class EventStreamReader(_Events, FollowingReader[StreamFollower]):
    """Follows streams.

    Spark asks for the initial offset again after a restart that finds the first batch planned but not done, and "latest" is
    then another offset. The end of the first batch therefore records where that batch began, which has precedence.
    """

    def __init__(self, options: EventReadOptions, schema: StructType) -> None:
        super().__init__(options.url, StreamFollower)
        check_schema(schema)
        self._options = options
        self._schema = schema
        self._filters: list[dict[str, Any]] = []
        self._initial: dict[str, Any] | None = None
        self._last: Offsets = {}
        self._ends: Offsets | None = None
        self._target: Offsets | None = None
        self._triggered_at: float | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins: by default at the latest offsets, as with Kafka."""
        if self._initial is None:
            where = self._options.starting or "latest"
            log = self._log({})
            found = self._database.keep_trying(lambda: log.at(where, "startingOffsets", LATEST))
            self._initial = as_json(found, log.identities)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The options `maxOffsetsPerTrigger` and `minOffsetsPerTrigger`."""
        # Spark has no limit for both together. `latestOffset` applies the minimum in any case, unless Spark asks for all events.
        if self._options.most is not None:
            return ReadMaxRows(self._options.most)
        return ReadAllAvailable() if self._options.least is None else ReadMinRows(self._options.least)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch. While there are no events, or too few, it waits for up to `waitS`."""
        begin = from_json(start)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        least, wait = self._thresholds(limit)
        log = self._log(identities_of(start))
        end = self._database.keep_trying(lambda: self._follower.next(log, begin, most, self._target, wait, least))
        self._ends = {place: extent.next for place, extent in log.seen.items()}
        self._last = end
        if not log.was_recreated and all(offset == begin.get(place, 0) for place, offset in end.items()):
            self._last = begin
            return start
        self._database.keep_trying(self._follower.stop_waiting)
        self._triggered_at = time.monotonic()
        found = as_json(end, log.identities)
        return {**found, SINCE: start} if start == self._initial else found

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The ends of the streams, and the number of events behind the last batch, for the progress of the query."""
        # The ends are those that `latestOffset` found, which Spark has just called, also for an idle query.
        if self._ends is None:
            log = self._log({})
            self._ends = {place: extent.next for place, extent in self._database.keep_trying(log.extents).items()}
        ends = self._ends
        return {**as_json(ends), LAG: sum(end - self._last.get(place, 0) for place, end in ends.items())}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the query at the present ends of the streams."""
        self._target = self._database.keep_trying(lambda: self._log({}).at("latest", "", -1))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The events of the batch, dealt to tasks evenly."""
        begin = end.get(SINCE, start)
        log = self._log(identities_of(begin))
        return self._tasks(self._database.keep_trying(lambda: log.plan(from_json(begin), from_json(end), identities_of(end))))

    def _thresholds(self, limit: ReadLimit) -> tuple[int, timedelta]:
        """The number of events for which the next batch waits, and for how long."""
        least, wait = self._options.least, self._options.wait
        # A run up to a fixed end would wait for events that never come. As with Kafka, the first batch of a process never waits.
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable) or self._triggered_at is None:
            return 1, wait
        left = self._triggered_at + self._options.delay.total_seconds() - time.monotonic()
        return (1, wait) if left <= 0 else (least, min(wait, timedelta(seconds=left)))

    def _log(self, known: Mapping[str, str]) -> StreamLog:
        return StreamLog(self._database.database, self._options, known)
