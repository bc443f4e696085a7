"""What a receiver of a topic that comes back has missed: all of it, in order, with few bytes of it in the server at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import psutil
import pytest

from penstock import Penstock
from tests.http.http_server import Served
from tests.http.live_calls import follow, frame, socket
from tests.http.topic_calls import declare

_LARGE = 500_000
ME = {"client_id": "me", "stay": True}


@pytest.fixture
async def app(served: Served) -> AsyncIterator[Penstock]:
    async with Penstock(served.database_url) as app:
        yield app


def batched(payloads: list[object], size: int) -> list[list[object]]:
    return [payloads[begin : begin + size] for begin in range(0, len(payloads), size)]


async def handed_out(app: Penstock, client: httpx.Client, topic: str, payloads: list[object]) -> str:
    """The path at which a subscriber that stays has got these messages."""
    path = f"/v1/topics/{topic}/deliveries"
    with follow(client, path, **ME) as events:
        events.next()
        for some in batched(payloads, 4 if len(payloads) < 100 else 1_000):
            await app.topic(topic).publish_many(some)
            events.data(len(some))
    return path


async def test_messages_that_were_missed_come_in_parts_of_a_megabyte(app: Penstock, served: Served, client: httpx.Client) -> None:
    topic = declare(client)
    count = 60
    path = await handed_out(app, client, topic, [f"{n:02}".ljust(_LARGE, "x") for n in range(count)])
    server = psutil.Process(served.process.pid)
    before = server.memory_info().rss
    with follow(client, path, since=0, **ME) as events:
        # Every message is asked for, and the receiver has read the first only.
        events.next()
        first = events.next().json()
        assert first["data"].startswith("00")
        assert server.memory_info().rss - before < count * _LARGE / 2
        assert [text[:2] for text in events.data(count - 1)] == [f"{n:02}" for n in range(1, count)]


async def test_more_messages_than_are_remembered_come_once_and_before_new_ones(
    app: Penstock, served: Served, client: httpx.Client
) -> None:
    topic = declare(client)
    count = 12_500
    path = await handed_out(app, client, topic, list(range(count)))
    with follow(client, path, since=0, **ME) as events:
        events.next()
        await app.topic(topic).publish(count)
        assert events.data(count + 1) == list(range(count + 1))
    with socket(served, f"{path}?client_id=me&stay=true&since=0&ack=auto") as connection:
        assert frame(connection)["type"] == "subscribed"
        assert [frame(connection)["data"] for _ in range(count + 1)] == list(range(count + 1))


async def test_the_id_of_the_last_message_of_a_part_is_where_the_next_connection_continues(
    app: Penstock, client: httpx.Client
) -> None:
    topic = declare(client)
    path = await handed_out(app, client, topic, [f"{n:02}".ljust(_LARGE, "x") for n in range(6)])
    seen: list[str] = []
    last = "0"
    while len(seen) < 6:
        with follow(client, path, last, **ME) as events:
            assert events.next().event == "subscribed"
            event = events.next()
            assert event.id is not None
            last = event.id
            seen.append(event.json()["data"][:2])
    assert seen == [f"{n:02}" for n in range(6)]
