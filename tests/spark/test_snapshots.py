"""A reader's transactions are short, whatever its consumer does: looked at from outside, while a queue runs beside it.

A snapshot that is held keeps vacuum from the rows that the queue leaves behind, which slows every claim.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import asyncpg
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock import Job, Penstock
from penstock.spark.connections import APPLICATION
from penstock.spark.jobs.options import JobReadOptions
from penstock.spark.jobs.source import ArchiveStreamReader, JobReader
from penstock.spark.scans import connect
from penstock.spark.scans import read as scan
from penstock.spark.schemas import arrow_schema, columns_of
from penstock.spark.streams.options import EventReadOptions
from penstock.spark.streams.source import EventReader, EventStreamReader
from tests.waiting import eventually

pytestmark = pytest.mark.no_jvm
BOUND_S = 3.0  # a statement of a reader takes some milliseconds
EVENTS = 40
SHAPE = StructType([StructField("offset", LongType()), StructField("value", StringType())])


class Beside:
    """What goes on beside a reader: a queue at work, and a look at the reader's transactions as an operator takes it."""

    def __init__(self) -> None:
        self.done = 0
        self.longest_s = 0.0
        self.beyond: dict[str, bool] = {}  # queries that were open beyond the bound, and whether they held a snapshot
        self.connections: set[int] = set()
        self._looks = 0
        self._clock_s = 0.0
        self._changed = threading.Condition()

    async def work(self, app: Penstock) -> None:
        """Enqueue jobs and have a worker do them, until cancelled."""

        @app.job("t")
        async def handle(job: Job[int]) -> None:
            with self._changed:
                self.done += 1
                self._changed.notify_all()

        worker = await app.worker()
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run())
            try:
                while True:
                    wanted = self.done + 50
                    await handle.enqueue_many(range(50))
                    await eventually(lambda wanted=wanted: self.done >= wanted, "the jobs")
            finally:
                worker.stop()

    async def look(self, url: str) -> None:
        """Note for how long transactions of readers are open, until cancelled."""
        connection = await asyncpg.connect(url)
        try:
            while True:
                rows = await connection.fetch(
                    "select extract(epoch from clock_timestamp())::float8 as clock_s, pid, query,"
                    " extract(epoch from clock_timestamp() - xact_start)::float8 as open_s, backend_xmin is not null as holds"
                    " from (select 1) as always left join pg_stat_activity"
                    " on datname = current_database() and application_name = $1",
                    APPLICATION,
                )
                with self._changed:
                    self._clock_s = rows[0]["clock_s"]
                    for row in rows:
                        if row["pid"] is not None:
                            self.connections.add(row["pid"])
                        open_s = row["open_s"] or 0.0
                        self.longest_s = max(self.longest_s, open_s)
                        if open_s > BOUND_S:
                            self.beyond[row["query"]] = row["holds"] or self.beyond.get(row["query"], False)
                    self._looks += 1
                    self._changed.notify_all()
                await asyncio.sleep(0.02)
        finally:
            await connection.close()

    def dawdle(self) -> None:
        """What a slow sink does: goes on when the bound is well past and the queue has gone on by a hundred jobs."""
        with self._changed:
            # The time of the last look is of any age; a look that begins now says what time it is.
            looks = self._looks + 2
            assert self._changed.wait_for(lambda: self._looks >= looks, 60), "the watcher does not look"
            jobs, clock_s = self.done + 100, self._clock_s + 1.3 * BOUND_S
            assert self._changed.wait_for(lambda: self.done >= jobs and self._clock_s >= clock_s, 60), "the queue is stuck"

    def consume(self, batches: Iterator[Any]) -> int:
        """Take batches as a slow sink does: dawdle in the middle. Returns the rows."""
        rows = 0
        for place, batch in enumerate(batches):
            rows += batch.num_rows
            if place == 0:
                self.dawdle()
        return rows


