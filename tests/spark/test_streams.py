"""Streams as source and sink of Spark's own queries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Ask = Callable[..., list[Any]]


@pytest.fixture(autouse=True)
def streams(ask: Ask) -> None:
    ask("select penstock.create_stream(name, 4) from unnest('{a,b}'::text[]) as name")


def append(ask: Ask, first: int, last: int) -> None:
    ask(
        "select count(*) from penstock.append_many('a', array(select json_build_object('n', n, 'who', 'k' || n % 5)"
        " from generate_series($1::integer, $2::integer) n), array(select 'k' || n % 5 from generate_series($1, $2) n),"
        " array(select json_build_object('trace', n::text) from generate_series($1, $2) n))",
        first, last,
    )  # fmt: skip


def in_stream(ask: Ask, stream: str) -> list[int]:
    rows = ask(
        "select (e.data ->> 'n')::integer as n from penstock.stream_bounds($1) b"
        " cross join lateral penstock.read_events($1, b.partition, 0, 10000) e",
        stream,
    )
    return sorted(row["n"] for row in rows)


def test_a_batch_has_kafkas_columns_and_those_of_a_schema(spark: SparkSession, url: str, ask: Ask) -> None:
    append(ask, 1, 40)
    reader = spark.read.format("penstock").option("url", url).option("subscribe", "a")
    frame = reader.load()
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "happened_at", "headers"]
    row = (
        frame.selectExpr("key", "from_json(cast(value as string), 'n int').n as n", "topic", "headers")
        .where("n = 7")
        .collect()[0]
    )
    assert (row.key, row.topic, [(h.key, bytes(h.value)) for h in row.headers]) == ("k2", "a", [("trace", b"7")])
    typed = reader.schema("key string, n long, who string, offset long").option("minPartitions", "3").load()
    found = typed.where("key = who").selectExpr("n", "spark_partition_id() as task").collect()
    assert (len(found), sum(row.n for row in found), {row.task for row in found}) == (40, 820, {0, 1, 2})
    # Spark plans a load once: what came later is in the next one.
    append(ask, 41, 42)
    assert (typed.count(), reader.load().count()) == (40, 42)


def test_filters_go_to_the_database(spark: SparkSession, url: str, ask: Ask, plan_of: Callable[[DataFrame], str]) -> None:
    append(ask, 1, 40)
    frame = (
        spark.read.format("penstock").option("columns", "key,topic,partition,offset")
        .options(url=url, subscribePattern="a|b", pushdown="true").load()
    )  # fmt: skip
    everything = [row.asDict() for row in frame.collect()]
    for condition, keeps in {
        "key = 'k2'": lambda row: row["key"] == "k2",
        "key > 'k2' and offset >= 3": lambda row: row["key"] > "k2" and row["offset"] >= 3,
        "partition in (0, 3)": lambda row: row["partition"] in (0, 3),
        "offset < 2 and topic = 'a'": lambda row: row["offset"] < 2,
        "topic = 'b'": lambda row: False,
        "offset > 3 and offset <= 5": lambda row: 3 < row["offset"] <= 5,
    }.items():
        chosen = frame.where(condition)
        assert sorted(map(str, (row.asDict() for row in chosen.collect()))) == sorted(map(str, filter(keeps, everything))), (
            condition
        )
        assert "Filter " not in plan_of(chosen), condition


def test_from_stream_to_stream_every_event_once_through_restarts(spark: SparkSession, url: str, ask: Ask, tmp_path: Path) -> None:
    def run(expected: int) -> Any:
        query = (
            spark.readStream.format("penstock").options(url=url, subscribe="a", startingOffsets="earliest")
            .option("maxOffsetsPerTrigger", "40").schema("key string, n long").load()
            .selectExpr("key", "named_struct('n', n * 10) as value")
            .writeStream.format("penstock").options(url=url, stream="b", checkpointLocation=str(tmp_path))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        assert query.awaitTermination(240), "the query did not end in time"
        assert in_stream(ask, "b") == [n * 10 for n in range(1, expected + 1)]
        return query.lastProgress

    append(ask, 1, 70)
    progress = run(70)
    # The progress says where the stream ends, and that nothing is left.
    assert '"@lag":0' in progress.sources[0].latestOffset.replace(" ", "")
    # As if the driver had died after the sink's commit and before Spark's note of it.
    for note in (tmp_path / "commits").glob("*1*"):
        note.unlink()
    run(70)
    append(ask, 71, 80)
    run(80)


async def test_a_running_query_waits_for_the_notification_and_sees_new_partitions(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path
) -> None:
    got: list[int] = []
    query = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", waitS="60").schema("n long, partition int").load()
        .writeStream.foreachBatch(lambda frame, _: got.extend(row.partition for row in frame.collect()))
        .option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    connection = await asyncpg.connect(url)
    try:

        async def idle() -> bool:
            return bool(await connection.fetchval("select count(*) from penstock.listeners where kind = 'events'"))

        await eventually(idle, "the reader's wait", timeout=60)
        await connection.execute("select penstock.grow_stream('a', 8)")
        await connection.execute(
            "select * from penstock.append_many("
            "'a', array_fill('{}'::json, array[80]), array(select n::text from generate_series(1, 80) n))"
        )
        # Less than the minute that it would wait by itself; the partitions that are new come after the old ones.
        await eventually(lambda: len(got) == 80, "the events", timeout=45)
        assert max(got) > 3 and got.index(next(p for p in got if p > 3)) == sum(p < 4 for p in got)
    finally:
        query.stop()
        await connection.close()


def test_a_query_begins_at_times_of_partitions_and_waits_for_the_least_number_of_events(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path
) -> None:
    append(ask, 1, 20)
    at = ask("select clock_timestamp() as at")[0]["at"].isoformat()
    append(ask, 21, 40)
    got: list[list[int]] = []
    query = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", minOffsetsPerTrigger="15", maxTriggerDelay="1h")
        .option("startingOffsetsByTimestamp", json.dumps({"a": {str(partition): at for partition in range(4)}}))
        .option("startingOffsetsByTimestampStrategy", "latest").schema("n long").load()
        .writeStream.foreachBatch(lambda frame, _: got.append(sorted(row.n for row in frame.collect())))
        .option("checkpointLocation", str(tmp_path)).start()
    )  # fmt: skip
    try:
        query.processAllAvailable()
        append(ask, 41, 50)
        # Spark asks, and is told that there is nothing.
        query.processAllAvailable()
        assert got == [list(range(21, 41))]
        append(ask, 51, 60)
        asyncio.run(eventually(lambda: len(got) == 2, "the second batch", timeout=60))
        assert got[1] == list(range(41, 61))
    finally:
        query.stop()


def test_a_batch_write_of_a_named_writer_counts_once(spark: SparkSession, url: str, ask: Ask) -> None:
    frame = spark.range(50).selectExpr("cast(id % 3 as string) as key", "to_json(named_struct('n', id)) as value", "'b' as topic")
    for _ in range(2):
        frame.write.format("penstock").options(url=url, writer="nightly", epoch="1").mode("append").save()
    assert in_stream(ask, "b") == list(range(50))
    # What was read can be written as it is, partitions and headers included.
    append(ask, 1, 9)
    spark.read.format("penstock").options(url=url, subscribe="a").load().drop("topic").write.format("penstock").options(
        url=url, topic="b"
    ).mode("append").save()
    assert len(in_stream(ask, "b")) == 59


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("select '{}' as value", {}, "which stream"),
        ("select 'x' as key", {"stream": "b"}, "value is missing"),
        ("select '{}' as value, 1 as color", {"stream": "b"}, "no column color"),
        ("select '{}' as value, 'x' as partition", {"stream": "b"}, "partition is string"),
        ("select '{}' as value", {"stream": "nope"}, "no such stream"),
    ],
)
def test_what_is_no_event_is_refused(spark: SparkSession, url: str, query: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        spark.sql(query).write.format("penstock").option("url", url).options(**options).mode("append").save()


def test_times_without_a_zone_are_in_that_of_the_session(spark: SparkSession, url: str, ask: Ask) -> None:
    from penstock.spark import register

    ask('select penstock.append(\'a\', \'{"at": "2026-07-01T12:00:00", "price": 1.005}\')')

    def reader(**options: str) -> Any:
        return spark.read.format("penstock").options(url=url, subscribe="a", **options)

    before = str(spark.conf.get("spark.sql.session.timeZone"))
    try:
        for zone in ("Europe/Berlin", "America/New_York"):
            spark.conf.set("spark.sql.session.timeZone", zone)
            register(spark)
            same = reader().schema("at timestamp, price decimal(10,2), value string").load()
            row = same.selectExpr("at", "price", "from_json(value, 'at timestamp, price decimal(10,2)') as theirs").collect()[0]
            assert (row.at, row.price) == (row.theirs.at, row.theirs.price)
            told = reader(timeZone="UTC").schema("at timestamp").load()
            assert told.selectExpr("unix_seconds(at) as at").collect()[0].at == 1782907200
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
        register(spark)
    for options, message in (({"timeZone": "Nope/Zone"}, "no time zone"), ({"mode": "DROPMALFORMED"}, "from_json")):
        with pytest.raises(Exception, match=message):
            reader(**options).load()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_connections_stay_while_a_batch_comes_once_a_minute(spark: SparkSession, url: str, ask: Ask, tmp_path: Path) -> None:
    """Spark ends Python processes that have been idle for a minute: they and what they keep live from one batch to the next."""
    ours = (
        "select pid || ' ' || backend_start::text as one from pg_stat_activity where application_name = 'penstock-spark'"
        " and datname = current_database()"
    )
    query = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", startingOffsets="earliest").load()
        .select("key", "value").writeStream.format("penstock").options(url=url, stream="b")
        .option("checkpointLocation", str(tmp_path)).trigger(processingTime="45 seconds").start()
    )  # fmt: skip
    opened: list[set[str]] = []
    try:
        for batch in range(5):
            append(ask, 40 * batch + 1, 40 * batch + 40)

            async def copied(wanted: int = 40 * (batch + 1)) -> bool:
                if (error := query.exception()) is not None:
                    raise error
                return len(await asyncio.to_thread(in_stream, ask, "b")) == wanted

            asyncio.run(eventually(copied, f"batch {batch}", 180))
            opened.append({row["one"] for row in ask(ours)})
    finally:
        query.stop()
    print(*map(sorted, opened), sep="\n")
    # A task may get a process that has had none before; what was opened stays, and is not opened again for each batch.
    assert all(earlier <= later for earlier, later in pairwise(opened[1:])), opened
    assert len(opened[-1]) < 2 * len(opened[1]), opened


@pytest.mark.parametrize("target", ["stream", "job"])
def test_output_modes_other_than_append_say_what_to_do(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path, target: str
) -> None:
    """Neither Spark's error nor ours names another mode that is refused; and what is advised instead works."""
    append(ask, 1, 40)
    ask("select penstock.create_job_type('b')")
    counts = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", startingOffsets="earliest").load()
        .groupBy("key").count().selectExpr(f"to_json(named_struct('n', count)) as {'value' if target == 'stream' else 'data'}")
    )  # fmt: skip

    def begin(mode: str) -> None:
        # Spark refuses a mode where the query is started, and a sink in Python where its first batch is.
        writer = counts.writeStream.format("penstock").options(**{"url": url, target: "b"}).outputMode(mode)
        writer.option("checkpointLocation", str(tmp_path / mode)).trigger(availableNow=True).start().awaitTermination()

    # Spark refuses this one before it asks the sink.
    with pytest.raises(Exception, match="penstock does not support Update mode"):
        begin("update")
    with pytest.raises(Exception, match=r'outputMode\(\\?"append\\?"\).*foreachBatch') as refused:
        begin("complete")
    assert "update" not in str(refused.value).split("Current State")[0]
    # The way that the error names.
    put = counts.writeStream.outputMode("update").foreachBatch(
        lambda frame, batch: (
            frame.write.format("penstock").options(**{"url": url, target: "b", "writer": "totals", "epoch": str(batch)})
            .mode("append").save()
        )
    )  # fmt: skip
    put.option("checkpointLocation", str(tmp_path / "each")).trigger(availableNow=True).start().awaitTermination()
    written = in_stream(ask, "b") if target == "stream" else ask("select * from penstock.queued_jobs where name = 'b'")
    assert len(written) > 0


