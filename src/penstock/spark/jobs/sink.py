"""Writes a DataFrame to the queue: each row becomes one job, exactly once.

Tasks copy their rows into a staging table, each attempt under a name of its own. When all tasks have reported to Spark, the
driver commits: one transaction records the epoch of the writer and enqueues the rows of the attempts that Spark counts. A task
that was retried or ran twice therefore counts once; a batch that Spark repeats after a crash finds its epoch recorded; and no
worker sees a row before the commit. Rows that a crash leaves behind are never committed.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.errors import DatabaseUnavailable, InvalidInput, PenstockError
from penstock.spark import staging
from penstock.spark.blocking import KEPT as DATABASES
from penstock.spark.options import WriteOptions
from penstock.spark.scans import KEPT as CONNECTIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.streams.sink import EventWriteOptions

COLUMNS = {
    "name": "string",
    "data": "string",
    "id": "string",
    "key": "string",
    "priority": "short",
    "run_after": "timestamp",
    "expires_at": "timestamp",
    "unique_key": "string",
}
ONLY_APPEND = (
    'Write with outputMode("append"), the one mode that Spark has for a format in Python; what an aggregation changes is '
    "written in foreachBatch, with the options writer and epoch."
)
_HINT = (
    f"The columns are {', '.join(COLUMNS)}. All but data may be left out, name when the option job is set. data is a struct, "
    "a map, or JSON text."
)


@dataclass
class Staged(WriterCommitMessage):
    """What one attempt of a task has staged."""

    batch: staging.Batch
    part: str
    rows: int


Stage: TypeAlias = Callable[[staging.Batch, Iterator["pa.RecordBatch"]], Staged]
"""Copies rows to a staging table, for a batch of a writer."""


class BatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame.

    Args:
        options: Where to, and the name and number of the write.
        stage: What a task does with its rows.
        events: Whether they become events, not jobs.

    Raises:
        InvalidInput: A name without a number, or a number without a name.
    """

    def __init__(self, options: WriteOptions | EventWriteOptions, stage: Stage, events: bool) -> None:
        if (options.writer is None) != (options.epoch is None):
            given, missing = ("writer", "epoch") if options.epoch is None else ("epoch", "writer")
            raise InvalidInput(
                f"the option {given} needs the option {missing}",
                hint="What was written under a number is not written again: give each write its own, in foreachBatch the batch.",
            )
        self._url = options.url
        self._stage = stage
        self._events = events
        self._named = options.writer is not None
        self._batch = staging.Batch(options.writer or f"write {secrets.token_hex(12)}", options.target, options.epoch or 0)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        # In foreachBatch the number is that of the query's batch, so the name is the query's.
        return self._stage(replace(self._batch, query=query_id()) if self._named else self._batch, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Make them count."""
        commit(self._url, messages, self._events)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop what was staged."""
        abort(self._url, self._batch)


class MicroBatchWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. The writer is the query, whose id is in its checkpoint; the epoch is the batch.

    Args: as of `BatchWriter`.

    Raises:
        InvalidInput: There is an option `epoch`.
    """

    def __init__(self, options: WriteOptions | EventWriteOptions, stage: Stage, events: bool) -> None:
        if options.epoch is not None:
            raise InvalidInput("a streaming query takes no option epoch", hint="Its batches are numbered: leave it out.")
        self._url = options.url
        self._stage = stage
        self._events = events
        self._target = options.target
        self._writer = options.writer
        self._checkpoint = options.checkpoint

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        return self._stage(current_batch(self._writer, self._target), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Make the batch count, unless it was before."""
        commit(self._url, messages, self._events, offsets_of(self._checkpoint, batchId))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop what was staged."""
        if staged := [message for message in messages if isinstance(message, Staged)]:
            abort(self._url, staged[0].batch)


def job_writer(options: WriteOptions, schema: StructType, overwrite: bool) -> BatchWriter:
    """Writes one DataFrame to the queue. Raises `InvalidInput`."""
    if overwrite:
        raise InvalidInput("a queue cannot be overwritten", hint='Write with mode("append").')
    check_schema(options, schema)
    return BatchWriter(options, partial(stage, options), False)


def job_stream_writer(options: WriteOptions, schema: StructType, overwrite: bool) -> MicroBatchWriter:
    """Writes micro-batches to the queue. Raises `InvalidInput`."""
    if overwrite:
        raise InvalidInput("a queue takes no complete output", hint=ONLY_APPEND)
    check_schema(options, schema)
    return MicroBatchWriter(options, partial(stage, options), False)


def query_id() -> str | None:
    """The id of the streaming query that a task works for, which is in its checkpoint; None: for none."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.getLocalProperty("sql.streaming.queryId") or None) if context else None


def current_batch(writer: str | None, target: str) -> staging.Batch:
    """The micro-batch as a task knows it, under the name of the writer, that of the query unless it has one of its own."""
    from pyspark import TaskContext

    context = TaskContext.get()
    query = query_id()
    number = context.getLocalProperty("streaming.sql.batchId") if context else None
    if not number or not query:
        raise PenstockError(
            "Spark did not say which query and batch this is", hint="Write in foreachBatch, with the options writer and epoch."
        )
    return staging.Batch(writer or f"query {query}", target, int(number), query)


def check_schema(options: WriteOptions, schema: StructType) -> None:
    """Raise `InvalidInput` unless the columns are those of jobs."""
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if unknown := [name for name in kinds if name not in COLUMNS]:
        raise InvalidInput(f"a job has no column {unknown[0]}", hint=_HINT)
    if "data" not in kinds:
        raise InvalidInput("the column data is missing", hint=_HINT)
    if options.job is None and "name" not in kinds:
        raise InvalidInput("it is not said which job type the rows are", hint='Set option("job", "..."), or have a column name.')
    for name, kind in kinds.items():
        wanted = COLUMNS[name]
        fits = {
            "string": kind == "string" or (name == "data" and kind.startswith(("struct<", "map<string,"))),
            "short": kind in ("tinyint", "smallint", "int", "bigint"),
            "timestamp": kind == "timestamp",
        }
        if not fits[wanted]:
            raise InvalidInput(f"the column {name} is {kind}", hint=f"It has to be {wanted}. {_HINT}")


def stage(options: WriteOptions, of: staging.Batch, batches: Iterator[pa.RecordBatch]) -> Staged:
    """Copy rows to the staging table under the name of this attempt."""
    part = of.part()
    rows = 0
    first = next(batches, None)
    if first is None:
        return Staged(of, part, 0)

    def staged() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        batch: pa.RecordBatch | None = first
        while batch is not None:
            if batch.num_rows:
                yield as_staged(batch, options.job, of.writer, part, rows)
                rows += batch.num_rows
            batch = next(batches, None)

    copy(options.url, staging.TABLE, as_staged(first.slice(0, 0), options.job, of.writer, part, 0).schema, staged())
    return Staged(of, part, rows)


def copy(url: str, table: str, shape: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Copy rows into a staging table. Raises `PenstockError`, and what making the rows raised."""
    import pyarrow as pa
    from adbc_driver_manager import Error

    raised: list[Exception] = []

    def watched() -> Iterator[pa.RecordBatch]:
        # On its way through ADBC an exception would lose its kind and its hint.
        try:
            yield from batches
        except Exception as error:
            raised.append(error)
            raise

    try:
        with CONNECTIONS.lent(url) as connection, connection.cursor() as cursor:
            reader = pa.RecordBatchReader.from_batches(shape, watched())
            cursor.adbc_ingest(table, reader, mode="append", db_schema_name=staging.SCHEMA)
    except Error as error:
        if raised:
            raise raised[0] from None
        raise PenstockError(f"the rows could not be staged: {error}") from None


def as_staged(batch: pa.RecordBatch, job: str | None, writer: str, part: str, before: int) -> pa.RecordBatch:
    """Rows as the staging table has them. Raises `InvalidInput` for a row without data or job type."""
    import pyarrow as pa

    kinds = {"string": pa.string(), "short": pa.int16(), "timestamp": pa.timestamp("us", tz="UTC")}
    size = batch.num_rows
    given = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns: dict[str, Any] = {
        "writer": pa.repeat(writer, size),
        "part": pa.repeat(part, size),
        "place": pa.array(range(before, before + size), pa.int64()),
    }
    for name, kind in COLUMNS.items():
        if name in given:
            column = given[name]
            if name == "data" and not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                column = as_json(column)
            columns[name] = column if column.type == kinds[kind] else column.cast(kinds[kind])
    if "id" not in columns:
        columns["made"] = ids(size)
    if job is not None:
        columns["name"] = pa.repeat(job, size)
    for name in ("data", "name"):
        if columns[name].null_count:
            raise InvalidInput(f"a row has no {name}", hint=_HINT)
    return pa.RecordBatch.from_pydict(
        {name: columns[name] for name in ("writer", "part", "place", "made", *COLUMNS) if name in columns}
    )


def ids(size: int) -> pa.Array:
    """New ids, UUIDv7 (RFC 9562) with an ascending number where the milliseconds leave room, as the 16 bytes that they are."""
    import numpy as np
    import pyarrow as pa

    made = np.frombuffer(secrets.token_bytes(16 * size), np.uint8).reshape(size, 16).copy()
    # 48 bits of milliseconds, then 12 and 6 bits that count, so that ids are in the order of the rows.
    count = np.arange(size, dtype=np.uint64)
    moment = np.uint64(time.time_ns() // 1_000_000) + count // np.uint64(1 << 18)
    for place in range(6):
        made[:, place] = moment >> np.uint64(40 - 8 * place) & np.uint64(0xFF)
    made[:, 6] = 0x70 | (count >> np.uint64(14) & np.uint64(0x0F))
    made[:, 7] = count >> np.uint64(6) & np.uint64(0xFF)
    made[:, 8] = 0x80 | (count & np.uint64(0x3F))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), size, [None, pa.py_buffer(made.tobytes())]).cast(pa.binary())


def commit(url: str, messages: Sequence[WriterCommitMessage | None], events: bool = False, offsets: str | None = None) -> None:
    """Enqueue (or append, as `events`) what the attempts behind the messages have staged.

    May be repeated, since the epoch is noted with it: so a server that restarts meanwhile is waited for. Raises `Conflict`
    when the writer's name belongs to another query.
    """
    staged = [message for message in messages if isinstance(message, Staged)]
    if not staged:
        return
    rows = sum(message.rows for message in staged)
    parts = [message.part for message in staged if message.rows]
    call: Any = staging.commit_events if events else staging.commit
    with DATABASES.lent(url) as database:
        database.keep_trying(lambda: call(database.database, staged[0].batch, parts, rows, offsets))


def abort(url: str, batch: staging.Batch) -> None:
    """Drop what was staged; when the database is away, its sweep does it later."""
    try:
        with DATABASES.lent(url) as database:
            database.run(staging.discard(database.database, batch))
    except DatabaseUnavailable:
        pass


def offsets_of(checkpoint: str | None, batch: int) -> str | None:
    """Up to where a batch has read the sources of its query, as JSON; None when the checkpoint is not in reach from here.

    Spark tells a sink nothing of the sources, but has noted the offsets before the batch begins.
    """
    if checkpoint is None or "://" in checkpoint.removeprefix("file://"):
        return None
    folder = Path(re.sub(r"^file:(//)?", "", checkpoint))
    try:
        # A version and the settings come first; then a line for each source, a hyphen for one that has read nothing.
        lines = (folder / "offsets" / str(batch)).read_text("utf-8").splitlines()[2:]
        return json.dumps([None if line == "-" else json.loads(line) for line in lines])
    except (OSError, ValueError):
        return None


def as_json(column: pa.Array) -> pa.Array:
    """Structs and maps as JSON text, with what JSON has no word for as Spark's `to_json` writes it."""
    import orjson
    import pyarrow as pa

    values = column.to_pylist(maps_as_pydicts="strict")
    return pa.array([None if value is None else orjson.dumps(value, default=in_json).decode() for value in values], pa.string())


def in_json(value: Any) -> Any:
    """What JSON has no word for, as orjson asks for it."""
    import orjson

    if isinstance(value, Decimal):
        return orjson.Fragment(f"{value:f}")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
