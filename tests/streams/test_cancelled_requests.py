"""An iteration goes on after a request that was cancelled, as by `asyncio.wait_for(anext(iterator), 5)`."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from penstock import Events, NewEvent, Penstock, Standing
from penstock.testing import running_worker
from tests.cancelling import a_cancelled_request
from tests.waiting import eventually


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


async def test_a_consumption_goes_on_after_requests_that_were_cancelled(app: Penstock) -> None:
    stream = app.stream("numbers", int, partitions=1)
    await stream.declare()
    # With an id, for which a member that the cancelled request had left behind would stand in the way of the next one.
    batches = stream.consume("g", id="me")
    for pause_ms in range(12):
        # The first ones are cancelled while they join.
        request = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(pause_ms / 1000)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    await a_cancelled_request(batches)
    await stream.append_many([NewEvent(number) for number in range(10)])
    seen: list[int] = []
    while len(seen) < 10:
        seen += (await asyncio.wait_for(anext(batches), 60)).records()
    assert seen == list(range(10))
    await batches.close(done=True)
    assert [lag.lag for lag in await stream.lag("g")] == [0]


async def test_a_consumption_whose_opening_was_cancelled_leaves_no_member_behind(app: Penstock) -> None:
    stream = app.stream("numbers", int, partitions=1)
    await stream.declare()
    batches = stream.consume("g", id="me")
    opening = asyncio.ensure_future(batches.__aenter__())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # Another one with this id would be refused while the first is a member.
    async with stream.consume("g", id="me") as again:
        assert again.consumer is not None


class Interrupted(Exception):
    """Raised by the handler of a signal."""


@pytest.mark.parametrize("form", ["tail", "consume"])
def test_a_blocking_iteration_goes_on_after_a_request_that_a_signal_interrupted(url: str, form: str) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    app = Penstock(url)
    try:
        stream = app.stream("numbers", int, partitions=1).sync
        stream.declare()
        items: Any = stream.tail("earliest") if form == "tail" else stream.consume("g")
        with items:
            threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
            with pytest.raises(Interrupted):
                next(items)
            stream.append_many([NewEvent(number) for number in range(10)])
            seen: list[int] = []
            while len(seen) < 10:
                item = next(items)
                seen += [item.data] if form == "tail" else item.records()
            assert seen == list(range(10))
    finally:
        app.sync.close()
        signal.signal(signal.SIGUSR1, before)
