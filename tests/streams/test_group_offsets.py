"""Offsets of a consumer group: committed with the handler's transaction, moved, paused, overtaken by retention."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Batch, Event, NewEvent, OffsetGone, OnFailure, Penstock, Retention
from penstock.streams.partitioner import partition_of
from penstock.testing import running_worker
from tests.streams.consumer_groups import AT_ONCE, caught_up
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_the_offset_is_committed_in_the_transaction_of_the_handler(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await sql.execute("create table sums (n integer)")
    await events.append_many(range(50))
    fail = iter([True, False] * 100)

    @events.consumer(group="g", max_batch_size=10, on_failure=OnFailure(backoff=AT_ONCE))
    async def handle(batch: Batch[int]) -> None:
        connection = await asyncpg.connect(url)
        try:
            async with connection.transaction():
                await connection.executemany("insert into sums values ($1)", [(n,) for n in batch.records()])
                await batch.commit(connection)
                if next(fail):
                    raise RuntimeError("after everything was written")
        finally:
            await connection.close()

    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert [row["n"] for row in await sql.fetch("select n from sums order by n")] == list(range(50))


async def test_a_group_can_be_moved_back_and_forth_while_it_consumes(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []

    @events.consumer(group="g", max_batch_size=7)
    async def handle(batch: Batch[int]) -> None:
        seen.extend(batch.records())

    await events.append_many([NewEvent(n, str(n)) for n in range(100)])
    async with running_worker(app) as worker:
        await eventually(caught_up(events, "g"))
        assert sorted(seen) == list(range(100))
        seen.clear()
        await events.seek("g", "earliest")
        await eventually(lambda: len(seen) == 100, "everything to be seen again")
        seen.clear()
        await events.pause("g")
        parts = worker.work.consumers[0].partitions
        await eventually(lambda: parts and all(part.paused for part in parts.values()), "the consumer to learn of the pause")
        await events.append_many([NewEvent(n, str(n)) for n in range(100, 200)])
        await events.seek("g", "latest")
        await events.resume("g")
        await events.append_many([NewEvent(n, str(n)) for n in range(200, 300)])
        await eventually(caught_up(events, "g"))
        await eventually(lambda: len(seen) >= 100)
    assert sorted(seen) == list(range(200, 300))


async def test_a_paused_partition_waits(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    paused, other = (next(key for key in "abcdef" if partition_of(key, 2) == partition) for partition in range(2))
    seen: list[int] = []

    @events.consumer(group="g")
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)

    await events.append(0, key=paused)
    async with running_worker(app) as worker:
        await eventually(lambda: seen == [0])
        assert await events.pause("g", [0], reason="maintenance") == 1
        assert (await events.lag("g"))[0].pause_reason == "maintenance"
        await eventually(lambda: worker.work.consumers[0].partitions[0].paused, "the consumer to learn of the pause")
        await events.append(1, key=paused)
        # One fetch serves all partitions: a consumer that has the later event would have this one too.
        for number in (2, 3):
            await events.append(number, key=other)
            await eventually(lambda number=number: number in seen, "the other partition")  # type: ignore[misc]
        assert seen == [0, 2, 3]
        assert await events.resume("g") == 1
        await eventually(lambda: seen == [0, 2, 3, 1])


async def test_a_new_group_starts_where_it_is_told(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    async with events.consume("late", start="latest") as late, events.consume("early") as early:
        await events.append(10)
        assert (await anext(early)).records()[0] == 0
        assert (await anext(late)).records() == [10]


@pytest.mark.parametrize(("gone", "first"), [("earliest", 100), ("latest", None), ("error", None)])
async def test_a_group_that_retention_overtook_goes_on_as_told(app: Penstock, sql: Sql, gone: Any, first: Any) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 110))
    await sql.execute("select penstock.maintain_stream('events')")
    with pytest.raises(OffsetGone):
        await events.read(0, 0)
    async with events.consume("g", auto_offset_reset=gone) as batches:
        if gone == "earliest":
            assert (await anext(batches)).records()[0] == first
        elif gone == "latest":
            pulled = asyncio.ensure_future(anext(batches))
            await eventually(
                lambda: sql.fetchval("select count(*) from penstock.listeners where kind = 'events'"), "the reader to wait"
            )
            await events.append(110)
            assert (await pulled).records() == [110]
        else:
            with pytest.raises(OffsetGone, match="offset 0 of partition 0"):
                await anext(batches)
