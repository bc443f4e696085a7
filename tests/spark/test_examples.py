"""The examples of stream processing do what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from examples.spark import sessions, totals, watches
from penstock.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture
def append(ask: Ask) -> Callable[..., None]:
    """Append events, and create the streams."""

    def append(stream: str, *events: tuple[str, Any]) -> None:
        ask("select penstock.declare_stream($1, 2)", stream)
        if events:
            ask(
                "select * from penstock.append_many($1, $2::text[]::json[], $3)",
                stream, [json.dumps(event) for _, event in events], [key for key, _ in events],
            )  # fmt: skip

    return append


def payloads(ask: Ask, stream: str) -> list[tuple[str, Any]]:
    rows = ask(
        "select e.key, e.data::text as data from penstock.stream_bounds($1) b"
        " cross join lateral penstock.read_events($1, b.partition, 0, 1000) e",
        stream,
    )
    return sorted(((row["key"], json.loads(row["data"])) for row in rows), key=str)


@pytest.fixture
def rocks(spark: SparkSession) -> Iterator[SparkSession]:
    # One partition of state, since each has Python processes of its own.
    settings = {**sessions.STATE_STORE, "spark.sql.shuffle.partitions": "1"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)


def test_sessions_end_with_a_later_click_or_by_a_timer_across_restarts(
    rocks: SparkSession, url: str, ask: Ask, append: Callable[..., None], tmp_path: Path
) -> None:
    def click(key: str, minute: int) -> tuple[str, dict[str, str]]:
        return key, {"at": f"2026-03-01T{12 + minute // 60}:{minute % 60:02}:00Z", "page": "/"}

    append("sessions")
    append("clicks", click("a", 0), click("a", 20), click("b", 5))
    assert sessions.start(rocks, url, str(tmp_path), availableNow=True).awaitTermination(200)
    # The next click of a is in a new session; b has no further click, but time has advanced.
    append("clicks", click("a", 55))
    assert sessions.start(rocks, url, str(tmp_path), availableNow=True).awaitTermination(200)
    found = [(key, (s["ended_ms"] - s["started_ms"]) // 60_000, s["clicks"]) for key, s in payloads(ask, "sessions")]
    assert found == [("a", 20, 2), ("b", 0, 1)]


def test_a_change_of_a_price_becomes_a_job_for_every_customer_who_watches(
    spark: SparkSession, url: str, ask: Ask, append: Callable[..., None], tmp_path: Path
) -> None:
    ask("select penstock.create_job_type('notice')")
    table = spark.range(6000).selectExpr(
        "concat('p', id % 3) as product", "concat('c', id) as customer", "cast(10 + id % 2 as double) as below"
    )
    table.write.parquet(str(tmp_path / "watches"))
    kept = spark.read.parquet(str(tmp_path / "watches"))
    append("prices", ("p1", {"product": "p1", "price": 10.5}), ("p2", {"product": "p2", "price": 99}))
    assert watches.start(spark, url, kept, str(tmp_path / "checkpoint"), availableNow=True).awaitTermination(200)
    jobs = ask("select key, data::text from penstock.queued_jobs")
    assert len(jobs) == len({job["key"] for job in jobs}) == 1000
    # A second change before the jobs ran notifies no customer twice.
    append("prices", ("p1", {"product": "p1", "price": 9.5}))
    assert watches.start(spark, url, kept, str(tmp_path / "checkpoint"), availableNow=True).awaitTermination(200)
    assert ask("select count(*) as jobs from penstock.queued_jobs")[0]["jobs"] == 2000


def test_totals_follow_the_orders(spark: SparkSession, url: str, ask: Ask, append: Callable[..., None], tmp_path: Path) -> None:
    append("totals")
    items = [{"price": 1.25, "count": 2}, {"price": 3.0, "count": 1}]
    append("orders", ("acme", {"order_id": 1, "items": items}), ("bolt", {"order_id": 2, "items": []}))
    assert totals.start(spark, url, str(tmp_path), availableNow=True).awaitTermination(200)
    assert payloads(ask, "totals") == [("acme", {"order_id": 1, "total": 5.5}), ("bolt", {"order_id": 2, "total": 0.0})]


@pytest.mark.soak
def test_a_declarative_pipeline_reads_and_writes_streams(url: str, ask: Ask, append: Callable[..., None], tmp_path: Path) -> None:
    append("large-orders")
    append("orders", *((f"c{n % 2}", {"order_id": n, "total": n * 40.0}) for n in range(6)))
    folder = tmp_path / "pipeline"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "spark" / "pipeline", folder)
    spec = folder / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("file:///var/lib/penstock-pipeline", f"file://{tmp_path}/storage"))
    done = subprocess.run(
        [str(Path(sys.executable).with_name("spark-pipelines")), "run", "--spec", str(spec),
         "--conf", "spark.sql.shuffle.partitions=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280,
        env={**os.environ, "JAVA_HOME": str(find_java().home), "PENSTOCK_DATABASE_URL": url, "SPARK_LOCAL_IP": "127.0.0.1",
             "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert sorted(order["order_id"] for _, order in payloads(ask, "large-orders")) == [3, 4, 5]
