"""Bulk enqueue, replay and the commands around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import InvalidInput, NotFound
from penstock.spark import bulk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


def numbers(ask: Ask) -> list[int]:
    return sorted(row["n"] for row in ask("select (data ->> 'n')::integer as n from penstock.queued_jobs"))


@pytest.mark.soak
def test_a_run_that_was_interrupted_goes_on_and_a_finished_one_does_nothing(spark: SparkSession, url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    frame = bulk.as_jobs(spark.range(90).toDF("n"), bulk.Columns(key="n"))

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 30:
            raise Stopped

    with pytest.raises(Stopped):
        bulk.enqueue(frame, url, "t", run="r", slice_rows=30, progress=stop)
    some = len(numbers(ask))
    assert 30 < some < 90
    done = bulk.enqueue(frame, url, "t", run="r", slice_rows=10)
    assert (done.rows, done.skipped) == (90, some)
    assert numbers(ask) == list(range(90))
    assert bulk.enqueue(frame, url, "t", run="r").skipped == 90
    assert numbers(ask) == list(range(90))
    assert ask("select key from penstock.queued_jobs where data = '{\"n\": 7}'")[0]["key"] == "7"


def test_what_cannot_be_enqueued_is_refused_before_anything_is_read(spark: SparkSession, url: str) -> None:
    with pytest.raises(InvalidInput, match="no column nope"):
        bulk.as_jobs(spark.range(1), bulk.Columns(key="nope"))
    with pytest.raises(NotFound, match="no such job type"):
        bulk.enqueue(bulk.as_jobs(spark.range(1), bulk.Columns()), url, "nope")


def test_a_source_can_be_anything_that_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,who\n1,acme\n2,bolt\n")
    frame = bulk.source(
        spark, "csv", [str(tmp_path)], {"header": "true", "inferSchema": "true"}, "select n + 1 as n, who from source where n > 1"
    )
    (row,) = bulk.as_jobs(frame, bulk.Columns(key="who")).collect()
    assert (row.data, row.key) == ('{"n":3,"who":"bolt"}', "bolt")


def test_a_replay_takes_each_job_once_for_a_run(spark: SparkSession, url: str, ask: Ask, archive: Any) -> None:
    archive(6, "t", "failed", "acme")
    archive(4, "u")
    history = spark.read.format("penstock").option("url", url).load().where("status = 'failed'")
    for run, count in (("a", 6), ("a", 6), ("b", 12)):
        assert bulk.replay(history, url, run) == 6
        assert ask("select count(*) from penstock.queued_jobs where name = 't' and key = 'acme'")[0]["count"] == count


def test_a_run_of_replays_takes_more_when_its_condition_does(spark: SparkSession, url: str, ask: Ask, archive: Any) -> None:
    archive(2, "t", "failed")
    archive(3, "u", "failed")
    history = spark.read.format("penstock").option("url", url).load()
    bulk.replay(history.where("name = 't'"), url, "a")
    bulk.replay(history.where("status = 'failed'"), url, "a")
    assert [tuple(row) for row in ask("select name, count(*) from penstock.queued_jobs group by 1 order by 1")] == [
        ("t", 2),
        ("u", 3),
    ]


def test_payloads_may_be_maps_and_structs_of_them(spark: SparkSession, url: str, ask: Ask) -> None:
    ask("select penstock.create_job_type('t')")
    frame = spark.sql("select map('a', 1) as m, struct(map('b', 2) as inner) as s")
    for column in ("m", "s", None):
        bulk.enqueue(bulk.as_jobs(frame, bulk.Columns(data=column)), url, "t", slice_rows=1)
    assert [row["data"] for row in ask("select data::text from penstock.queued_jobs order by seq")] == [
        '{"a": 1}', '{"inner": {"b": 2}}', '{"m": {"a": 1}, "s": {"inner": {"b": 2}}}',
    ]  # fmt: skip
