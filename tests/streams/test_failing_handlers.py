"""Handlers that fail: what is done with the events, as the policy says."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest
from pydantic import BaseModel

from penstock import Batch, Event, Fail, Halted, NewEvent, OnFailure, Penstock, Retry, Stream
from penstock.testing import running_worker
from tests.streams.consumer_groups import AT_ONCE, caught_up, lags
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def failing(app: Penstock, url: str, policy: Any, size: int = 1) -> tuple[Stream[Any], list[int], dict[int, int]]:
    events = app.stream("events", int, partitions=1)
    seen: list[int] = []
    tried: dict[int, int] = defaultdict(int)

    @events.consumer(group="g", max_batch_size=size, on_failure=policy)
    async def handle(batch: Batch[int]) -> None:
        for event in batch:
            tried[event.data] += 1
            if event.data == 5:
                raise ValueError("five")
        seen.extend(batch.records())

    await events.append_many([NewEvent(n, "k") for n in range(10)])
    return events, seen, tried


async def test_skip_goes_on(app: Penstock, url: str) -> None:
    events, seen, tried = await failing(app, url, OnFailure(max_attempts=3, then="skip", backoff=AT_ONCE))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert seen == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert tried[5] == 3


@pytest.mark.parametrize(("size", "dead"), [(1, [5]), (4, [4, 5, 6, 7])])
async def test_dead_letters_can_be_read_and_replayed(app: Penstock, url: str, size: int, dead: list[int]) -> None:
    events, seen, _ = await failing(app, url, "dead-letter", size)
    letters = app.stream("events.dead", int, partitions=1)
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
        assert seen == [n for n in range(10) if n not in dead]
        found = await letters.read(0)
        assert [letter.data for letter in found] == dead
        assert found[0].key == "k"
        header = found[0].headers["dead"]
        assert (header["stream"], header["group"], header["offset"], header["error"]) == (
            "events",
            "g",
            dead[0],
            "ValueError: five",
        )
        assert await events.replay_dead() == len(dead)
        replayed = await events.read(0, 10)
        assert [(event.key, event.data, event.headers["replayed"]["group"]) for event in replayed] == [
            ("k", n, "g") for n in dead
        ]
        await eventually(lambda: letters.read(0, len(dead)), "the replayed event to fail again")


async def test_quarantine_pauses_one_partition_visibly(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=4)
    seen: list[int] = []
    broken = True

    @events.consumer(group="g", on_failure="quarantine")
    async def handle(event: Event[int]) -> None:
        if event.data == 50 and broken:
            raise ValueError("fifty")
        seen.append(event.data)

    receipts = await events.append_many([NewEvent(n, str(n)) for n in range(100)])
    place = receipts[50]
    async with running_worker(app):

        async def quarantined() -> bool:
            found = await lags(events, "g")
            return len(found) == 4 and all(
                lag.quarantined == (lag.partition == place.partition) and (lag.quarantined or lag.lag == 0) for lag in found
            )

        await eventually(quarantined, "one partition to be in quarantine and the others done")
        stuck = (await events.lag("g"))[place.partition]
        assert stuck.next == place.offset
        assert stuck.pause_reason == f"offset {place.offset}: ValueError: fifty"
        broken = False
        assert await events.resume("g") == 1
        await eventually(caught_up(events, "g"))
    assert sorted(seen) == list(range(100))


async def test_halt_stops_the_consumer_with_the_error(app: Penstock, url: str) -> None:
    events, seen, _ = await failing(app, url, "halt")
    worker = await app.worker()
    with pytest.raises(Halted, match="offset 5: ValueError: five"):
        await worker.run()
    assert seen == [0, 1, 2, 3, 4]
    assert (await events.lag("g"))[0].next == 5


async def test_retry_waits_as_long_as_the_handler_says_and_keeps_the_order(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    seen: list[int] = []
    times = 0

    @events.consumer(group="g")
    async def handle(event: Event[int]) -> None:
        nonlocal times
        if event.data == 3 and times < 2:
            times += 1
            raise Retry(after=timedelta(milliseconds=1))
        seen.append(event.data)

    await events.append_many(range(6))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert seen == list(range(6))
    assert times == 2


async def test_fail_is_not_retried(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    calls: list[int] = []

    @events.consumer(group="g", on_failure=OnFailure(max_attempts=10, then="skip"))
    async def handle(event: Event[int]) -> None:
        calls.append(event.data)
        raise Fail("never")

    await events.append_many(range(3))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert calls == [0, 1, 2]


async def test_a_payload_that_does_not_fit_is_a_failure_of_its_own(app: Penstock, sql: Sql) -> None:
    class Order(BaseModel):
        total: int

    orders = app.stream("orders", Order, partitions=1)
    seen: list[int] = []

    @orders.consumer(group="g", max_batch_size=10, on_failure="skip")
    async def handle(batch: Batch[Any]) -> None:
        seen.extend(order.total for order in batch.records())

    await orders.append_many([Order(total=n) for n in range(3)])
    await sql.execute("select penstock.append('orders', '{\"total\": \"many\"}')")
    await orders.append_many([Order(total=n) for n in range(3, 6)])
    async with running_worker(app):
        await eventually(caught_up(orders, "g"))
    assert seen == list(range(6))
