"""Streams and topics through the typed clients, against a real server."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import Conflict, InvalidInput, NewMessage, NotFound
from penstock.client import AccessDenied, AsyncClient, Client
from penstock.errors import OffsetGone
from penstock.streams.models import NewEvent, Position
from penstock.testing import TemporaryDatabases
from tests import command_line
from tests.http.http_server import TOKEN, Served, free_port, serving
from tests.waiting import eventually


@pytest.fixture
def penstock(served: Served) -> Iterator[Client]:
    with Client(served.base_url, "admin", TOKEN) as client:
        yield client


@pytest.fixture
def name() -> str:
    return f"n-{secrets.token_hex(4)}"


def test_integers_beyond_64_bits_in_events_and_messages_are_exact(penstock: Client, served: Served, name: str) -> None:
    big = 2**70 + 1
    stream, topic = penstock.stream(name), penstock.topic(name)
    stream.create(1)
    topic.declare()
    with served.client() as client:
        assert client.post(f"/v1/streams/{name}/events", content=f'{{"data": {big}}}').status_code == 201
        assert client.post(f"/v1/topics/{name}/messages", content=f'{{"data": {big}}}').status_code == 202
    assert [message.data for message in topic.read(0)] == [big]
    assert next(iter(topic.receive(since=0))).data == big
    deliveries = topic.work("me", stay=True, since=0)
    assert next(deliveries).message.data == big
    deliveries.close()  # type: ignore[attr-defined]
    assert [event.data for event in stream.read(0)] == [big]
    assert next(iter(stream.tail("earliest"))).data == big


def test_a_streams_life(penstock: Client, name: str) -> None:
    stream = penstock.stream(name)
    with pytest.raises(NotFound):
        stream.describe()
    assert stream.create(1, keep_age_s=60).keep_age == timedelta(minutes=1)
    with pytest.raises(Conflict):
        stream.create()
    at = datetime(2026, 1, 31, tzinfo=UTC)
    assert stream.append({"n": 1}, key="k", headers={"a": 1}, time=at) == Position(0, 0)
    assert stream.append_many([2, NewEvent(3, key="k")], producer="p", sequence=1) == 1
    assert stream.append_many([2, NewEvent(3, key="k")], producer="p", sequence=1) == 1
    assert stream.append(4, producer="p", sequence=2) == Position(0, 3)
    (first, *others) = stream.read(0)
    assert (first.data, first.key, first.headers, first.time) == ({"n": 1}, "k", {"a": 1}, at)
    assert [event.data for event in others] == [2, 3, 4]
    assert stream.read(0, 4, wait=timedelta(seconds=0.1)) == []
    assert [event.data for event in itertools.islice(stream.tail("earliest"), 4)] == [{"n": 1}, 2, 3, 4]
    assert [event.data for event in itertools.islice(stream.tail({0: 2}, partitions=[0]), 2)] == [3, 4]
    assert name in {one.name for one in penstock.list_streams()}
    with pytest.raises(InvalidInput):
        stream.append(1, producer="p")


def test_a_stream_is_changed_and_dropped(penstock: Client, name: str) -> None:
    stream = penstock.stream(name)
    stream.create(1)
    assert stream.change(keep_age_s=60, keep_events=None).keep_age == timedelta(minutes=1)
    assert stream.grow(2).partitions == 2
    with pytest.raises(InvalidInput):
        stream.grow(1)
    stream.join("g", "me")
    with pytest.raises(Conflict):
        stream.drop()
    events = stream.tail("earliest")
    stream.append(1)
    assert next(events).data == 1
    stream.drop(force=True)
    with pytest.raises(NotFound):
        next(events)
    with pytest.raises(NotFound):
        stream.drop()


def test_bytes(penstock: Client, name: str) -> None:
    stream = penstock.stream(name)
    stream.create(1, format="bytes", compression="zstd")
    stream.append(b"\x00\xff")
    assert [event.data for event in stream.read(0)] == [b"\x00\xff"]


def test_a_group(penstock: Client, name: str) -> None:
    stream = penstock.stream(name)
    stream.create(1)
    stream.append_many(range(4))
    member = stream.join("g", "me")
    with pytest.raises(Conflict):
        stream.join("g", "me")
    reading = member.read(3)
    assert [event.data for batch in reading.batches for event in batch.events] == [0, 1, 2]
    assert member.commit(*reading.batches) == {0: True}
    assert member.heartbeat().partitions == {0: 1}
    (lag,) = stream.lag("g")
    assert (lag.next, lag.lag, lag.owner) == (3, 1, "me")
    assert stream.lag() == [lag]
    assert stream.seek("g", "earliest") == 1
    assert member.commit(*reading.batches) == {0: False}
    assert stream.pause("g", [0], reason="x") == 1
    assert member.read().batches == []
    assert stream.resume("g") == 1
    assert len(member.read().batches[0].events) == 4
    assert stream.seek("g", {0: 2}) == stream.seek("g", datetime.now(UTC)) == 1
    member.leave()
    with pytest.raises(NotFound):
        member.read()
    stream.drop_group("g")


def test_a_topics_life(penstock: Client, name: str) -> None:
    topic = penstock.topic(name)
    with pytest.raises(NotFound):
        topic.publish(1)
    topic.declare(catch_up=2)
    assert topic.subscribe("a", ttl=timedelta(minutes=1), filter={"n": 1}).created
    assert topic.renew("a")
    (one,) = topic.subscribers()
    assert (one.client_id, one.filter, one.ttl) == ("a", {"n": 1}, timedelta(minutes=1))
    first = topic.publish({"n": 1}, unique="u", run_after=timedelta(0), expires_at=timedelta(hours=1))
    assert (first.receivers, topic.publish({"n": 1}, id=first.id).duplicate) == (1, True)
    receipt = topic.publish({"n": 1}, background=False, timeout=timedelta(seconds=0.1))
    assert (receipt.complete, [str(outcome.status) for outcome in receipt.outcomes or []]) == (False, ["queued"])
    assert [message.data for message in topic.read(0)] == [{"n": 1}] * 2
    assert [message.seq for message in itertools.islice(topic.receive(since=0), 2)] == [1, 2]
    assert topic.unsubscribe("a", drop=True)
    assert not topic.unsubscribe("a")
    assert topic.publish_many([{"n": 3}, NewMessage({"n": 4}, run_after=timedelta(hours=1)), NewMessage(5, id=first.id)]) == 3
    assert [message.data for message in topic.read(2)] == [{"n": 3}, {"n": 4}]
    with pytest.raises(InvalidInput, match="message 2 of 2"):
        topic.publish_many([6, NewMessage(7, unique="")])
    assert name in {counts.name for counts in penstock.topic_counts()}


def test_a_receiver_sees_the_key_of_a_message(penstock: Client, name: str) -> None:
    topic = penstock.topic(name)
    topic.declare()
    topic.publish({"n": 1}, key="acme")
    topic.publish({"n": 2})
    # The first two were there before the connection: they are read for it. The third reaches it as a copy.
    received = iter(topic.receive(since=0))
    assert [(message.data["n"], message.key) for message in itertools.islice(received, 2)] == [(1, "acme"), (2, None)]
    topic.publish({"n": 3}, key="bolt")
    third = next(received)
    assert (third.data["n"], third.key) == (3, "bolt")
    assert [message.key for message in topic.read(0)] == ["acme", None, "bolt"]


async def test_the_asynchronous_client_follows_and_receives(served: Served, name: str) -> None:
    async with AsyncClient(served.base_url, "admin", TOKEN) as penstock:
        stream, topic = penstock.stream(name), penstock.topic(name)
        await stream.create(2)
        await topic.declare()
        member = await stream.join("g")
        reading = asyncio.create_task(member.read(wait=timedelta(seconds=20)))
        async with aclosing(stream.tail()) as events, aclosing(topic.receive(filter={"n": 1})) as messages:
            event = asyncio.ensure_future(anext(events))
            message = asyncio.ensure_future(anext(messages))

            async def there() -> bool:
                return bool(await topic.subscribers())

            await eventually(there, "the subscription")
            await stream.append("x", key="k")
            await topic.publish({"n": 2})
            await topic.publish({"n": 1})
            assert (await message).data == {"n": 1}
            # It may have begun after that event: another one tells.
            while not event.done():
                await stream.append("x", key="k")
                await asyncio.wait([event], timeout=0.5)
            assert (await event).data == "x"
        (batch,) = (await reading).batches
        assert batch.events[0].data == "x"
        await member.commit(batch)
        await member.leave()


async def test_a_follower_outlives_the_server(databases: TemporaryDatabases, name: str) -> None:
    port = str(free_port())
    with databases.database() as url:
        async with AsyncClient(f"http://127.0.0.1:{port}", "admin", TOKEN) as penstock:
            stream = penstock.stream(name)
            seen: list[Any] = []
            with serving(url, "--port", port):
                await stream.create(1)
                await stream.append(1)
                events = stream.tail("earliest")
                seen.append((await anext(events)).data)
            with serving(url, "--port", port):
                await stream.append(2)
                seen.append((await anext(events)).data)
                await events.aclose()  # type: ignore[attr-defined]
            assert seen == [1, 2]


def test_what_is_gone_is_an_error(penstock: Client, served: Served, name: str) -> None:
    import asyncpg

    stream = penstock.stream(name)
    stream.create(1, keep_events=1)
    stream.append(1)

    async def roll() -> None:
        sql = await asyncpg.connect(served.database_url)
        await sql.execute("select penstock.roll_segment($1)", name)
        stream.append(2)
        await sql.execute("select penstock.retire_segments($1)", name)
        await sql.close()

    asyncio.run(roll())
    with pytest.raises(OffsetGone):
        stream.read(0)
    with pytest.raises(OffsetGone):
        next(stream.tail({0: 0}))


def test_messages_are_worked_on_a_socket(penstock: Client, served: Served, name: str) -> None:
    topic = penstock.topic(name)
    with pytest.raises(NotFound):
        next(topic.work())
    topic.declare()
    topic.publish({"n": 0})
    deliveries = topic.work("me", stay=True, since=0, window=5)
    first = next(deliveries)
    assert (first.message.data, first.attempt) == ({"n": 0}, 1)
    first.ack({"ok": True})
    topic.publish({"n": 1})
    next(deliveries).fail("no", retry=False)
    topic.publish({"n": 2})
    assert next(deliveries).message.data == {"n": 2}
    deliveries.close()  # type: ignore[attr-defined]
    assert next(topic.work("me", stay=True)).message.data == {"n": 2}


async def test_messages_are_worked_on_a_socket_without_blocking(served: Served, name: str) -> None:
    async with AsyncClient(served.base_url, token=f"admin.{TOKEN}") as penstock:
        topic = penstock.topic(name)
        await topic.declare()
        await topic.publish(1)
        async with aclosing(topic.work(since=0)) as deliveries:
            first = await anext(deliveries)
            publishing = asyncio.create_task(topic.publish(2, background=False))
            await first.ack()
            await (await anext(deliveries)).ack("done")
            assert [outcome.result for outcome in (await publishing).outcomes or []] == ["done"]
    async with AsyncClient(served.base_url, token="admin.wrong") as penstock:
        with pytest.raises(AccessDenied):
            await anext(penstock.topic(name).work())


def test_the_command_line_works_through_a_server(served: Served, name: str) -> None:
    def penstock(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        server = {"PENSTOCK_SERVER_URL": served.base_url, "PENSTOCK_SERVER_TOKEN": f"admin.{TOKEN}"}
        return command_line.penstock("postgresql://nobody@127.0.0.1:1/none", *arguments, stdin=stdin, **server)

    assert f"created: {name}" in penstock("topics", "create", name, "--catch-up", "2").stdout
    assert f"queue {name}_bob" in penstock("topics", "subscribe", name, "bob", "--ttl", "5m").stdout
    assert "to 1 subscribers" in penstock("topics", "publish", name, '{"n": 1}').stdout
    assert penstock("topics", "publish", name, "-f", "-", stdin='{"data": 2}\n{"data": 3}\n').stdout == "2 published\n"
    assert [message["data"] for message in json.loads(penstock("topics", "read", name, "--json").stdout)] == [{"n": 1}, 2, 3]
    assert f"{name}_bob" in penstock("topics", "subscribers", name).stdout
    assert "unsubscribed: bob" in penstock("topics", "unsubscribe", name, "bob").stdout
    assert "was not subscribed: bob" in penstock("topics", "unsubscribe", name, "bob").stdout
    assert name in penstock("topics").stdout

    assert "2 partitions" in penstock("streams", "create", name, "--partitions", "2").stdout
    assert "offset 0" in penstock("streams", "append", name, "1", "--key", "k").stdout
    assert penstock("streams", "append", name, "-f", "-", stdin='{"data": 2}\n{"data": 3}\n').stdout == "2 appended\n"
    assert len(penstock("streams", "tail", name, "--from", "earliest", "-n", "3", "--json").stdout.splitlines()) == 3
    assert name in {stream["name"] for stream in json.loads(penstock("streams", "list", "--json").stdout)}
    served.client().put(f"/v1/streams/{name}/groups/g/members/m", json={"dead_after_s": 600}).raise_for_status()
    assert json.loads(penstock("streams", "groups", name, "--json").stdout)[0]["lag"] == 3
    assert "paused: 2" in penstock("streams", "pause", name, "g").stdout
    assert "resumed: 2" in penstock("streams", "resume", name, "g").stdout
    assert penstock("streams", "reset", name, "g", "--to", "latest").stdout.split()[:2] == ["partition", "next"]
    assert sum(lag["lag"] for lag in json.loads(penstock("streams", "lag", name, "g", "--json").stdout)) == 0
    assert "4 partitions" in penstock("streams", "grow", name, "4").stdout
    assert "changed" in penstock("streams", "change", name, "-s", "keep_events=9").stdout
    assert penstock("streams", "replay-dead", name).stdout == "replayed: 0\n"
    assert "live members" in penstock("streams", "drop", name, "--yes").stderr
    assert "dropped" in penstock("streams", "drop", name, "--yes", "--force").stdout
