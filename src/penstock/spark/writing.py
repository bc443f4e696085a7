"""Writes a DataFrame exactly once. The sinks of jobs and of streams add only how rows are staged.

Tasks copy their rows into a staging table, each attempt under a name of its own. When all tasks have reported to Spark, the
driver commits: one transaction records the epoch of the writer and enqueues or appends the rows of the attempts that Spark
counts. A task that was retried or ran twice therefore counts once; a batch that Spark repeats after a crash finds its epoch
recorded; and no worker or consumer sees a row before the commit. Rows that a crash leaves behind are never committed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.errors import Conflict, DatabaseUnavailable, InvalidInput, PenstockError
from penstock.jobs.spark_attempt import SparkAttempt
from penstock.spark import staging
from penstock.spark.blocking import DATABASES
from penstock.spark.checkpoints import sources_of
from penstock.spark.json.to_json import OUT_OF_RANGE
from penstock.spark.options import WriteOptions
from penstock.spark.scans import CONNECTIONS

if TYPE_CHECKING:
    import pyarrow as pa

_ONLY_APPEND = (
    'Write with outputMode("append"), the one mode that Spark has for a format in Python; what an aggregation changes is '
    "written in foreachBatch, with the options writer and epoch."
)
# The first and the last second of the years 1 to 9999, as in penstock.shown_time.
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_000_000
CREATED_AGAIN = "Keys and payloads were made for the stream that was there before: write the batch again."


@dataclass
class Staged(WriterCommitMessage):
    """The rows that one attempt of a task has staged: how many for which job type or stream.

    Attributes:
        batch: The batch as the writer numbers it.
        part: Name of what the attempt has staged.
        named: Rows for each job type or stream.
        number: Number of the batch in the checkpoint of the streaming query; None: no streaming query.
    """

    batch: staging.Batch
    part: str
    named: Mapping[str, staging.Rows]
    number: int | None = None


Stage: TypeAlias = Callable[[staging.Batch, Iterator["pa.RecordBatch"]], Staged]
"""Copies rows to a staging table, for a batch of a writer."""


class BatchWriter(DataSourceArrowWriter):
    """Writes one DataFrame.

    Args:
        options: Where to write, and the name and number of the write.
        stage: Stages the rows of a task.
        overwrite: Whether Spark asks to replace what is there.

    Raises:
        InvalidInput: The write overwrites; or a writer is named without an epoch, or the reverse.
    """

    def __init__(self, options: WriteOptions, stage: Stage, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput(f"a {options.place} cannot be overwritten", hint='Write with mode("append").')
        of = options.of
        if of is not None and options.writer is None:
            # Each write of a Spark job is written once, whichever of its attempts wrote it; the first needs no number.
            options = replace(options, writer=of.run_name, epoch=options.epoch or 0)
        if (options.writer is None) != (options.epoch is None):
            given, missing = ("writer", "epoch") if options.epoch is None else ("epoch", "writer")
            raise InvalidInput(
                f"the option {given} needs the option {missing}",
                hint="An epoch of a writer is written once: give each write its own epoch, in foreachBatch the id of the batch.",
            )
        self._url = options.url
        self._stage = stage
        self._events = options.events
        self._named = options.writer is not None
        self._checkpoint = options.checkpoint
        self._of = of
        # By the number alone, a second write of one attempt would pass for the first one of the attempt before.
        self._write = None if of is None else json.dumps({"job": str(of.job), "driver": of.driver, "write": secrets.token_hex(8)})
        self._batch = staging.Batch(options.writer or f"write {secrets.token_hex(12)}", options.target, options.epoch or 0)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        # In foreachBatch the epoch is the batch of the query, so the name belongs to the query.
        found = self._stage(replace(self._batch, query=query_id()) if self._named else self._batch, iterator)
        return replace(found, number=batch_number())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Enqueue or append the staged rows, unless the epoch was committed before."""
        number = next((message.number for message in messages if isinstance(message, Staged)), None)
        offsets = None if number is None else offsets_of(self._checkpoint, number)
        commit(self._url, messages, self._events, self._write or offsets, self._of)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop the staged rows."""
        abort(self._url, self._batch)


class MicroBatchWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. The writer is the query, whose id is in its checkpoint; the epoch is the batch.

    Args:
        options: Where to write.
        stage: Stages the rows of a task.
        overwrite: Whether Spark asks to replace what is there.

    Raises:
        InvalidInput: The query's output is complete, or the option `epoch` is given.
    """

    def __init__(self, options: WriteOptions, stage: Stage, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput(f"a {options.place} takes no complete output", hint=_ONLY_APPEND)
        if options.epoch is not None:
            raise InvalidInput("a streaming query takes no option epoch", hint="Its batches are numbered: leave it out.")
        self._url = options.url
        self._stage = stage
        self._events = options.events
        self._target = options.target
        self._writer = options.writer
        self._checkpoint = options.checkpoint
        self._of = options.of

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Staged:
        """Stage the rows of one task."""
        return self._stage(current_batch(self._writer, self._target), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Enqueue or append the staged rows, unless the batch was committed before."""
        commit(self._url, messages, self._events, offsets_of(self._checkpoint, batchId), self._of)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop the staged rows."""
        if staged := [message for message in messages if isinstance(message, Staged)]:
            abort(self._url, staged[0].batch)


def query_id() -> str | None:
    """The id of the streaming query that the current task works for, which is in its checkpoint; None: no streaming query."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.getLocalProperty("sql.streaming.queryId") or None) if context else None


def batch_number() -> int | None:
    """The number of the micro-batch that the current task works for; None: no streaming query."""
    from pyspark import TaskContext

    context = TaskContext.get()
    number = context.getLocalProperty("streaming.sql.batchId") if context else None
    return int(number) if number else None


def current_batch(writer: str | None, target: str) -> staging.Batch:
    """The micro-batch of the current task, under the name of the writer, by default that of the query."""
    query, number = query_id(), batch_number()
    if number is None or query is None:
        raise PenstockError(
            "Spark did not say which query and batch this is", hint="Write in foreachBatch, with the options writer and epoch."
        )
    return staging.Batch(writer or f"query {query}", target, number, query)


def copy(url: str, table: str, shape: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Copy rows into a staging table.

    Raises:
        PenstockError: The database refused the rows. An exception of `batches` is raised as it is.
    """
    import pyarrow as pa
    from adbc_driver_manager import Error

    raised: list[Exception] = []

    def watched() -> Iterator[pa.RecordBatch]:
        # An exception that passes through ADBC loses its type and its hint.
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


def check_times(column: pa.Array, name: str, rows: Sequence[int]) -> None:
    """Raise `InvalidInput` for a time that not every client can read, as the functions in SQL do.

    Args:
        column: Times with microseconds, in UTC.
        name: Name of the column.
        rows: The number of each row in its task.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    times = column.cast(pa.int64())
    wrong = pc.or_(pc.less(times, _FIRST), pc.greater(times, _LAST))
    if (place := pc.index(wrong, True).as_py()) >= 0:
        raise InvalidInput(
            f"{name} of row {rows[place]} of the task is out of range: {times[place]} microseconds since 1970", hint=OUT_OF_RANGE
        )


def commit(
    url: str,
    messages: Sequence[WriterCommitMessage | None],
    events: bool = False,
    offsets: str | None = None,
    of: SparkAttempt | None = None,
) -> None:
    """Enqueue (or append, with `events`) the rows that the attempts behind the messages have staged.

    This may be repeated, since the transaction also records the epoch; so it waits for a server that restarts meanwhile.

    Raises:
        Conflict: The name of the writer belongs to another query, a stream was dropped and created again meanwhile, or the
            attempt of the Spark job does not run any more.
    """
    staged = [message for message in messages if isinstance(message, Staged)]
    if not staged:
        return
    named: dict[str, staging.Rows] = {}
    for message in staged:
        for name, more in message.named.items():
            before = named.get(name, staging.Rows(0, more.id))
            if before.id != more.id:
                raise Conflict(f"stream {name} was dropped and created again while events for it were staged", hint=CREATED_AGAIN)
            named[name] = staging.Rows(before.rows + more.rows, more.id)
    parts = [message.part for message in staged if message.named]
    call: Any = staging.commit_events if events else staging.commit
    with DATABASES.lent(url) as database:
        database.keep_trying(lambda: call(database.database, staged[0].batch, parts, named, offsets, of))


def abort(url: str, batch: staging.Batch) -> None:
    """Drop the staged rows of a batch. While the database is away, they stay until the maintenance of a worker prunes them."""
    try:
        with DATABASES.lent(url) as database:
            database.run(staging.discard(database.database, batch))
    except DatabaseUnavailable:
        pass


def offsets_of(checkpoint: str | None, batch: int) -> str | None:
    """The offsets up to which a batch has read the sources of its query, as JSON; None: the checkpoint is not on this machine.

    Spark tells a sink nothing of the sources, but writes the offsets to the checkpoint before the batch begins.
    """
    if checkpoint is None or "://" in checkpoint.removeprefix("file://"):
        return None
    folder = Path(re.sub(r"^file:(//)?", "", checkpoint))
    try:
        return json.dumps(sources_of((folder / "offsets" / str(batch)).read_text("utf-8")))
    except (OSError, ValueError):
        return None
