"""Producers whose appends can be repeated: through restarts, cancelled calls, and names that two writers share."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
import pytest

from conftest import eventually
from penstock import Conflict, InvalidInput, NewEvent, Penstock, Stream

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def contents(stream: Stream[Any]) -> list[Any]:
    return [event.data for event in await stream.read(0, 0, 1_000)]


async def test_a_producer_that_starts_again_under_its_name_loses_nothing(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    for run in range(3):
        producer = events.producer("importer")
        assert len(await producer.append_many([run * 10, run * 10 + 1])) == 2
        await producer.append(run * 10 + 2)
    assert await contents(events) == [0, 1, 2, 10, 11, 12, 20, 21, 22]


async def test_a_producer_that_begins_where_it_was_repeats_nothing(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    for run in range(3):
        producer = events.producer("importer", sequence=0)
        sizes = [len(await producer.append_many([n, n + 1])) for n in range(0, 2 * run + 2, 2)]
        assert sizes == [*[0] * max(0, run - 1), *[2] * min(2, run + 1)], "only of the last batch the places are known"
    assert await contents(events) == list(range(6))


async def test_a_second_writer_under_the_same_name_is_refused_and_its_events_are_not_lost(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    mine, other = events.producer("importer"), events.producer("importer")
    await mine.append(1)
    await other.append(2)
    with pytest.raises(Conflict, match="was another one"):
        await mine.append(3)
    await events.producer("importer").append(3)
    assert await contents(events) == [1, 2, 3]


async def test_after_a_cancelled_append_other_events_are_not_taken_for_it(app: Penstock, url: str, sql: Sql) -> None:
    events = app.stream("events", int, partitions=1)
    producer = events.producer("importer")
    await producer.append(1)
    blocker = await asyncpg.connect(url)
    async with blocker.transaction():
        await blocker.execute("select penstock.append('events', '0')")
        appending = asyncio.create_task(producer.append(2))
        waits = "select exists (select from pg_stat_activity where $1 = any (pg_blocking_pids(pid)))"
        await eventually(lambda: sql.fetchval(waits, blocker.get_server_pid()), "the append to wait")
        appending.cancel()
        await asyncio.gather(appending, return_exceptions=True)
    await blocker.close()
    with pytest.raises(Conflict, match="not known"):
        await producer.append(3)
    await producer.append(2)
    await producer.append(3)
    assert sorted(await contents(events)) == [0, 1, 2, 3]


async def test_a_refused_batch_leaves_its_number_to_the_next(app: Penstock) -> None:
    events = app.stream("events", str, partitions=1)
    producer = events.producer("importer")
    with pytest.raises(InvalidInput, match="larger"):
        await producer.append("x" * 2_000_000)
    await producer.append("y")
    assert await contents(events) == ["y"]


async def test_a_repeated_batch_is_known_also_after_the_stream_grew(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    batch = [NewEvent(n, str(n)) for n in range(50)]
    await events.producer("p", sequence=0).append_many(batch)
    await events.grow(7)
    await events.producer("p", sequence=0).append_many(batch)
    assert sum(bounds.next for bounds in (await events.bounds()).values()) == 50


@pytest.mark.parametrize(("key", "headers"), [("k" * 2_000_000, None), (None, {"h": "x" * 2_000_000})])
async def test_keys_and_headers_are_bounded_as_payloads_are(app: Penstock, key: Any, headers: Any) -> None:
    events = app.stream("events", int, partitions=1)
    with pytest.raises(InvalidInput, match="larger than"):
        await events.append(1, key=key, headers=headers)
