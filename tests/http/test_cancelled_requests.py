"""The iterations of the asynchronous client go on after a request that was cancelled, as by `asyncio.wait_for(anext(...), 5)`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.client import AsyncClient
from tests.cancelling import a_cancelled_request
from tests.http.http_server import TOKEN, Served
from tests.waiting import eventually


@pytest.fixture
async def penstock(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.base_url, "admin", TOKEN) as client:
        yield client


@pytest.fixture
def name() -> str:
    return f"n-{secrets.token_hex(4)}"


async def everything(items: AsyncIterator[Any], number: Callable[[Any], Any]) -> list[Any]:
    """Ten items, of which some are requested again and again with short limits."""
    seed = random.randrange(2**32)
    print("seed", seed)
    pauses = random.Random(seed)
    seen: list[Any] = []
    async with asyncio.timeout(120):
        while len(seen) < 10:
            with contextlib.suppress(TimeoutError):
                seen.append(number(await asyncio.wait_for(anext(items), pauses.choice([0.0, 0.001, 0.005, 30]))))
    return seen


async def test_a_tail_goes_on_after_requests_that_were_cancelled(penstock: AsyncClient, name: str) -> None:
    stream = penstock.stream(name)
    await stream.create(1)
    async with contextlib.aclosing(stream.tail("earliest")) as events:
        await a_cancelled_request(events)
        for number in range(10):
            await stream.append(number)
        assert await everything(events, lambda event: event.data) == list(range(10))
        await a_cancelled_request(events)
    with pytest.raises(StopAsyncIteration):
        await anext(events)


@pytest.mark.parametrize("form", ["receive", "work"])
async def test_a_receiver_goes_on_after_requests_that_were_cancelled(penstock: AsyncClient, name: str, form: str) -> None:
    topic = penstock.topic(name)
    await topic.declare()
    items: Any = topic.receive() if form == "receive" else topic.work()
    async with contextlib.aclosing(items):
        await a_cancelled_request(items)

        async def subscribed() -> bool:
            return bool(await topic.subscribers())

        # The connection, whose subscription has no name of its own, outlives the cancelled request.
        await eventually(subscribed, "the subscription")
        (subscriber,) = await topic.subscribers()
        await a_cancelled_request(items)
        for number in range(10):
            await topic.publish(number)
        seen = await everything(items, lambda item: item.data if form == "receive" else item.message.data)
        assert sorted(seen) == list(range(10))
        assert [one.client_id for one in await topic.subscribers()] == [subscriber.client_id]

    async def gone() -> bool:
        return not await topic.subscribers()

    await eventually(gone, "the end of the connection")


async def test_an_iteration_that_is_let_go_of_after_a_cancelled_request_ends_its_connection(
    penstock: AsyncClient, name: str
) -> None:
    topic = penstock.topic(name)
    await topic.declare()
    messages = topic.receive()
    await a_cancelled_request(messages)

    async def subscribed() -> bool:
        return bool(await topic.subscribers())

    await eventually(subscribed, "the subscription")
    del messages
    gc.collect()

    async def gone() -> bool:
        return not await topic.subscribers()

    await eventually(gone, "the end of the connection")


async def test_requests_of_several_tasks_get_each_message_once(penstock: AsyncClient, name: str) -> None:
    stream = penstock.stream(name)
    await stream.create(1)
    async with contextlib.aclosing(stream.tail("earliest")) as events:
        requests = [asyncio.ensure_future(anext(events)) for _ in range(6)]
        for number in range(6):
            await stream.append(number)
        assert sorted([event.data for event in await asyncio.gather(*requests)]) == list(range(6))


async def test_what_a_request_raises_ends_the_iteration(penstock: AsyncClient, name: str) -> None:
    events = penstock.stream(name).tail()
    with pytest.raises(Exception, match=name):
        await anext(events)
    with pytest.raises(StopAsyncIteration):
        await anext(events)
