"""What a micro-batch costs: tasks, statements and connections. Streams that are dropped and created again. No JVM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from penstock.errors import OffsetGone
from penstock.postgres.database import Database
from penstock.spark import scans, writing
from penstock.spark.connections import Connections
from penstock.spark.staging import Batch
from penstock.spark.streams import sink as stream_sink
from penstock.spark.streams.offsets import STREAMS
from penstock.spark.streams.options import EventReadOptions, EventWriteOptions
from penstock.spark.streams.source import EventStreamReader
from tests.waiting import eventually

Ask = Callable[..., list[Any]]
pytestmark = pytest.mark.no_jvm
PLACES = StructType([StructField("partition", IntegerType()), StructField("offset", LongType())])
OURS = (
    "select pid || ' ' || backend_start::text as one from pg_stat_activity where application_name = 'penstock-spark'"
    " and datname = current_database()"
)


def reader(url: str, **given: str) -> EventStreamReader:
    given = {"url": url, "startingOffsets": "earliest", "waitS": "0.01", **given}
    return EventStreamReader(EventReadOptions.parse(given), PLACES)


def append(ask: Ask, stream: str, events: int) -> None:
    """Events whose keys lie all over the partitions."""
    ask(
        "select count(*) from penstock.append_many($1, array_fill('{}'::json, array[$2::integer]),"
        " array(select n::text from generate_series(1, $2) n))",
        stream, events,
    )  # fmt: skip


def read(reader: EventStreamReader, parts: list[Any]) -> list[tuple[int, int]]:
    return [(row["partition"], row["offset"]) for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def test_small_ranges_of_many_partitions_and_streams_are_one_task(url: str, ask: Ask) -> None:
    ask("select penstock.create_stream(name, 64) from unnest('{a,b}'::text[]) as name")
    append(ask, "a", 500)
    ask("select penstock.roll_segment('a')")
    append(ask, "a", 500)
    append(ask, "b", 200)
    following = reader(url, subscribe="a,b")
    start = following.initialOffset()
    end = following.latestOffset(start, ReadAllAvailable())
    (part,) = following.partitions(start, end)
    found = read(following, [part])
    wanted = ask("select b.* from unnest('{a,b}'::text[]) as name cross join lateral penstock.stream_bounds(name) as b")
    assert sorted(found) == sorted((row["partition"], offset) for row in wanted for offset in range(row["next_offset"]))
    # In order within each partition, also over the border of segments.
    for partition in range(64):
        mine = [offset for one, offset in found[:1000] if one == partition]
        assert mine == sorted(mine)
    many = reader(url, subscribe="a,b", minPartitions="8")
    parts = many.partitions(start, end)
    assert len(parts) == 8 and sorted(read(many, parts)) == sorted(found)
    following.stop()
    many.stop()


def test_connections_stay_from_batch_to_batch(url: str, ask: Ask) -> None:
    ask("select penstock.create_stream(name, 16) from unnest('{a,b}'::text[]) as name")
    following = reader(url, subscribe="a")
    here = following.initialOffset()
    opened = []
    for epoch in range(4):
        append(ask, "a", 100)
        end = following.latestOffset(here, ReadAllAvailable())
        (part,) = following.partitions(here, end)
        # As a task of the executor does, whose reader is a copy without a connection.
        assert len(read(reader(url, subscribe="a"), [part])) == 100
        frame = pa.RecordBatch.from_pydict({"value": ["{}"] * 10})
        message = stream_sink.stage(EventWriteOptions(url=url, stream="b"), Batch("w", "stream b", epoch), iter([frame]))
        writing.commit(url, [message], events=True)
        following.reportLatestOffset()
        opened.append({row["one"] for row in ask(OURS)})
        here = end
    # That of the query, and those that its tasks and commits have given back.
    assert 2 <= len(opened[0]) <= 4 and opened == opened[:1] * 4, opened
    following.stop()


def test_an_idle_query_asks_once_for_all_streams(url: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask("select penstock.create_stream('s' || n, 1) from generate_series(1, 200) n")
    asked: list[str] = []
    fetch = Database.fetch

    async def counted(self: Database, query: str, *args: Any, **more: Any) -> Any:
        asked.append(query)
        return await fetch(self, query, *args, **more)

    monkeypatch.setattr(Database, "fetch", counted)
    following = reader(url, subscribe=",".join(f"s{n}" for n in range(1, 201)))
    start = following.initialOffset()
    asked.clear()
    for _ in range(20):
        assert following.latestOffset(start, ReadAllAvailable()) == start
        following.reportLatestOffset()
    # One look each time that Spark asks, every two seconds by default; and at first the word that it waits, and a look after it.
    assert 20 <= len(asked) <= 22, asked
    # It is notified of each of them.
    append(ask, "s77", 1)
    assert following.latestOffset(start, ReadAllAvailable())["s77"] == {"0": 1}
    assert ask("select * from penstock.listeners where kind = 'events'") == []
    following.stop()


@pytest.mark.parametrize("later", [0, 5, 9])
def test_a_stream_that_was_made_again_is_not_read_from_the_middle(url: str, ask: Ask, later: int) -> None:
    ask("select penstock.create_stream('a', 1)")
    append(ask, "a", 5)
    strict, lenient = reader(url, subscribe="a"), reader(url, subscribe="a", failOnDataLoss="false")
    start = strict.initialOffset()
    here = strict.latestOffset(start, ReadAllAvailable())
    (old,) = strict.partitions(start, here)
    ask("select penstock.drop_stream('a', false)")
    ask("select penstock.create_stream('a', 1)")
    if later:
        append(ask, "a", later)
    with pytest.raises(OffsetGone, match="stream a was dropped and created again"):
        strict.latestOffset(here, ReadAllAvailable())
    # What was planned of the old one is not read from the new one.
    with pytest.raises(OffsetGone, match="created again"):
        strict.partitions(start, here)
    assert lenient.partitions(start, here) == []
    with pytest.raises(OffsetGone):
        read(strict, [old])
    assert read(lenient, [old]) == []
    # Told so, a query goes on with the beginning of the new one.
    end = lenient.latestOffset(here, ReadAllAvailable())
    assert read(lenient, lenient.partitions(here, end)) == [(0, offset) for offset in range(later)]
    assert end[STREAMS] != here[STREAMS] and strict.latestOffset(end, ReadAllAvailable()) == end
    # Checkpoints of earlier versions do not say which stream they are of.
    del here[STREAMS]
    assert ("a" in strict.latestOffset(here, ReadAllAvailable())) if later >= 5 else True
    strict.stop()
    lenient.stop()


def test_kept_connections_are_few_healthy_and_given_up(url: str, ask: Ask) -> None:
    def count() -> int:
        return len(ask(OURS))

    def comes(condition: Callable[[], bool], what: str) -> None:
        asyncio.run(eventually(lambda: asyncio.to_thread(condition), what))

    kept: Connections[Any] = Connections(scans.connect, scans.usable, lambda one: one.close(), idle_s=0.5)
    with kept.lent(url):
        assert count() == 1
    comes(lambda: count() == 0 and len(kept) == 0, "the end of what is idle")
    kept = Connections(scans.connect, scans.usable, lambda one: one.close(), most=2)
    with kept.lent(url), kept.lent(url), kept.lent(url):
        assert count() == 3
    assert len(kept) == 2
    comes(lambda: count() == 2, "the surplus to be closed")
    # One that the server has ended is replaced.
    ask(f"select pg_terminate_backend(split_part(one, ' ', 1)::integer) from ({OURS}) as ours")
    with kept.lent(url) as connection, connection.cursor() as cursor:
        cursor.execute("select 1")
    assert len(kept) == 1
    # One whose use failed is not kept.
    with pytest.raises(RuntimeError, match="on purpose"), kept.lent(url):
        raise RuntimeError("on purpose")
    assert len(kept) == 0
    comes(lambda: count() == 0, "its end")


def test_a_forked_process_leaves_the_connections_of_its_parent_alone(url: str, ask: Ask) -> None:
    kept: Connections[Any] = Connections(scans.connect, scans.usable, lambda one: one.close())
    with kept.lent(url):
        pass
    before = {row["one"] for row in ask(OURS)}
    child = os.fork()
    if child == 0:
        try:
            with kept.lent(url) as connection, connection.cursor() as cursor:
                cursor.execute("select pg_backend_pid()")
                own = str(cursor.fetchone()[0]) not in {one.split()[0] for one in before}
            os._exit(0 if own and len(kept) == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with kept.lent(url) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        assert str(cursor.fetchone()[0]) in {one.split()[0] for one in before}


@pytest.mark.parametrize("analyzed", [False, True])
def test_ranges_of_a_large_stream_are_looked_up(url: str, ask: Ask, analyzed: bool) -> None:
    ask("select penstock.create_stream('a', 8)")
    ask(
        "do $$ begin for n in 1..400 loop perform penstock.append_many('a', array_fill('{\"n\": 1}'::json, array[40]),"
        " array(select k::text from generate_series(1, 40) k)); end loop; end $$"
    )
    if analyzed:
        for row in ask("select table_name from penstock.segments"):
            ask(f"analyze penstock.{row['table_name']}")
    ends = {row["partition"]: row["next_offset"] for row in ask("select * from penstock.stream_bounds('a')")}
    (text,) = ask(
        "select penstock.scan_events('a', null, $1, $2, $3, '{value}') as query",
        list(ends), [end - 10 for end in ends.values()], list(ends.values()),
    )  # fmt: skip
    plan = "\n".join(row[0] for row in ask(f"explain {text['query']}"))
    assert "Seq Scan" not in plan and "Index" in plan, plan
    assert len(ask(text["query"])) == 80
