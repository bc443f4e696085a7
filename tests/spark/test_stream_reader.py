"""Streams as Spark's processes read and write them, without a JVM."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark.sql.types import DataType, StructType

from penstock import Penstock
from penstock.errors import Conflict, InvalidInput, NotFound, OffsetGone
from penstock.spark import writing
from penstock.spark.staging import Batch
from penstock.spark.streams import sink as stream_sink
from penstock.spark.streams.offsets import LAG, Since
from penstock.spark.streams.options import EventReadOptions, EventWriteOptions
from penstock.spark.streams.rows import columns_of, fields_of, unpacked
from penstock.spark.streams.source import EventReader, EventStreamReader
from penstock.streams.models import NewEvent
from penstock.streams.partitioner import partition_of

Ask = Callable[..., list[Any]]
pytestmark = pytest.mark.no_jvm
KAFKA = "key string, value string, topic string, partition int, offset bigint"


def schema(text: str) -> StructType:
    """A schema without a JVM to parse it: simple types only."""
    kinds = {"bigint": "long", "int": "integer"}
    fields = [
        {"name": name, "type": kinds.get(kind, kind), "nullable": True, "metadata": {}}
        for name, kind in (part.split() for part in text.split(", "))
    ]
    made: DataType = StructType.fromJson({"type": "struct", "fields": fields})
    assert isinstance(made, StructType)
    return made


def options(url: str, **given: str) -> EventReadOptions:
    return EventReadOptions.parse({"url": url, "waitS": "0", **({} if "assign" in given else {"subscribe": "a"}), **given})


def events(reader: Any, parts: Sequence[Any]) -> list[dict[str, Any]]:
    # As in a task: another process has a copy.
    copy = pickle.loads(pickle.dumps(reader))
    return [row for part in parts for batch in copy.read(part) for row in batch.to_pylist()]


def batch(url: str, columns: str = KAFKA, **given: str) -> list[dict[str, Any]]:
    reader = EventReader(options(url, **given), schema(columns))
    return events(reader, reader.partitions())


def append(ask: Ask, keys: Sequence[str | None], stream: str = "a", value: str = '{"n": %s}') -> None:
    ask(
        "select * from penstock.append_many($1, $2::text[]::json[], $3)",
        stream, [value % place for place in range(len(keys))], list(keys),
    )  # fmt: skip


@pytest.fixture
def stream(ask: Ask) -> str:
    ask("select penstock.create_stream('a', 4)")
    return "a"


def test_a_stream_is_read_as_it_is(url: str, ask: Ask, stream: str) -> None:
    append(ask, [f"k{n}" for n in range(50)])
    ask("select penstock.roll_segment('a')")
    append(ask, [*(f"k{n}" for n in range(30)), None])
    expected = ask(
        "select e.key, e.data::text as value, partition, e.event_offset as offset, e.appended_at from penstock.segment_starts"
        " cross join lateral penstock.read_events('a', partition, 0, 1000) e where first_offset = 0"
        " order by partition, event_offset"
    )
    for given in ({}, {"minPartitions": "7"}, {"rowsPerPartition": "5"}):
        found = batch(url, KAFKA + ", timestamp timestamp", **given)
        assert [(r["key"], r["value"], r["topic"], r["partition"], r["offset"], r["timestamp"]) for r in found] == [
            (e["key"], e["value"], "a", e["partition"], e["offset"], e["appended_at"]) for e in expected
        ], given


@pytest.mark.parametrize("starts", ["earliest", '{"a": {"0": 3, "1": -1, "2": -2}}'])
def test_a_batch_begins_and_ends_where_it_is_told(url: str, ask: Ask, stream: str, starts: str) -> None:
    append(ask, [f"k{n}" for n in range(60)])
    bounds = {r["partition"]: r["next_offset"] for r in ask("select * from penstock.stream_bounds('a')")}
    found = batch(url, "partition int, offset bigint", startingOffsets=starts, endingOffsets='{"a": {"3": 2}}')
    first = {0: 0} if starts == "earliest" else {0: 3, 1: bounds[1]}
    expected = [(p, n) for p in range(4) for n in range(first.get(p, 0), 2 if p == 3 else bounds[p])]
    assert [(r["partition"], r["offset"]) for r in found] == expected


def test_times_say_where_to_begin_and_to_end(url: str, ask: Ask, stream: str) -> None:
    moments = []
    for _ in range(3):
        append(ask, ["k"])
        moments.append(ask("select clock_timestamp() as at")[0]["at"].isoformat())
    assert [r["offset"] for r in batch(url, "offset bigint", startingTimestamp=moments[0])] == [1, 2]
    assert [r["offset"] for r in batch(url, "offset bigint", startingTimestamp=moments[0], endingTimestamp=moments[1])] == [1]


def everywhere(ask: Ask, rounds: int) -> list[str]:
    """Append an event to each of four partitions, some times over; returns the time after each round."""
    moments = []
    for _ in range(rounds):
        ask("select penstock.append_routed('a', 4, '{0,1,2,3}', '{1,1,1,1}', array_fill('{}'::json, array[4]))")
        moments.append(ask("select clock_timestamp() as at")[0]["at"].isoformat())
    return moments


def test_times_of_single_partitions_say_where_to_begin_and_to_end(url: str, ask: Ask, stream: str) -> None:
    first, second, last = everywhere(ask, 3)
    starts = json.dumps({"a": {"0": first, "1": second}})
    found = batch(
        url, "partition int, offset bigint", startingOffsetsByTimestamp=starts,
        endingOffsetsByTimestamp=json.dumps({"a": {"0": second, "2": first, "3": last}}),
    )  # fmt: skip
    # Of partitions that are not named a batch reads from the beginning, and to the end.
    assert [(r["partition"], r["offset"]) for r in found] == [(0, 1), (1, 2), (2, 0), (3, 0), (3, 1), (3, 2)]
    reader = EventStreamReader(options(url, startingOffsetsByTimestamp=starts), schema("offset bigint"))
    assert reader.initialOffset()["a"] == {"0": 1, "1": 2, "2": 3, "3": 3}
    reader.stop()
    with pytest.raises(InvalidInput, match="startingOffsetsByTimestamp names partition 9 of a"):
        batch(url, startingOffsetsByTimestamp=json.dumps({"a": {"9": first}}))


@pytest.mark.parametrize(("name", "default"), [("startingOffsetsByTimestamp", "error"), ("startingTimestamp", "latest")])
def test_a_time_after_which_nothing_came_is_an_error_or_means_the_end(
    url: str, ask: Ask, stream: str, name: str, default: str
) -> None:
    (last,) = everywhere(ask, 1)
    given = {name: last if name == "startingTimestamp" else json.dumps({"a": {"0": last, "1": last, "2": last, "3": last}})}
    for strategy in ("error", "latest", None):
        chosen = {} if strategy is None else {"startingOffsetsByTimestampStrategy": strategy}
        if (strategy or default) == "error":
            with pytest.raises(InvalidInput, match="partition 0 of a has no event of") as refused:
                batch(url, **given, **chosen)
            assert "to latest" in str(refused.value.hint)
        else:
            assert batch(url, **given, **chosen) == []
    append(ask, ["k"])
    assert len(batch(url, **given, startingOffsetsByTimestampStrategy="latest")) == 1


def test_assigned_partitions_alone_are_read(url: str, ask: Ask, stream: str) -> None:
    append(ask, [f"k{n}" for n in range(40)])
    assert {r["partition"] for r in batch(url, assign='{"a": [0, 2]}')} == {0, 2}
    with pytest.raises(InvalidInput, match="no partition 9"):
        batch(url, assign='{"a": [9]}')


def test_a_pattern_finds_streams_that_are_made_later(url: str, ask: Ask) -> None:
    ask("select penstock.create_stream('ship.eu', 1)")
    ask("select penstock.create_stream('shipping', 1)")
    given = EventReadOptions.parse({"url": url, "waitS": "0", "subscribePattern": r"ship\..*", "startingOffsets": "earliest"})
    reader = EventStreamReader(given, schema("topic string"))
    start = reader.initialOffset()
    append(ask, ["k"], "ship.eu")
    append(ask, ["k"], "shipping")
    end = reader.latestOffset(start, ReadAllAvailable())
    assert [r["topic"] for r in events(reader, reader.partitions(start, end))] == ["ship.eu"]
    ask("select penstock.create_stream('ship.us', 1)")
    append(ask, ["k", "k"], "ship.us")
    after = reader.latestOffset(end, ReadAllAvailable())
    assert [r["topic"] for r in events(reader, reader.partitions(end, after))] == ["ship.us", "ship.us"]
    reader.stop()


def test_fields_of_the_payload_are_columns_of_their_own(url: str, ask: Ask, stream: str) -> None:
    append(ask, ["k", "k", "k"], value='{"n": %s, "at": "2026-01-31T12:00:00Z", "day": "2026-01-31", "who": "acme", "more": [1]}')
    found = batch(url, "key string, n bigint, at timestamp, day date, who string, more string, missing double")
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert [(r["n"], r["at"], str(r["day"]), r["who"], r["more"], r["missing"]) for r in found] == [
        (n, moment, "2026-01-31", "acme", "[1]", None) for n in range(3)
    ]


@pytest.mark.parametrize("bad", ['{"n": "x"}', "[1]", "{", '{"n": true}', '{"n": 1e300}'])
def test_a_payload_that_does_not_fit_is_null_or_an_error(bad: str) -> None:
    values = pa.array([b'{"n": 1}', bad.encode(), None, b'{"n": 4}'])
    wanted = pa.schema([pa.field("n", pa.int32())])
    assert fields_of(values, wanted, False, UTC)["n"].to_pylist() == [1, None, None, 4]
    with pytest.raises(InvalidInput, match="payload"):
        fields_of(values, wanted, True, UTC)


def test_the_mode_of_a_read_says_whether_a_bad_record_is_an_error(url: str, ask: Ask, stream: str) -> None:
    append(ask, ["k", "k"], value='{"n": "x", "m": %s}')
    for given in ({}, {"mode": "permissive"}):
        assert [(r["n"], r["m"]) for r in batch(url, "n bigint, m bigint", **given)] == [(None, 0), (None, 1)]
    with pytest.raises(InvalidInput, match="the field n is not int64"):
        batch(url, "n bigint, m bigint", mode="failfast")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_payloads_of_bytes_are_read_also_compressed(url: str, compression: str | None) -> None:
    async def append() -> None:
        async with Penstock(url) as app:
            blobs = app.stream("a", bytes, partitions=1, compression=compression)
            await blobs.append_many([NewEvent(b"\x00\xff", key="k"), NewEvent(b"b" * 500)])

    asyncio.run(append())
    assert [r["value"] for r in batch(url, "value binary")] == [b"\x00\xff", b"b" * 500]


def test_a_payload_that_cannot_be_unpacked_is_null_or_an_error_and_a_small_frame_takes_no_more_than_a_part_of_memory() -> None:
    huge = zstandard.ZstdCompressor().compress(bytes(20 << 20))
    claims_too_much = bytes.fromhex("28b52ffd") + bytes([0xE0]) + (2**45).to_bytes(8, "little") + b"\x01\x00\x00"
    values = [huge, b"no frame", huge, claims_too_much, huge, None]
    packed = pa.RecordBatch.from_arrays([pa.array(range(6)), pa.array(values, pa.binary())], ["offset", "value"])
    parts = list(unpacked(packed, False))
    found = [row for part in parts for row in part.to_pylist()]
    assert [row["offset"] for row in found] == [0, 1, 2, 3, 4, 5]
    assert [None if row["value"] is None else len(row["value"]) for row in found] == [
        20 << 20,
        None,
        20 << 20,
        None,
        20 << 20,
        None,
    ]
    assert max(part.nbytes for part in parts) < 64 << 20
    with pytest.raises(InvalidInput, match="cannot be unpacked"):
        list(unpacked(packed, True))


def test_of_a_transaction_over_several_partitions_all_or_nothing_is_read(url: str, ask: Ask, stream: str) -> None:
    """While transactions append one event to each partition, no planned end lies inside of one."""
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            ask("select * from penstock.append_routed('a', 4, '{0,1,2,3}', '{1,1,1,1}', array_fill('{}'::json, array[4]))")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        while seen < 20:
            found = [r["partition"] for r in batch(url, "partition int")]
            counts = {found.count(partition) for partition in range(4)}
            assert len(counts) == 1, counts
            seen = max(counts)
    finally:
        stop.set()
        writer.join()


def test_a_query_follows_and_reports_its_lag(url: str, ask: Ask, stream: str) -> None:
    append(ask, ["k"] * 5)
    reader = EventStreamReader(options(url), schema("offset bigint"))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    append(ask, ["k"] * 7)
    end = reader.latestOffset(start, ReadMaxRows(3))
    assert [r["offset"] for r in events(reader, reader.partitions(start, end))] == [5, 6, 7]
    assert reader.reportLatestOffset()[LAG] == 4
    # After a restart "latest" is another place; the batch is the same nevertheless.
    again = EventStreamReader(options(url), schema("offset bigint"))
    assert [r["offset"] for r in events(again, again.partitions(again.initialOffset(), end))] == [5, 6, 7]
    last = again.latestOffset(end, ReadAllAvailable())
    assert [r["offset"] for r in events(again, again.partitions(end, last))] == [8, 9, 10, 11]
    reader.stop()
    again.stop()


def test_available_now_stops_where_it_began(url: str, ask: Ask, stream: str) -> None:
    append(ask, ["k"] * 5)
    reader = EventStreamReader(options(url, startingOffsets="earliest", maxOffsetsPerTrigger="3"), schema("offset bigint"))
    reader.prepareForTriggerAvailableNow()
    append(ask, ["k"] * 5)
    limit = reader.getDefaultReadLimit()
    here, sizes = reader.initialOffset(), []
    while (end := reader.latestOffset(here, limit)) != here:
        sizes.append(len(events(reader, reader.partitions(here, end))))
        here = end
    assert sizes == [3, 2]
    reader.stop()


def test_a_stream_that_grows_is_read_on_with_the_order_of_each_key(url: str, ask: Ask, stream: str) -> None:
    keys = [f"k{n}" for n in range(40)]
    append(ask, keys)
    reader = EventStreamReader(options(url, startingOffsets="earliest"), schema("key string, partition int"))
    here = reader.initialOffset()
    ask("select penstock.grow_stream('a', 9)")
    append(ask, keys)
    order: list[tuple[str, int]] = []
    while (end := reader.latestOffset(here, ReadMaxRows(15))) != here:
        order += [(r["key"], r["partition"]) for r in events(reader, reader.partitions(here, end))]
        here = end
    assert len(order) == 80
    for key in keys:
        assert [p for k, p in order if k == key] == [partition_of(key, 4), partition_of(key, 9)]
    reader.stop()


def test_a_batch_waits_for_the_least_number_of_events_or_for_so_long(url: str, ask: Ask, stream: str) -> None:
    given = {"startingOffsets": "earliest", "minOffsetsPerTrigger": "10"}
    reader = EventStreamReader(options(url, **given, maxTriggerDelay="1h"), schema("offset bigint"))
    limit = reader.getDefaultReadLimit()
    assert isinstance(limit, ReadMinRows) and limit.min_rows == 10
    append(ask, ["k"] * 3)
    # The first one of a query is not put off.
    here = reader.latestOffset(reader.initialOffset(), limit)
    assert len(events(reader, reader.partitions(reader.initialOffset(), here))) == 3
    append(ask, ["k"] * 9)
    assert reader.latestOffset(here, limit) == here
    # Unless Spark asks for all there is, or the delay is over.
    assert reader.latestOffset(here, ReadAllAvailable()) != here
    hasty = EventStreamReader(options(url, **given, maxTriggerDelay="0s"), schema("offset bigint"))
    for _ in range(2):
        assert hasty.latestOffset(here, limit) != here
    append(ask, ["k"])
    end = reader.latestOffset(here, limit)
    assert len(events(reader, reader.partitions(here, end))) == 10
    append(ask, ["k"])
    reader.prepareForTriggerAvailableNow()
    assert reader.latestOffset(end, limit) != end
    reader.stop()
    hasty.stop()


def test_a_reader_that_waits_for_more_events_hears_of_them(url: str, ask: Ask, stream: str) -> None:
    given = options(url, startingOffsets="earliest", minOffsetsPerTrigger="10", maxOffsetsPerTrigger="12", waitS="60")
    reader = EventStreamReader(given, schema("offset bigint"))
    limit = reader.getDefaultReadLimit()
    append(ask, ["k"])
    here = reader.latestOffset(reader.initialOffset(), limit)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(reader.latestOffset, here, limit)
        for _ in range(7):
            append(ask, ["k", "k"])
        end = found.result(60)
    # Ten or more were there, and no more than twelve are taken at a time.
    assert 10 <= sum(run.end - run.begin for part in reader.partitions(here, end) for run in part.runs) <= 12
    reader.stop()


def test_dropped_events_are_an_error_unless_told_otherwise(url: str, ask: Ask, stream: str) -> None:
    append(ask, ["k"] * 5)
    strict = EventStreamReader(options(url, startingOffsets="earliest"), schema("offset bigint"))
    lenient = EventStreamReader(options(url, startingOffsets="earliest", failOnDataLoss="false"), schema("offset bigint"))
    start = strict.initialOffset()
    planned = lenient.latestOffset(start, ReadAllAvailable())
    parts = strict.partitions(start, planned)
    ask("select penstock.roll_segment('a')")
    append(ask, ["k"] * 2)
    ask("select penstock.change_stream('a', '{\"keep_events\": 1}')")
    assert ask("select penstock.retire_segments('a') as gone")[0]["gone"] == 1
    with pytest.raises(OffsetGone, match="failOnDataLoss|lost"):
        strict.latestOffset(start, ReadAllAvailable())
    with pytest.raises(OffsetGone, match="are gone"):
        events(strict, parts)
    end = lenient.latestOffset(start, ReadAllAvailable())
    assert [r["offset"] for r in events(lenient, lenient.partitions(start, end))] == [5, 6]
    strict.stop()
    lenient.stop()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"subscribePattern": "b"}, "exclude each other"),
        ({"table": "queued_jobs"}, "exclude each other"),
        ({"kafka.bootstrap.servers": "x:1"}, "no|brokers"),
        ({"startingOffsets": "x"}, "startingOffsets"),
        ({"endingOffsets": "earliest"}, "endingOffsets"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "exclude each other"),
        ({"startingOffsetsByTimestamp": "[]"}, "startingOffsetsByTimestamp"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": true}}'}, "the time True for partition 0 of a"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": "noon"}}'}, "'noon'"),
        ({"startingOffsetsByTimestamp": '{"a": {"0": "2026-01-31T12:00:00"}}'}, "time zone"),
        ({"endingOffsetsByTimestamp": '{"a": 1}'}, "endingOffsetsByTimestamp"),
        ({"startingOffsets": "latest", "startingOffsetsByTimestamp": "{}"}, "exclude each other"),
        ({"startingTimestamp": "1", "startingOffsetsByTimestampStrategy": "earliest"}, "Strategy is 'earliest'"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "more than maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "maxTriggerDelay"),
        ({"groupIdPrefix": "x"}, "for Kafka's brokers"),
        ({"mode": "DROPMALFORMED"}, "mode"),
        ({"maxOffsetsPerTrigger": "0"}, "between"),
    ],
)
def test_a_wrong_option_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        EventReadOptions.parse({"url": "postgresql://x", "subscribe": "a", **given})


def test_times_are_milliseconds_or_text_and_spans_are_sparks() -> None:
    given = {"startingOffsetsByTimestamp": '{"a": {"0": 1767225600000, "1": "1767225600000", "2": "2026-01-01T01:00:00+01:00"}}'}
    where = EventReadOptions.parse({"url": "postgresql://x", "subscribe": "a", **given}).starting
    assert isinstance(where, Since) and where.strict and where.time is None
    assert where.times == {("a", partition): datetime(2026, 1, 1, tzinfo=UTC) for partition in range(3)}
    for text, seconds in {"250": 0.25, "90s": 90, "2 min": 120, "15m": 900, "1h": 3600, "1d": 86400}.items():
        found = EventReadOptions.parse({"url": "postgresql://x", "subscribe": "a", "maxTriggerDelay": text})
        assert found.delay.total_seconds() == seconds


def test_what_is_not_there_is_refused(url: str, ask: Ask, stream: str) -> None:
    with pytest.raises(NotFound, match="no such stream: nope"):
        batch(url, subscribe="nope")
    with pytest.raises(InvalidInput, match="behind the end"):
        batch(url, endingOffsets='{"a": {"0": 5}}')
    with pytest.raises(InvalidInput, match="not read"):
        batch(url, startingOffsets='{"b": {"0": 5}}')
    with pytest.raises(InvalidInput, match="no column color"):
        columns_of("key,color", True)
    assert "headers" not in columns_of(None, False)


def write(url: str, frame: pa.RecordBatch, epoch: int = 0, **given: str) -> list[writing.Staged]:
    """As two attempts of one task, of which the second counts."""
    chosen = EventWriteOptions.parse({"url": url, **given})
    return [stream_sink.stage(chosen, Batch("w", chosen.target, epoch), iter([frame])) for _ in range(2)][1:]


def test_staged_events_are_appended_once_and_in_order(url: str, ask: Ask, stream: str) -> None:
    keys = [f"k{n % 7}" for n in range(5000)]
    frame = pa.RecordBatch.from_pydict({"value": [json.dumps({"n": n}) for n in range(5000)], "key": keys})
    messages = write(url, frame, stream="a")
    for _ in range(2):
        writing.commit(url, messages, events=True)
    found = batch(url, "key string, n bigint, partition int")
    assert sorted(r["n"] for r in found) == list(range(5000))
    for key in set(keys):
        mine = [r for r in found if r["key"] == key]
        assert {r["partition"] for r in mine} == {partition_of(key, 4)}
        assert [r["n"] for r in mine] == [n for n in range(5000) if keys[n] == key]
    assert ask("select * from penstock.staged_events") == []
    # Sabotage: it is the note of the epoch that keeps the second commit out.
    messages = write(url, frame.slice(0, 10), stream="a")
    ask("delete from penstock.sink_epochs")
    writing.commit(url, messages, events=True)
    assert len(batch(url)) == 5010


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("what", ["value", "key", "headers"])
def test_the_limit_of_an_event_holds_for_spark_and_names_the_row(url: str, ask: Ask, what: str, compressed: bool) -> None:
    given = {"format": "bytes", "compression": "zstd"} if compressed else {}
    ask("select penstock.create_stream('a', 2, $1::jsonb)", json.dumps({**given, "max_event_bytes": 1000}))
    ask("select penstock.create_stream('b', 1)")
    large = json.dumps({"x": "y" * 991})
    fits, too_large = large.replace("yy", "", 1), large
    assert len(fits) <= 1000 < len(too_large) + 1
    too_large = too_large.replace("y", "yyy", 1)

    def frame(text: str) -> pa.RecordBatch:
        rows = {"topic": ["b", "a", "a"], "value": ["{}"] * 3, "key": ["k"] * 3, "headers": ["{}"] * 3}
        rows[what] = [*rows[what][:2], text]
        return pa.RecordBatch.from_pydict(rows)

    # The number of the row in its task, whatever the streams between are.
    with pytest.raises(InvalidInput, match=f"{what} of row 2 of the task has {len(too_large)} bytes.* stream a at most 1000"):
        write(url, frame(too_large))
    writing.commit(url, write(url, frame(fits)), events=True)
    assert ask("select sum(next_offset) as n from penstock.stream_bounds('a')")[0]["n"] == 2
    # What is staged by hand, or before the limit was lowered, is refused at the commit.
    messages = write(url, frame(fits), 1)
    ask("select penstock.change_stream('a', '{\"max_event_bytes\": 900}')")
    with pytest.raises(InvalidInput, match="stream a is larger than 900 bytes"):
        writing.commit(url, messages, events=True)
    assert ask("select sum(next_offset) as n from penstock.stream_bounds('a')")[0]["n"] == 2


@pytest.mark.parametrize("time", [-62_135_596_801_000_000, 253_402_300_800_000_000, 2**62])
def test_no_write_admits_a_time_that_readers_have_not(url: str, ask: Ask, stream: str, time: int) -> None:
    times = pa.array([0, time], pa.timestamp("us", tz="UTC"))
    frame = pa.RecordBatch.from_pydict({"value": ["{}", "{}"], "happened_at": times})
    with pytest.raises(InvalidInput, match=f"happened_at of row 1 of the task is out of range: {time}"):
        write(url, frame, stream="a")
    structs = pa.RecordBatch.from_arrays([pa.StructArray.from_arrays([times], ["at"])], ["value"])
    with pytest.raises(InvalidInput, match="row 1 of the task has a date or a time that is out of range"):
        write(url, structs, stream="a")
    if time != 2**62:  # which PostgreSQL has: staged by hand
        message = write(url, frame.slice(0, 1), stream="a")
        ask("update penstock.staged_events set times = array['epoch'::timestamptz + $1 * interval '1 microsecond']", time)
        with pytest.raises(InvalidInput, match="a time is out of range"):
            writing.commit(url, message, events=True)
    assert batch(url) == []


def test_events_staged_before_a_growth_go_where_their_keys_are_now(url: str, ask: Ask, stream: str) -> None:
    keys = [f"k{n}" for n in range(2500)]
    frame = pa.RecordBatch.from_pydict({"value": ["{}"] * 2500, "key": keys})
    messages = write(url, frame, stream="a")
    ask("select penstock.grow_stream('a', 11)")
    writing.commit(url, messages, events=True)
    found = batch(url, "key string, partition int")
    assert sorted((r["key"], r["partition"]) for r in found) == sorted((key, partition_of(key, 11)) for key in keys)


def test_columns_say_the_stream_the_partition_the_headers_and_the_time(url: str, ask: Ask, stream: str) -> None:
    ask("select penstock.create_stream('b', 2, '{\"format\": \"bytes\"}')")
    moment = datetime(2026, 1, 31, tzinfo=UTC)
    frame = pa.RecordBatch.from_pydict(
        {
            "topic": ["a", "b", "a"],
            "value": pa.array([b'{"n": 1}', b"\xff", None], pa.binary()),
            "partition": pa.array([3, None, 2], pa.int32()),
            "happened_at": pa.array([moment, None, None], pa.timestamp("us", tz="UTC")),
            "headers": pa.array([[("trace", b"7")], None, None], pa.map_(pa.string(), pa.binary())),
        }
    )
    writing.commit(url, write(url, frame), events=True)
    found = batch(url, KAFKA + ", happened_at timestamp")
    assert [(r["partition"], r["value"], r["happened_at"]) for r in found] == [(2, None, None), (3, '{"n": 1}', moment)]
    (event,) = ask("select headers::text from penstock.read_events('a', 3)")
    assert event["headers"] == '{"trace":"7"}'
    reader = EventReader(options(url, subscribe="b"), schema("value binary"))
    assert events(reader, reader.partitions()) == [{"value": b"\xff"}]


def test_what_is_no_event_is_refused_and_leaves_nothing(url: str, ask: Ask, stream: str) -> None:
    with pytest.raises(InvalidInput, match="no partition 4"):
        write(url, pa.RecordBatch.from_pydict({"value": ["{}"], "partition": pa.array([4], pa.int32())}), stream="a")
    with pytest.raises(NotFound, match="no such stream: c"):
        write(url, pa.RecordBatch.from_pydict({"value": ["{}"]}), stream="c")
    binary = pa.array([b"\xff"], pa.binary())
    for columns, message in (
        (
            {"value": ["{}"], "headers": pa.array([[("trace", b"\xff")]], pa.map_(pa.string(), pa.binary()))},
            "header trace is not UTF-8",
        ),
        ({"value": ["{}"], "headers": pa.array([[{"key": "trace", "value": b"\xff"}]])}, "header trace is not UTF-8"),
        ({"value": ["{}"], "headers": pa.array([[{"key": None, "value": b"7"}]])}, "no key"),
        ({"value": ["{}"], "key": binary}, "key is not UTF-8"),
        ({"value": binary}, "value is not UTF-8"),
    ):
        with pytest.raises(InvalidInput, match=message) as refused:
            write(url, pa.RecordBatch.from_pydict(columns), stream="a")
        assert refused.value.hint
    for value, error in (("{", InvalidInput), ('"%s"' % ("x" * 1_100_000), InvalidInput)):
        with pytest.raises(error):
            writing.commit(url, write(url, pa.RecordBatch.from_pydict({"value": [value]}), stream="a"), events=True)
    assert batch(url) == []
    messages = write(url, pa.RecordBatch.from_pydict({"value": ["{}"]}), stream="a")
    ask("delete from penstock.staged_events")
    with pytest.raises(Conflict, match="0 of 1 staged"):
        writing.commit(url, messages, events=True)
    # What failed was not noted: the batch can be written again.
    writing.commit(url, write(url, pa.RecordBatch.from_pydict({"value": ["{}"]}), stream="a"), events=True)
    assert len(batch(url)) == 1
