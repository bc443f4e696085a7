"""Compacted streams: readers and producers beside a compaction, and what may be in the way of one."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import NewEvent, Penstock, Retention, Stream
from penstock.streams.maintenance import maintain
from penstock.worker.maintenance import Maintenance

Sql: TypeAlias = "asyncpg.Connection[Any]"
# Of these the last thousand of the first compacted row and the first of the next are not neighbours.
KEPT, BETWEEN = 2_500, 40


async def with_gaps(app: Penstock, sql: Sql) -> Stream[int]:
    """A compacted stream of one partition, whose rows of 1,000 events have gaps between them."""
    stream = app.stream("prices", int, partitions=1, compact=True)
    for place in range(KEPT):
        if place % 1_000 == 0 and place > 0:
            await stream.append_many([NewEvent(n, key="fleeting") for n in range(BETWEEN)])
        if place % 100 == 0:
            await stream.append_many([NewEvent(n, key=f"k{n}") for n in range(place, place + 100)])
    await stream.append(0, key="fleeting")
    await sql.execute("select penstock.roll_segment('prices'); select penstock.compact_stream('prices')")
    return stream


@pytest.mark.parametrize("limit", [100, 1_000, 5_000])
async def test_a_reader_gets_past_the_gaps_of_a_compacted_stream(app: Penstock, sql: Sql, limit: int) -> None:
    stream = await with_gaps(app, sql)
    end = (await stream.bounds())[0].next
    seen: list[int] = []
    at = 0
    while at < end and (found := await stream.read(0, at, limit)):
        seen += [event.offset for event in found]
        assert found[0].offset >= at
        at = found[-1].offset + 1
    assert seen == sorted(set(seen))
    assert len(seen) == KEPT + 1


async def test_a_group_and_a_tail_get_past_the_gaps_of_a_compacted_stream(app: Penstock, sql: Sql) -> None:
    stream = await with_gaps(app, sql)
    async with asyncio.timeout(60), stream.consume("g") as batches:
        seen: list[int] = []
        async for batch in batches:
            seen += batch.records()
            if len(seen) == KEPT + 1:
                break
    async with asyncio.timeout(60), stream.tail("earliest") as tail:
        assert [(await anext(tail)).data for _ in range(KEPT + 1)] == seen
    assert sorted(seen) == sorted([*range(KEPT), 0])


async def test_what_lies_in_a_gap_is_read_from_behind_it(app: Penstock, sql: Sql) -> None:
    stream = await with_gaps(app, sql)
    assert [event.offset for event in await stream.read(0, 1_010, 2)] == [1_040, 1_041]
    assert (await stream.read(0, 1_010, 1))[0].offset == 1_040


async def test_appends_and_reads_go_on_beside_a_compaction(app: Penstock, sql: Sql, url: str) -> None:
    stream = app.stream("prices", int, partitions=2, compact=True)
    await stream.append_many([NewEvent(n, key=f"k{n % 10}") for n in range(100)])
    await sql.execute("select penstock.roll_segment('prices')")
    async with sql.transaction():
        assert await sql.fetchval("select penstock.compact_stream('prices')") == 1
        await stream.append(100, key="k0")
        assert len(await stream.read(0)) + len(await stream.read(1)) == 101
        database = await app.database()
        assert await maintain(database, "prices") == (False, 0, 0), "another caller maintains what is being compacted"
    kept = [*await stream.read(0), *await stream.read(1)]
    assert sorted(event.data for event in kept)[-11:] == list(range(90, 101))


async def test_workers_maintain_each_stream_for_itself(app: Penstock, sql: Sql) -> None:
    for name in ("broken", "sound"):
        await app.stream(name, int, partitions=1, compact=True, keep=Retention(events=10)).append_many(range(100))
    await sql.execute("drop table penstock.events_1")
    maintenance = Maintenance(await app.database(), app.settings)
    await maintenance.maintain_streams()
    await maintenance.maintain_streams()
    assert [segment.closed_at is None for segment in await app.streams["sound"].segments()] == [False, True]


async def test_compacted_rows_are_bounded_in_bytes(app: Penstock, sql: Sql) -> None:
    stream = app.stream("large", str, partitions=1, compact=True)
    for n in range(30):
        await stream.append("x" * 1_000_000, key=str(n))
    await sql.execute("select penstock.roll_segment('large'); select penstock.compact_stream('large')")
    table = (await stream.segments())[0].table
    assert await sql.fetchval(f"select max(events) from penstock.{table}") <= 9
    assert [event.key for event in await stream.read(0)] == [str(n) for n in range(30)]