def test_what_works_in_spark_sql_and_what_says_that_it_does_not(spark: SparkSession, url: str, ask: Ask) -> None:
    append(ask, 1, 40)
    spark.sql(f"create temporary view orders using penstock options (url '{url}', subscribe 'a', columns 'key,offset')")
    try:
        assert spark.sql("select count(*) as n from orders").collect()[0].n == 40
        # A table keeps no options, so they are given where it is used.
        spark.sql("create table events (value string, key string) using penstock")
        spark.sql(f"insert into events with (url = '{url}', stream = 'b') values ('{{\"n\": 7}}', 'k')")
        assert in_stream(ask, "b") == [7]
        found = spark.sql(f"select key, value from events with (url = '{url}', subscribe = 'b')").collect()
        assert [(row.key, row.value) for row in found] == [("k", '{"n": 7}')]
        with pytest.raises(Exception, match="keeps no options") as refused:
            spark.sql(f"create table more using penstock options (url '{url}', subscribe 'a')")
        assert "create temporary view" in str(refused.value)
        for statement in ("select * from events", f"select * from events with (url = '{url}')"):
            with pytest.raises(Exception, match="options that say what to read|has no column value"):
                spark.sql(statement).collect()
        with pytest.raises(Exception, match="no option url|neither an option nor a column says which stream"):
            spark.sql("insert into events values ('{}', 'k')")
        with pytest.raises(Exception, match="neither an option nor a column says which stream"):
            spark.sql(f"insert into events with (url = '{url}') values ('{{}}', 'k')")
        assert in_stream(ask, "b") == [7]
    finally:
        spark.catalog.dropTempView("orders")
        spark.sql("drop table if exists events")


