"""A new segment begins in one partition after another, so that an open append does not delay other appends."""

from __future__ import annotations

import asyncio
import random
from typing import Any, TypeAlias

import asyncpg

from penstock import NewEvent, Penstock
from penstock.streams.maintenance import maintain
from penstock.streams.partitioner import partition_of
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
PARTITIONS = 4


def key_of(partition: int) -> str:
    return next(str(n) for n in range(1_000) if partition_of(str(n), PARTITIONS) == partition)


async def test_an_open_append_does_not_hold_up_other_partitions_while_a_segment_is_due(app: Penstock, sql: Sql, url: str) -> None:
    events = app.stream("events", int, partitions=PARTITIONS, segment_events=1)
    await events.append_many([NewEvent(n, key_of(n % PARTITIONS)) for n in range(40)])
    holder = await asyncpg.connect(url)
    transaction = holder.transaction()
    await transaction.start()
    await events.append(40, key=key_of(PARTITIONS - 1), connection=holder)
    database = await app.database()
    waits = """
        select count(*) from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock' and query like '%maintain_stream%'
    """
    # No append waits for the maintenance: an append that had to wait would be refused at once.
    await sql.execute("set lock_timeout = '100ms'")
    beside = False
    for _ in range(20):
        maintaining = asyncio.create_task(maintain(database, "events"))

        async def is_waiting(maintaining: asyncio.Task[Any] = maintaining) -> bool:
            return maintaining.done() or bool(await sql.fetchval(waits))

        await eventually(is_waiting, "the new segment to wait for the open append")
        for partition in range(PARTITIONS - 1):
            await sql.execute("select penstock.append('events', '41', $1)", key_of(partition))
        # On a slow machine it has given up meanwhile, and tries again the next time.
        beside = not maintaining.done()
        await maintaining
        if beside:
            break
    assert beside, "the new segment has never waited while others appended"
    there = await sql.fetch("select partition, segment from penstock.stream_partitions order by partition")
    assert len({row["segment"] for row in there}) == 2, "three partitions are in the new segment, one is not yet"
    # Appends, loads and reads go on across both.
    await events.append_many([NewEvent(n, key_of(n % (PARTITIONS - 1))) for n in range(50, 60)])
    await transaction.rollback()
    await events.append_many([NewEvent(n, key_of(n % PARTITIONS)) for n in range(60, 100)])
    for partition in range(PARTITIONS):
        found = await events.read(partition, 0, 1_000)
        assert [event.offset for event in found] == list(range(len(found)))
        assert [event.data for event in found if event.data >= 60] == list(range(60 + partition, 100, PARTITIONS))
    # When the append has ended the last partition follows, and the segment is closed.
    await maintain(await app.database(), "events")
    assert len({row["segment"] for row in await sql.fetch("select segment from penstock.stream_partitions")}) == 1
    assert await sql.fetchval("select count(*) from penstock.segments where closed_at is null") == 1
    await holder.close()


async def test_offsets_are_dense_whatever_is_appended_while_segments_begin(app: Penstock, sql: Sql, url: str) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    events = app.stream("events", int, partitions=PARTITIONS, segment_events=1)
    await events.declare()
    database = await app.database()
    expected: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    holder = await asyncpg.connect(url)
    for _ in range(10):
        stuck = dice.sample(range(PARTITIONS), dice.randint(0, PARTITIONS - 1))
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(
            "select from penstock.stream_partitions where partition = any ($1) order by partition for no key update", stuck
        )
        if dice.random() < 0.7:
            await sql.execute("select penstock.try_to_roll('events')")
        await transaction.rollback()
        batch = [(dice.randrange(PARTITIONS), dice.randrange(1_000)) for _ in range(dice.randint(1, 30))]
        way = dice.choice(["append", "sql", "load", "roll"])
        new = [NewEvent(n, key_of(partition)) for partition, n in batch]
        if way == "append":
            await events.append_many(new)
        elif way == "sql":
            await events.append_many(new, connection=sql)
        elif way == "load":
            await events.load(new)
        else:
            await sql.execute("select penstock.roll_segment('events')")
            await maintain(database, "events")
            continue
        for partition, n in batch:
            expected[partition].append(n)
    await holder.close()
    for partition, numbers in expected.items():
        found = await events.read(partition, 0, 10_000)
        assert [event.data for event in found] == numbers
        assert [event.offset for event in found] == list(range(len(numbers)))
    assert {partition: bounds.next for partition, bounds in (await events.bounds()).items()} == {
        partition: len(numbers) for partition, numbers in expected.items()
    }
