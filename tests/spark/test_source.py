"""The data source as Spark uses it: batch and streaming reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pyspark
import pytest

from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ask = Callable[..., list[Any]]


def read(spark: SparkSession, url: str, **options: str) -> DataFrame:
    return spark.read.format("penstock").option("url", url).options(**options).load()


def test_the_archive_is_read_as_it_is(spark: SparkSession, url: str, ask: Ask, archive: Any) -> None:
    archive(5)
    archive(3, "u", "failed")
    rows = read(spark, url).collect()
    expected = ask("select id::text, name, status::text, data::text, finished_at, attempt from penstock.archived_jobs")
    assert sorted((r.id, r.name, r.status, r.data, r.attempt) for r in rows) == sorted(
        (e["id"], e["name"], e["status"], e["data"], e["attempt"]) for e in expected
    )
    assert {r.finished_at.timestamp() for r in rows} == {e["finished_at"].timestamp() for e in expected}


def test_a_session_of_another_program_finds_the_format_by_itself(spark: SparkSession, url: str, archive: Any) -> None:
    archive(3)
    # Nothing is registered on it.
    assert read(spark.newSession(), url, columns="id").count() == 3


def test_the_processes_of_spark_import_pyspark_from_where_it_is_installed(spark: SparkSession) -> None:
    def where(batches: Any) -> Any:
        import pyarrow as pa
        import pyspark

        yield from (pa.RecordBatch.from_pydict({"file": [pyspark.__file__]}) for _ in batches)

    # The archive in Spark's home has no compiled modules.
    (row,) = spark.range(1, numPartitions=1).mapInArrow(where, "file string").collect()
    assert row.file == pyspark.__file__


def test_the_queue_is_read_as_it_is(spark: SparkSession, url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    ask("select count(*) from penstock.enqueue_many('t', array_fill('{}'::jsonb, array[30]))")
    ask("select count(*) from penstock.claim('w', '{t}', 10)")
    for options in ({}, {"minPartitions": "3"}):
        found = read(spark, url, table="queued_jobs", **options).groupBy("status").count().collect()
        assert {row.status: row["count"] for row in found} == {"queued": 20, "in-progress": 10}


def test_columns_and_filters_go_to_the_database(
    spark: SparkSession, url: str, archive: Any, plan_of: Callable[[DataFrame], str]
) -> None:
    archive(4)
    archive(2, "u'", "failed")
    frame = read(spark, url, columns="id,name,status,finished_at,max_attempts", pushdown="true")
    assert frame.columns == ["id", "name", "status", "finished_at", "max_attempts"]
    for condition, count in {
        'name = "u\'"': 2,
        "name in ('t', 'x')": 4,
        "name like 't%' and status <> 'failed'": 4,
        "finished_at > timestamp'2020-01-01 00:00:00'": 6,
        "finished_at < timestamp'2020-01-01 00:00:00'": 0,
        "id = 'no id'": 0,
        "max_attempts < 100000 and name > 's'": 6,
        "name is null or length(name) = 2": 2,
    }.items():
        assert frame.where(condition).count() == count, condition
    # What the database filters, Spark does not filter again.
    assert "Filter " not in plan_of(frame.where("name = 't'").select("id"))


def test_a_wrong_option_is_refused_with_what_to_do(spark: SparkSession, url: str) -> None:
    # Spark hands on what the source says; test_reader.py has the others.
    with pytest.raises(Exception, match=r"(?s)the option startingTimestamp is 'yesterday'.*milliseconds"):
        read(spark, url, startingTimestamp="yesterday").count()


def test_batches_follow_the_archive_and_a_restart_goes_on_where_it_was(
    spark: SparkSession, url: str, archive: Any, tmp_path: Path
) -> None:
    got: list[int] = []

    def run() -> None:
        stream = spark.readStream.format("penstock").option("url", url).option("startingOffsets", "earliest")
        query = (
            stream.option("maxRowsPerTrigger", "10").option("columns", "id").load()
            .writeStream.foreachBatch(lambda frame, _: got.append(frame.count()))
            .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"

    archive(25)
    archive(3)
    run()
    assert sum(got) == 28 and max(got) == 10
    archive(4)
    run()
    assert sum(got) == 32


async def test_a_running_query_waits_for_the_notification(spark: SparkSession, url: str, archive: Any, tmp_path: Path) -> None:
    got: list[int] = []
    query = (
        spark.readStream.format("penstock").option("url", url).option("waitS", "60").option("columns", "id").load()
        .writeStream.foreachBatch(lambda frame, _: got.append(frame.count())).option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    connection = await asyncpg.connect(url)
    try:

        async def idle() -> bool:
            return bool(await connection.fetchval("select count(*) from penstock.listeners where kind = 'history'"))

        await eventually(idle, "the reader's wait", timeout=60)
        thread = threading.Thread(target=archive, args=(7,))
        thread.start()
        # Less than the minute that it would wait by itself.
        began = time.monotonic()
        await eventually(lambda: sum(got) == 7, "the batch", timeout=45)
        print(f"the batch was there after {time.monotonic() - began:.1f} s")
        thread.join()
        assert query.lastProgress is None or query.lastProgress.sources[0].latestOffset
    finally:
        query.stop()
        await connection.close()
