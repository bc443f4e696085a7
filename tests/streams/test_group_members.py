"""Members of consumer groups that come and go, and streams that grow meanwhile."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
import structlog

from penstock import Batch, Event, NewEvent, Penstock
from penstock.settings import Settings
from penstock.streams.partitioner import partition_of
from penstock.testing import running_worker
from penstock.worker import Worker
from tests.streams.consumer_groups import KEYS, caught_up, in_order, lags
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_members_that_come_and_go_lose_and_repeat_nothing(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=8)
    await events.declare()
    seen: list[tuple[str | None, int]] = []
    stop = asyncio.Event()

    async def member(settings: Settings) -> tuple[Worker, asyncio.Task[None], Penstock]:
        each = Penstock(url, settings=settings)
        stream = each.stream("events", int, partitions=8)

        @stream.consumer(group="g", max_batch_size=5)
        async def handle(batch: Batch[int]) -> None:
            await asyncio.sleep(random.random() * 0.005)
            seen.extend((event.key, event.data) for event in batch)

        worker = await each.worker()
        return worker, asyncio.create_task(worker.run()), each

    async def produce() -> int:
        n = 0
        while not stop.is_set():
            await events.append_many([NewEvent(i, KEYS[i % 10]) for i in range(n, n + 10)])
            n += 10
        return n

    producing = asyncio.create_task(produce())
    members = []
    for _ in range(3):
        before = len(seen)
        members.append(await member(Settings(heartbeat_interval=timedelta(seconds=1))))
        await eventually(lambda before=before: len(seen) > before + 50, "events to flow")
    for worker, task, each in members[:2]:
        before = len(seen)
        worker.stop()
        await task
        await each.close()
        await eventually(lambda before=before: len(seen) > before + 50, "events to flow")
    stop.set()
    total = await producing
    await eventually(caught_up(events, "g"))
    worker, task, each = members[2]
    worker.stop()
    await task
    await each.close()
    assert len(seen) == total
    assert in_order(seen)


async def test_a_join_moves_the_fewest_partitions_and_does_not_touch_the_others(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=12)
    await events.append_many([NewEvent(n, str(n)) for n in range(10)])

    async def owners() -> dict[int, tuple[str, int]]:
        rows = await sql.fetch("select slot, owner, epoch from penstock.slots where owner is not null and owner = target")
        return {row["slot"]: (row["owner"], row["epoch"]) for row in rows}

    async with events.consume("g", id="first") as first:
        await eventually(lambda: len(first.partitions) == 12, "the first to have all")
        before = await owners()
        async with events.consume("g", id="second") as second:
            await eventually(lambda: len(second.partitions) == 6, "the second to have its half")
            during = await owners()
            stayed = {slot for slot, owner in during.items() if owner == before[slot]}
            assert len(stayed) == 6
        await eventually(lambda: len(first.partitions) == 12, "the first to have all again")
        after = await owners()
        assert all(after[slot] == before[slot] for slot in stayed), "a partition that stayed was given a new epoch"


async def test_growth_keeps_the_order_of_each_key_in_a_group(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[tuple[str | None, int]] = []
    gate = asyncio.Event()

    @events.consumer(group="g", max_batch_size=10)
    async def handle(batch: Batch[int]) -> None:
        await gate.wait()
        await asyncio.sleep(random.random() * 0.002)
        seen.extend((event.key, event.data) for event in batch)

    await events.append_many([NewEvent(i, f"k{i % 50}") for i in range(500)])
    async with running_worker(app):
        await events.grow(8)
        await events.append_many([NewEvent(i, f"k{i % 50}") for i in range(500, 1000)])
        gate.set()
        await eventually(caught_up(events, "g"), "the group to consume the new partitions")
    assert len(seen) == 1000
    assert in_order(seen)


async def test_a_growth_that_waits_for_a_paused_partition_says_so(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []
    broken = True

    @events.consumer(group="g", on_failure="quarantine")
    async def handle(event: Event[int]) -> None:
        if event.data == 1 and broken:
            raise ValueError("one")
        seen.append(event.data)

    await events.append_many([NewEvent(n, str(n)) for n in range(50)])
    place = partition_of("1", 2)

    async def quarantined() -> bool:
        return any(lag.quarantined for lag in await lags(events, "g"))

    with structlog.testing.capture_logs() as logs:
        async with running_worker(app):
            await eventually(quarantined, "the partition to be in quarantine")
            assert await events.held_back() == []
            await events.grow(4)
            await events.append_many([NewEvent(n, str(n)) for n in range(50, 100)])
            said = await eventually(
                lambda: [entry for entry in logs if entry["event"] == "growth_held_back"], "the log to say what is held back"
            )
            assert (said[0]["partition"], said[0]["holds"], said[0]["quarantined"]) == (place, [2, 3], True)
            assert "resume" in said[0]["hint"]
            (held,) = await events.held_back("g")
            assert (held.group, held.partition, held.holds) == ("g", place, [2, 3])
            assert held.pause_reason is not None
            assert held.pause_reason.endswith("ValueError: one")
            assert [lag.waits_for for lag in await events.lag("g")][2:] == [[place], [place]]
            broken = False
            await events.resume("g")
            await eventually(caught_up(events, "g"), "the new partitions to be consumed")
    assert sorted(seen) == list(range(100))
    assert await events.held_back() == []
    assert [lag.waits_for for lag in await events.lag("g")] == [[]] * 4


async def test_a_commit_under_an_old_epoch_is_refused(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many(range(10))
    async with events.consume("g", max_batch_size=5) as batches:
        batch = await anext(batches)
        # Another takes the partition over while this one does not look.
        await sql.execute(
            "update penstock.slots set owner = 'other', target = 'other', epoch = epoch + 1 where group_name = 'events/g'"
        )
        await sql.fetch(
            "select begun.* from penstock.slots"
            " cross join penstock.begin_partitions('events', 'g', 'other', '{0}', array[slots.epoch]) as begun"
            " where slots.group_name = 'events/g'"
        )
        with pytest.raises(Exception, match="no longer consumed"):
            await batch.commit(sql)
    assert (await events.lag("g"))[0].next == 0
