"""An iteration goes on after a request that was cancelled, as by `asyncio.wait_for(anext(iterator), 5)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from penstock import Events, NewEvent, Penstock, Standing
from penstock.testing import running_worker
from tests.waiting import eventually


async def a_cancelled_request(iterator: AsyncIterator[Any]) -> None:
    """Ask, and cancel the request while it waits."""
    request = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0.05)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


def iterations(form: str, events: Events[int]) -> AsyncIterator[Any]:
    match form:
        case "events":
            return aiter(events)
        case "records":
            return events.records()
        case "take":
            return aiter(events.take(3))
        case "records of take":
            return events.take(3).records()
    return aiter(events.take(100, timedelta(seconds=300)))


def numbers(form: str, item: Any) -> list[int]:
    match form:
        case "events":
            return [item.data]
        case "records":
            return [item]
        case "take":
            return [event.data for event in item]
    return list(item)


@pytest.mark.parametrize("form", ["events", "records", "take", "records of take"])
async def test_a_handler_of_events_gets_all_after_a_cancelled_request(app: Penstock, form: str) -> None:
    stream = app.stream("numbers", int, partitions=1)
    seen: list[int] = []
    asked = asyncio.Event()

    @stream.consumer(group="g")
    async def handle(events: Events[int]) -> None:
        iterator = iterations(form, events)
        await a_cancelled_request(iterator)
        asked.set()
        async for item in iterator:
            seen.extend(numbers(form, item))
            if len(seen) < 10 and not asked.is_set():
                await a_cancelled_request(iterator)

    async with running_worker(app):
        await asyncio.wait_for(asked.wait(), 60)
        await stream.append_many([NewEvent(number) for number in range(10)])
        await eventually(lambda: len(seen) == 10, "all events")
        await eventually(lambda: _caught_up(stream), "the commits")
    assert seen == list(range(10))


async def test_events_that_a_cancelled_request_had_gathered_come_with_the_next(app: Penstock) -> None:
    stream = app.stream("numbers", int, partitions=1)
    seen: list[int] = []

    @stream.consumer(group="g")
    async def handle(events: Events[int]) -> None:
        # It has five events and waits for more.
        await a_cancelled_request(iterations("lingering take", events))
        async for event in events:
            seen.append(event.data)

    await stream.append_many([NewEvent(number) for number in range(5)])
    async with running_worker(app):
        await eventually(lambda: len(seen) == 5, "all events")
    assert seen == list(range(5))


async def _caught_up(stream: Any) -> bool:
    return all(lag.lag == 0 for lag in await stream.lag("g"))


async def test_a_standing_job_gets_messages_after_a_cancelled_request(app: Penstock) -> None:
    pool = app.pool("tenants")
    got: list[Any] = []
    asked = asyncio.Event()

    @pool.standing
    async def run(job: Standing[Any]) -> None:
        messages = job.messages()
        await a_cancelled_request(messages)
        asked.set()
        async for message in messages:
            got.append(message)

    async with running_worker(app):
        await pool.start("acme")
        await asyncio.wait_for(asked.wait(), 60)
        for number in range(3):
            await pool.notify("acme", number)
        await eventually(lambda: len(got) == 3, "all messages")
    assert got == [0, 1, 2]
