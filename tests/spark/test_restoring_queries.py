"""A restore with streaming queries and the history pipeline ahead of it: the steps of docs/restore.md lead to running queries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from penstock import NewEvent, NewJob, Penstock
from penstock.history.lake import Lake
from penstock.spark.history import Pipeline, read_lake
from tests.command_line import penstock
from tests.own_server import OwnServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def server() -> Iterator[OwnServer]:
    server = OwnServer()
    try:
        asyncio.run(server.create())
        yield server
    finally:
        server.remove()


def ask(server: OwnServer, query: str, *args: Any) -> list[Any]:
    async def run() -> list[Any]:
        connection = await asyncpg.connect(server.url)
        try:
            return list(await connection.fetch(query, *args))
        finally:
            await connection.close()

    return asyncio.run(run())


async def fill(server: OwnServer, begin: int, end: int) -> None:
    """Events, and finished jobs."""
    async with Penstock(server.url) as app:
        await app.create_job_type("mail") if not begin else None
        await app.stream("orders", int, partitions=2).append_many([NewEvent(n, str(n)) for n in range(begin, end)])
        await app.enqueue_many("mail", [NewJob(n) for n in range(begin, end)])
        database = await app.database()
        rows = await database.fetch("select id, attempt, lease from penstock.claim('w', array['mail'], $1)", end - begin)
        await database.fetch(
            "select * from penstock.settle($1, $2::smallint[], $3::bigint[])",
            [row["id"] for row in rows], [row["attempt"] for row in rows], [row["lease"] for row in rows],
        )  # fmt: skip


def follow(spark: SparkSession, server: OwnServer, out: Path, checkpoint: Path, **options: str) -> None:
    """Bring a folder of Parquet up to the end of the stream."""
    frame = spark.readStream.format("penstock").option("url", server.url).option("subscribe", "orders")
    for name, value in {"startingOffsets": "earliest", **options}.items():
        frame = frame.option(name, value)
    query = (
        frame.load().writeStream.format("parquet").option("path", str(out)).option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()


def test_queries_and_a_lake_that_are_ahead_are_told_and_brought_back(
    spark: SparkSession, server: OwnServer, tmp_path: Path
) -> None:
    lake = Lake("main", str(tmp_path / "lake"))
    ahead, early = tmp_path / "ahead", tmp_path / "early"
    assert penstock(server.url, "migrate").returncode == 0
    asyncio.run(fill(server, 0, 50))
    follow(spark, server, tmp_path / "out", ahead)
    follow(spark, server, tmp_path / "other", early)
    Pipeline(spark, server.url, lake, delta=True).run()
    asyncio.run(server.take_backup())
    asyncio.run(fill(server, 50, 80))
    (row,) = ask(server, "select clock_timestamp() as time")
    time: datetime = row["time"]
    asyncio.run(fill(server, 80, 120))
    follow(spark, server, tmp_path / "out", ahead)
    Pipeline(spark, server.url, lake, delta=True).run()
    assert read_lake(spark, server.url).count() == 120
    asyncio.run(server.archive_everything())
    asyncio.run(server.restore(time))

    report = json.loads(
        penstock(server.url, "restore", "check", f"--checkpoint={ahead}", f"--checkpoint={early}", "--json").stdout
    )
    (of_ahead, of_early), (of_lake,) = report["checkpoints"], report["lakes"]
    assert of_ahead["ahead"] and not of_early["ahead"]
    # What came between the last batch before the time and the time is in the files that are ahead too.
    assert (of_lake["jobs"], of_lake["unknown"], of_lake["again"]) == (70, 40, {})
    assert penstock(server.url, "restore", "fence").returncode == 0
    # New events take the offsets of those that are lost, and pass the checkpoint.
    asyncio.run(fill(server, 1000, 1100))
    with pytest.raises(Exception, match="restored to a time at which it ended at"):
        follow(spark, server, tmp_path / "out", ahead)
    with pytest.raises(Exception, match="the database was restored|the archive ends at transaction"):
        Pipeline(spark, server.url, lake).run()
    follow(spark, server, tmp_path / "other", early)
    key = spark.read.parquet(str(tmp_path / "other")).selectExpr("cast(cast(key as string) as int) as key")
    assert sorted(row.key for row in key.collect()) == [*range(80), *range(1000, 1100)]
    follow(spark, server, tmp_path / "new", tmp_path / "new-checkpoint", startingOffsets=json.dumps(of_ahead["ends"]))
    key = spark.read.parquet(str(tmp_path / "new")).selectExpr("cast(cast(key as string) as int) as key")
    assert sorted(row.key for row in key.collect()) == list(range(1000, 1100))
    assert penstock(server.url, "restore", "lake").returncode == 0
    assert read_lake(spark, server.url).count() == 50
    Pipeline(spark, server.url, lake).run()
    ids = sorted(row.id for row in read_lake(spark, server.url).select("id").collect())
    assert ids == sorted(str(row["id"]) for row in ask(server, "select id from penstock.archived_jobs"))
    assert len(ids) == 180