@pytest.mark.parametrize(
    ("options", "message", "advice"),
    [
        ({"subscribe": "a", "startingOffset": "earliest"}, "no option startingoffset", "Is it startingOffsets?"),
        ({"subscribe": "a", "maxOffsetPerTrigger": "1"}, "no option maxoffsetpertrigger", "Is it maxOffsetsPerTrigger?"),
        ({"subscrib": "a"}, "no option subscrib", "Is it subscribe?"),
        ({"subscribe": "a", "startingOffsets": "latest"}, "cannot begin at the latest", "always be empty"),
        ({"subscribe": "a", "startingOffsets": '{"a": {"0": -1}}'}, "cannot begin at the latest", "always be empty"),
        ({"table": "archived_jobs", "startingOffsets": "latest"}, "cannot begin at the latest", "always be empty"),
    ],
)
def test_options_that_are_wrong_are_refused(
    spark: SparkSession, url: str, options: dict[str, str], message: str, advice: str
) -> None:
    with pytest.raises(Exception, match=message) as refused:
        spark.read.format("penstock").options(url=url, **options).load().count()
    assert advice in str(refused.value)


@pytest.mark.parametrize(("target", "columns"), [("stream", "'{}' as value"), ("job", "'{}' as data")])
def test_a_misspelt_option_of_a_writer_is_refused(
    spark: SparkSession, url: str, ask: Ask, tmp_path: Path, target: str, columns: str
) -> None:
    with pytest.raises(Exception, match=r"no option epohc for writing(.|\n)*Is it epoch\?"):
        spark.sql(f"select {columns}").write.format("penstock").options(
            **{"url": url, target: "b", "writer": "w", "epohc": "1"}
        ).mode("append").save()
    append(ask, 1, 4)
    query = (
        spark.readStream.format("penstock").options(url=url, subscribe="a", startingOffsets="earliest").load()
        .selectExpr(columns).writeStream.format("penstock").options(**{"url": url, target: "b", "wirter": "w"})
        .option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    )  # fmt: skip
    with pytest.raises(Exception, match=r"no option wirter for writing(.|\n)*Is it writer\?"):
        query.start().awaitTermination()
    assert (in_stream(ask, "b"), ask("select * from penstock.queued_jobs")) == ([], [])


def test_a_misspelt_option_is_refused_in_spark_sql_too(spark: SparkSession, url: str, ask: Ask) -> None:
    with pytest.raises(Exception, match=r"no option startingoffset for reading(.|\n)*Is it startingOffsets\?"):
        spark.sql(
            f"create temporary view misspelt using penstock options (url '{url}', subscribe 'a', startingOffset 'earliest')"
        )
    spark.sql("create table written (value string, key string) using penstock")
    try:
        with pytest.raises(Exception, match=r"no option maxoffsetpertrigger for reading(.|\n)*Is it maxOffsetsPerTrigger\?"):
            spark.sql(f"select * from written with (url = '{url}', subscribe = 'a', maxOffsetPerTrigger = '1')").collect()
        with pytest.raises(Exception, match=r"no option wirter for writing(.|\n)*Is it writer\?"):
            spark.sql(f"insert into written with (url = '{url}', stream = 'b', wirter = 'w') values ('{{}}', 'k')")
        assert in_stream(ask, "b") == []
    finally:
        spark.sql("drop table if exists written")