@pytest.fixture
async def beside(app: Penstock, url: str) -> AsyncIterator[Beside]:
    """A queue at work, and a stream of 20 MB: more than fits between the database and a reader that takes no more."""
    database = await app.database()
    await database.fetch("select penstock.create_stream('a', 1)")
    for first in range(0, EVENTS, 5):
        await database.fetch(
            "select count(*) from penstock.append_many('a', array(select json_build_object('text', repeat(md5(n::text), 15000))"
            " from generate_series($1::integer, $1 + 4) n))",
            first,
        )
    beside = Beside()
    tasks = [asyncio.create_task(beside.work(app)), asyncio.create_task(beside.look(url))]
    yield beside
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def read_a_stream(url: str, beside: Beside) -> int:
    reader = EventReader(EventReadOptions.parse({"url": url, "subscribe": "a", "rowsPerPartition": "1000"}), SHAPE)
    return sum(beside.consume(reader.read(part)) for part in reader.partitions())


def follow_a_stream(url: str, beside: Beside) -> int:
    given = {"url": url, "subscribe": "a", "startingOffsets": "earliest", "waitS": str(1.3 * BOUND_S)}
    reader = EventStreamReader(EventReadOptions.parse(given), SHAPE)
    here, rows = reader.initialOffset(), 0
    # The last round finds nothing, and waits for a notification.
    while (end := reader.latestOffset(here, ReadMaxRows(EVENTS - 10))) != here:
        rows += sum(beside.consume(reader.read(part)) for part in reader.partitions(here, end))
        here = end
    reader.stop()
    return rows


def follow_the_archive(url: str, beside: Beside) -> int:
    reader = ArchiveStreamReader(JobReadOptions.parse({"url": url, "startingOffsets": "earliest"}), ["id", "data"])
    here, rows = reader.initialOffset(), 0
    for _ in range(2):
        beside.dawdle()
        end = reader.latestOffset(here, ReadAllAvailable())
        rows += sum(beside.consume(reader.read(part)) for part in reader.partitions(here, end))
        here = end
    reader.stop()
    return rows


def read_the_queue(url: str, beside: Beside) -> int:
    reader = JobReader(JobReadOptions.parse({"url": url, "table": "queued_jobs"}), ["id", "data"])
    beside.consume(batch for part in reader.partitions() for batch in reader.read(part))
    return EVENTS


async def test_no_reader_has_a_transaction_open_for_longer_than_a_bound_while_a_queue_runs(url: str, beside: Beside) -> None:
    readers: list[Callable[[str, Beside], int]] = [read_a_stream, follow_a_stream, follow_the_archive, read_the_queue]
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(readers)) as threads:
        rows = await asyncio.gather(*(loop.run_in_executor(threads, reader, url, beside) for reader in readers))
    assert rows[0] == rows[1] == EVENTS and rows[2] >= 200, rows
    # They were seen: each has one connection or more.
    assert len(beside.connections) >= len(readers)
    assert beside.longest_s < BOUND_S, f"{beside.longest_s:.1f} s: {beside.beyond}"


async def test_a_reader_that_takes_rows_at_the_pace_of_its_consumer_is_found_out(url: str, beside: Beside) -> None:
    """The same look at a reader that hands on rows while they come: so the test above can fail."""

    def read_as_it_comes() -> None:
        with connect(url) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(1024 * 1024)})
            cursor.execute("select e.data::text from penstock.read_events('a', 0, 0, 1000) e")
            beside.consume(cursor.fetch_record_batch())

    await asyncio.to_thread(read_as_it_comes)
    assert beside.longest_s > BOUND_S
    assert any("read_events" in query and held for query, held in beside.beyond.items()), beside.beyond


def test_a_slow_consumer_holds_no_snapshot(url: str, ask: Callable[..., list[Any]], archive: Any) -> None:
    archive(5000)
    schema = arrow_schema(columns_of("archived_jobs", "id,data"))
    batches = scan(url, "select id::text, data::text from penstock.archived_jobs", schema, in_memory=10_000)
    first = next(batches)
    # The consumer is in the middle of the result, and the database is done with it.
    (busy,) = ask(
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and (backend_xmin is not null or xact_start is not null)"
    )
    assert busy["count"] == 0
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 5000
