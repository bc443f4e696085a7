"""Reading the log: from anywhere, by time, at its end, and how little is touched meanwhile."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, NewEvent, NotFound, Penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_reads_begin_anywhere(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    for n in range(0, 3000, 100):
        await events.append_many(range(n, n + 100))
    for offset in (0, 1, 99, 100, 101, 1550, 2999):
        assert [event.data for event in await events.read(0, offset, 250)] == list(range(offset, min(3000, offset + 250)))
    assert await events.read(0, 3000) == []
    with pytest.raises(NotFound, match="no partition 1"):
        await events.read(1)


async def test_readers_that_would_wait_for_ever_are_refused(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    await events.append_many([1, 2, 3])
    with pytest.raises(InvalidInput, match="offset must be an integer"):
        await events.read(0, -1)
    for start, error, words in [
        ({0: 10_000}, InvalidInput, "has no offset 10000"), ({0: -1}, InvalidInput, "offset of partition 0 must be"),
        ({7: 0}, NotFound, "no partition 7"), ("yesterday", InvalidInput, "position to start at cannot be 'yesterday'"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            await anext(events.tail(start))  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no partition 2"):
        await anext(events.tail("earliest", partitions=[0, 2]))
    for options in ({"max_batch_size": 0}, {"linger": timedelta(seconds=-1)}):
        with pytest.raises(InvalidInput, match="(max_batch_size|linger) must be"):
            events.consume("g", **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="max_batch_size must be"):
        events.consumer(group="g", max_batch_size=0)(lambda event: None)
    assert list(await events.producer().append_many([])) == []


async def test_offsets_are_found_by_time(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.declare()
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in range(1, 6)]
    for n, time in enumerate(times):
        await sql.execute("select set_config('penstock.clock', $1, false)", time.isoformat())
        await sql.execute("select penstock.append('events', $1::text::json)", str(n))
        if n == 2:
            await sql.execute("select penstock.roll_segment('events')")
    for n, time in enumerate(times):
        assert await events.offsets_at(time) == {0: n}
        assert await events.offsets_at(time - timedelta(hours=1)) == {0: n}
    assert await events.offsets_at(times[-1] + timedelta(hours=1)) == {0: 5}


async def test_a_tail_follows_and_sees_new_partitions(app: Penstock) -> None:
    app.context.settings = app.settings.model_copy(update={"poll_interval": timedelta(milliseconds=50)})
    events = app.stream("events", int, partitions=2)
    await events.append_many(range(10))
    seen: list[int] = []

    async def follow() -> None:
        async for event in events.tail("earliest"):
            seen.append(event.data)

    following = asyncio.create_task(follow())
    await eventually(lambda: sorted(seen) == list(range(10)), "the tail to catch up")
    await events.append(10)
    await eventually(lambda: 10 in seen, "the tail to see a new event")
    await events.grow(16)
    await events.append_many([NewEvent(n, str(n)) for n in range(11, 100)])
    await eventually(lambda: sorted(seen) == list(range(100)), "the tail to see the new partitions")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


# -- hot statements


async def test_hot_statements_touch_a_few_pages_however_large_the_stream_is(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=4)
    await events.load(NewEvent(n, str(n)) for n in range(200))

    async def pages(call: str) -> int:
        plan = json.loads(await sql.fetchval(f"explain (analyze, buffers, timing off, format json) {call}"))[0]["Plan"]
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])

    calls = [
        "select * from penstock.append_routed('events', 4, '{0,1}', '{1,1}', '{1,2}')",
        "select * from penstock.read_chunks('events', '{0,1,2,3}', '{40,40,40,40}', 10)",
        "select * from penstock.stream_bounds('events')",
    ]
    for call in calls:
        await pages(call)
    before = [min([await pages(call) for _ in range(3)]) for call in calls]
    for _ in range(1500):
        await sql.execute("select penstock.append_many('events', '{1,2,3,4}', '{1,5,9,12}')")
    await sql.execute("analyze penstock.events_1")
    after = [min([await pages(call) for _ in range(3)]) for call in calls]
    for call, then, now in zip(calls, before, after, strict=True):
        assert now <= then + 40, f"{call} touched {then} pages before and {now} after"


async def test_a_read_looks_at_no_more_chunks_than_it_returns(app: Penstock, sql: Sql) -> None:
    await app.stream("events", int, partitions=1).declare()
    append = "perform penstock.append_many('events', array_fill(to_json(repeat('x', 50)), array[25]))"
    await sql.execute(f"do $$ begin for n in 1..1000 loop {append}; end loop; end $$")
    read = "select * from penstock.read_chunks('events', '{0}', '{5010}', 1000)"
    chunks = await sql.fetch(read)
    assert [chunks[0]["first_offset"], sum(chunk["events"] for chunk in chunks)] == [5000, 1000]
    plan = json.loads(await sql.fetchval(f"explain (analyze, buffers, timing off, format json) {read}"))[0]["Plan"]
    touched = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    there = await sql.fetchval("select pg_relation_size('penstock.events_1') / 8192")
    assert touched < there / 3, f"{touched} of {there} pages for a twenty-fifth of the events"
