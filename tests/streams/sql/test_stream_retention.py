"""What becomes of a log with time: retention, compaction, growth."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import NewEvent, OffsetGone, Penstock, Retention
from tests.streams.sql.stream_contents import contents
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def maintain(sql: Sql) -> None:
    for (name,) in await sql.fetch("select penstock.streams_to_maintain()"):
        await sql.execute("select penstock.maintain_stream($1)", name)
    await sql.execute("select penstock.drop_retired()")


@pytest.mark.parametrize(
    "keep", [Retention(events=1000), Retention(bytes=100_000), Retention(age=timedelta(days=2))], ids=["events", "bytes", "age"]
)  # fmt: skip
async def test_retention_drops_whole_segments_and_nothing_else(app: Penstock, sql: Sql, keep: Retention) -> None:
    events = app.stream("events", str, partitions=2, keep=keep)
    await events.declare()
    for day in range(1, 21):
        await sql.execute("select set_config('penstock.clock', (now() + make_interval(days => $1))::text, false)", day)
        for _ in range(2):
            await sql.execute("select penstock.append_many('events', array_fill('\"xxxxxxxxxx\"'::json, array[200]))")
        await maintain(sql)
        assert (await sql.fetchval("select n_tup_del from pg_stat_user_tables where relname like 'events%' limit 1")) in (0, None)
    bounds = await events.bounds()
    kept = sum(b.next - b.first for b in bounds.values())
    assert 0 < bounds[0].first < bounds[0].next == 4000
    if keep.events:
        assert 1000 <= kept <= 1600
    if keep.age:
        assert 400 * 2 <= kept <= 400 * 4
    tables = await sql.fetchval("select count(*) from pg_tables where schemaname = 'penstock' and tablename ~ '^events_[0-9]+$'")
    assert tables == len(await events.segments())
    with pytest.raises(OffsetGone, match="is gone"):
        await events.read(0, 0)
    assert (await events.read(0, bounds[0].first, 1))[0].offset == bounds[0].first


@pytest.mark.parametrize("keep", [Retention(), Retention(events=1_000), Retention(age=timedelta(days=7))])
async def test_a_segment_is_written_until_it_is_full_or_old(app: Penstock, sql: Sql, keep: Retention) -> None:
    events = app.stream("events", int, partitions=2, keep=keep)
    for n in range(3):
        await events.append(n)
        await maintain(sql)
    assert len(await events.segments()) == 1


async def test_a_reader_inside_a_segment_is_not_stopped_by_its_retirement(app: Penstock, sql: Sql, url: str) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    reader = await asyncpg.connect(url)
    async with reader.transaction(isolation="repeatable_read"):
        assert len(await reader.fetch("select * from penstock.read_events('events', 0, 0)")) == 100
        await sql.execute("select penstock.roll_segment('events')")
        await events.append_many(range(100, 110))
        await maintain(sql)
        await maintain(sql)
        assert len(await reader.fetch("select * from penstock.read_events('events', 0, 0)")) == 100
        assert len(await events.read(0, 100)) == 10
    await reader.close()
    await maintain(sql)
    assert not await sql.fetch("select * from penstock.retired_segments")


async def test_retention_waits_for_groups_that_have_not_read_when_asked(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=10, unread=True))
    await events.append_many(range(100))
    await sql.execute("select penstock.declare_consumer_group('events', 'slow')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 200))
    await maintain(sql)
    assert (await events.bounds())[0].first == 0
    await events.seek("slow", {0: 100})
    await maintain(sql)
    assert (await events.bounds())[0].first == 100


@pytest.mark.parametrize(("gone", "first"), [("earliest", 100), ("latest", 150)])
async def test_a_tail_that_was_overtaken_goes_on_as_asked(app: Penstock, sql: Sql, gone: Any, first: int) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 150))
    await maintain(sql)
    with pytest.raises(OffsetGone):
        await anext(aiter(events.tail({0: 0})))
    async with events.tail({0: 0}, auto_offset_reset=gone) as tail:
        following = asyncio.ensure_future(anext(tail))
        if gone == "latest":
            await eventually(
                lambda: sql.fetchval("select count(*) from penstock.listeners where kind = 'events'"), "the tail to wait"
            )
            await events.append(150)
        assert (await following).data == first


async def test_compaction_keeps_the_latest_of_each_key_and_all_offsets(app: Penstock, sql: Sql) -> None:
    state = app.stream("state", int, partitions=2, compact=True)
    for round in range(5):
        await state.append_many([NewEvent(round * 100 + n, f"k{n}") for n in range(50)])
        await state.append(-round)
    await state.append_many([NewEvent(None, "k7")])
    before = await contents(sql, "state", 2)
    await sql.execute("select penstock.roll_segment('state')")
    await state.append_many([NewEvent(999, "k3")])
    await sql.execute("select penstock.change_stream('state', '{\"tombstone_age\": \"0\"}')")
    assert await sql.fetchval("select penstock.compact_stream('state')") == 1
    assert await sql.fetchval("select penstock.compact_stream('state')") == 0, "what has nothing to drop is not written again"
    await maintain(sql)
    found: dict[str | None, list[Any]] = defaultdict(list)
    for partition in range(2):
        events = await state.read(partition, 0, 1000)
        offsets = [event.offset for event in events]
        assert offsets == sorted(set(offsets))
        for event in events:
            if event.offset < len(before[partition]):
                assert before[partition][event.offset] == (event.offset, event.data)
            found[event.key].append(event.data)
    assert sorted(found.pop(None)) == [-4, -3, -2, -1, 0]
    assert found.pop("k3")[-1] == 999
    assert found.pop("k7", []) in ([], [None])
    # The last event of each partition stays, so one key may have one more than its latest.
    assert all(values[-1] == 400 + int(key[1:]) for key, values in found.items() if key is not None)
    assert sum(len(values) for values in found.values()) <= 48 + 2


async def test_a_stream_grows_under_load_and_loses_nothing(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    await events.declare()
    growing = asyncio.Event()

    async def write(worker: int) -> list[tuple[str, int]]:
        mine = []
        for n in range(100):
            await events.append(worker * 1000 + n, key=f"{worker}-{n % 5}")
            mine.append((f"{worker}-{n % 5}", worker * 1000 + n))
            if n == 30:
                growing.set()
        return mine

    async def grow() -> None:
        await growing.wait()
        await events.grow(5)
        await events.grow(9)

    *written, _ = await asyncio.gather(*(write(worker) for worker in range(4)), grow())
    expected: dict[str, list[int]] = defaultdict(list)
    for mine in written:
        for key, value in mine:
            expected[key].append(value)
    found: dict[str, list[int]] = defaultdict(list)
    for partition in range(9):  # a key only ever moves to a partition with a higher number
        for event in await events.read(partition, 0, 10_000):
            assert event.key is not None
            found[event.key].append(event.data)
    assert found == expected
    assert await sql.fetchval("select count(*) from penstock.stream_growths") == 2
