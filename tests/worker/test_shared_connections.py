"""Kinds of work share the connections of a process: none keeps another one, or the worker itself, from the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock import Event, Job, Penstock, Settings, current_job
from penstock.testing import running_worker
from tests.waiting import eventually


@pytest.fixture
async def app(url: str) -> AsyncIterator[Penstock]:
    async with Penstock(url, settings=Settings(pool_size=4, concurrency=100)) as app:
        yield app


@pytest.mark.parametrize("who", ["jobs", "events"])
async def test_beside_loads_that_wait_for_their_data_other_types_work(app: Penstock, who: str) -> None:
    stream, source = app.stream("loaded", int, partitions=1), app.stream("source", int, partitions=12)
    await stream.declare()
    await source.declare()
    begun: list[int] = []
    more = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        begun.append(1)
        yield 1
        await more.wait()
        # What the data come from may need the database too.
        await app.counts()
        yield 2

    @app.job("loads")
    async def loads(job: Job[Any]) -> None:
        await stream.load(numbers())

    @source.consumer(group="g")
    async def consume(event: Event[int]) -> None:
        await stream.load(numbers())

    seen: list[Any] = []

    @app.job("others")
    async def others(job: Job[Any]) -> None:
        assert await app.find(current_job().id) is not None
        seen.append(job.id)

    if who == "jobs":
        await app.enqueue_many("loads", [{}] * 12)
    else:
        for number in range(12):
            await source.append(number, key=str(number))
    async with running_worker(app):
        await eventually(lambda: len(begun) >= 2, "the loads")
        receipts = [await app.enqueue("others") for _ in range(5)]
        for receipt in receipts:
            assert (await app.wait(receipt.id)).status == "succeeded"
        assert len(seen) == 5 and not more.is_set()
        more.set()

        async def all_loaded() -> bool:
            return len(await stream.read(0)) == 24

        await eventually(all_loaded, "all loads")


async def test_beside_slow_statements_of_many_jobs_another_type_gets_a_connection_at_the_next_turn(app: Penstock) -> None:
    ended: list[int] = []
    others: asyncio.Queue[int] = asyncio.Queue()
    database = await app.database()

    @app.job("slow")
    async def slow(job: Job[Any]) -> None:
        await database.fetch("select pg_sleep(0.3)")
        ended.append(1)

    @app.job("other")
    async def other(job: Job[Any]) -> None:
        before = len(ended)
        await app.find(job.id)
        others.put_nowait(len(ended) - before)

    await app.enqueue_many("slow", [{}] * 60)
    async with running_worker(app):
        await eventually(lambda: len(ended) >= 3, "slow statements")
        receipt = await app.enqueue("other")
        # Of the slow ones those that have a connection at that moment end before, and those that get one in the same turn.
        assert await asyncio.wait_for(others.get(), 60) <= 6
        assert (await app.wait(receipt.id)).status == "succeeded"
        assert len(ended) < 60
