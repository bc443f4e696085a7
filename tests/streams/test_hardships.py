"""What consumers and readers have to stand: strange and large events, owners that hang, handlers that block, retention."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Event, Events, InvalidInput, NewEvent, NotFound, Penstock, Retention, Stream
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


@asynccontextmanager
async def working(app: Penstock) -> AsyncIterator[None]:
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await running


async def all_done(stream: Stream[Any]) -> bool:
    with suppress(NotFound):
        found = await stream.lag("g")
        return bool(found) and not any(lag.lag for lag in found)
    return False


# PostgreSQL takes all of these for JSON.
STRANGE = ['{"a": "\\ud800"}', '{"a": ' + "[" * 1_100 + "]" * 1_100 + "}"]


@pytest.mark.parametrize("headers", STRANGE, ids=["surrogate", "deep"])
async def test_headers_that_cannot_be_read_are_a_failure_of_their_own(app: Penstock, sql: Sql, headers: str) -> None:
    events = app.stream("events", int, partitions=1)
    await events.append_many([0, 1])
    await sql.execute("select penstock.append('events', '2', null, $1::text::json)", headers)
    await events.append_many([3, 4])
    seen: list[int] = []

    @events.consumer(group="g", on_failure="skip")
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)

    async with working(app):
        await eventually(lambda: all_done(events))
    assert seen == [0, 1, 3, 4]
    assert [event.data for event in await events.read(0)] == [0, 1]
    with pytest.raises(InvalidInput, match="headers"):
        await events.read(0, 2)


async def test_large_events_are_not_all_fetched_at_once(app: Penstock) -> None:
    events = app.stream("events", str, partitions=1)
    for n in range(60):
        await events.append(str(n % 10) * 400_000)
    async with asyncio.timeout(60), events.consume("g", max_batch_size=1) as batches:
        seen = 0
        async for batch in batches:
            assert batches.consumer is not None
            assert batches.consumer.partitions[0].bytes <= 3_000_000
            seen += len(batch)
            if seen == 60:
                break


async def test_a_commit_of_an_owner_that_hangs_holds_up_its_partition_alone(app: Penstock, url: str) -> None:
    events = app.stream("events", int, partitions=2)
    for n in range(4):
        await events.append(n)
    hanging = await asyncpg.connect(url)
    async with asyncio.timeout(60), events.consume("g", max_batch_size=1) as batches:
        batch = await anext(batches)
        await hanging.execute("begin")
        await batch.commit(hanging)
        mine = batch.partition
    async with asyncio.timeout(60), events.consume("g", max_batch_size=1) as batches:
        seen = [await anext(batches), await anext(batches)]
        assert {batch.partition for batch in seen} == {1 - mine}
        await hanging.execute("commit")
        assert (await anext(batches)).partition == mine
    await hanging.close()


async def test_handlers_that_iterate_take_turns_when_few_may_run(app: Penstock) -> None:
    events = app.stream("events", int, partitions=4)
    seen: list[int] = []
    running: list[int] = []

    @events.consumer(group="g", concurrency=1)
    async def handle(events: Events[int]) -> None:
        async for event in events:
            running.append(events.partition)
            assert running == [events.partition]
            await asyncio.sleep(0)
            seen.append(event.data)
            running.clear()

    async with working(app):
        for n in range(12):
            await events.append(n)
        await eventually(lambda: all_done(events))
    assert sorted(seen) == list(range(12))


async def test_plain_handlers_of_all_partitions_run_at_the_same_time(app: Penstock) -> None:
    partitions = 40
    events = app.stream("events", int, partitions=partitions)
    for n in range(partitions):
        await events.append(n)
    together = threading.Barrier(partitions)

    @events.consumer(group="g", on_failure="skip")
    def handle(event: Event[int]) -> None:
        together.wait(30)

    async with working(app):
        await eventually(lambda: all_done(events), timeout=60)
    assert not together.broken


async def test_what_retention_made_a_group_skip_is_done(app: Penstock, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1, keep=Retention(events=1))
    await events.append_many(range(100))
    await sql.execute("select penstock.declare_consumer_group('events', 'g')")
    await sql.execute("select penstock.roll_segment('events')")
    await events.append_many(range(100, 110))
    await sql.execute("select penstock.maintain_stream('events')")
    async with events.consume("g", auto_offset_reset="latest") as batches:
        pulling = asyncio.ensure_future(anext(batches))
        # Otherwise a consumer that starts again would skip what came since.
        await eventually(lambda: all_done(events))
        await events.append(110)
        assert (await pulling).records() == [110]


async def test_a_bad_key_harms_no_other_append(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    results = await asyncio.gather(
        *[events.append(n, key="\ud800" if n == 1 else f"ä{n}") for n in range(5)], return_exceptions=True
    )
    assert [isinstance(result, Exception) for result in results] == [False, True, False, False, False]
    assert isinstance(results[1], InvalidInput)


async def test_payloads_are_compressed_in_many_threads_at_once(app: Penstock) -> None:
    events = app.stream("events", bytes, partitions=1, compression="zstd")
    payloads = [bytes([n]) * 300_000 + str(n).encode() for n in range(16)]

    def there_and_back(payload: bytes) -> bool:
        return all(events.encoding.decode(events.encoding.encode(payload)) == payload for _ in range(50))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(there_and_back, payloads))


async def test_a_tail_of_some_partitions_does_not_turn_to_the_others(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.streams.reader.GROWN_EVERY_S", 0.0)
    events = app.stream("events", int, partitions=4)
    by_partition = {event.partition: n for n, event in enumerate(await events.append_many(numbered(40)))}
    bounds = await events.bounds()
    other, mine = sorted(by_partition)[:2]
    seen: list[int] = []
    async with asyncio.timeout(30), events.tail({mine: bounds[mine].next}) as tail:
        pulling = asyncio.ensure_future(anext(tail))
        await events.append_many(numbered(40))
        seen = [(await pulling).partition, *[(await anext(tail)).partition for _ in range(2)]]
        await events.grow(8)
        await events.append_many(numbered(400))
        while len(set(seen)) == 1:
            seen.append((await anext(tail)).partition)
    assert other not in seen
    assert set(seen) <= {mine, 4, 5, 6, 7}


def numbered(count: int) -> list[NewEvent[int]]:
    return [NewEvent(n, str(n)) for n in range(count)]
