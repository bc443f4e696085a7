"""What waits for each subscriber of a topic, beside a model: whatever is published, subscribed and settled in whatever order."""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg

from penstock import Penstock
from penstock.topics.topic import Topic

Sql: TypeAlias = "asyncpg.Connection[Any]"
CLIENTS, STEPS = "abcd", 120


@dataclass
class Client:
    """What the documents say of a client: the numbers of the messages that wait for it, and its subscription."""

    waiting: list[int] = field(default_factory=list)
    subscribed: bool = False
    filter: dict[str, Any] | None = None
    unique: dict[str, int] = field(default_factory=dict)

    def gets(self, number: int, key: str | None) -> None:
        """A copy of a message, unless it has one, or one with this unique key waits."""
        if number in self.waiting or (key is not None and self.unique.get(key) in self.waiting):
            return
        self.waiting.append(number)
        if key is not None:
            self.unique[key] = number


class Model:
    """A topic as the documents describe it, and the real one."""

    def __init__(self, topic: Topic[Any], sql: Sql, catch_up: int, dice: random.Random) -> None:
        self.topic = topic
        self.sql = sql
        self.catch_up = catch_up
        self.dice = dice
        self.clients = {name: Client() for name in CLIENTS}
        self.log: list[tuple[int, int, str | None]] = []
        self.ids: dict[UUID, tuple[int, str | None]] = {}

    async def publish(self, name: str) -> None:
        """One message, with a unique key or none; or one that was published before."""
        dice = self.dice
        if self.ids and dice.random() < 0.2:
            id = dice.choice(list(self.ids))
            number, key = self.ids[id]
            await self.topic.publish(self._data(number), id=id, unique=key)
            return
        number, key, id = len(self.log) + 1, dice.choice([None, None, "x", "y"]), uuid4()
        self.ids[id] = number, key
        self._published((await self.topic.publish(self._data(number), id=id, unique=key)).seq, number, key)

    async def publish_many(self, name: str) -> None:
        """Three messages at once."""
        numbers = [len(self.log) + 1 + n for n in range(3)]
        for receipt, number in zip(await self.topic.publish_many([self._data(n) for n in numbers]), numbers, strict=True):
            self._published(receipt.seq, number, None)

    async def subscribe(self, name: str) -> None:
        """A new subscriber gets the last messages, or all since a message; another call changes the filter alone."""
        dice, client = self.dice, self.clients[name]
        filter = dice.choice([None, {"odd": True}])
        since = dice.choice([None, None, 0, *(seq for seq, _, _ in self.log[-10:])])
        ttl = dice.choice([None, timedelta(hours=1)])
        await self.topic.subscribe(name, filter=filter, since=since, ttl=ttl)
        before, client.subscribed, client.filter = client.subscribed, True, filter
        if before:
            return
        kept = self.log[-self.catch_up :] if self.catch_up else []
        for _, number, key in kept if since is None else [one for one in self.log if one[0] > since]:
            if self._matches(client, number):
                client.gets(number, key)

    async def unsubscribe(self, name: str) -> None:
        """What waits stays, unless it is to be dropped."""
        client, drop = self.clients[name], self.dice.random() < 0.5
        assert await self.topic.unsubscribe(name, drop=drop) == client.subscribed
        if drop and client.subscribed:
            client.waiting.clear()
        client.subscribed = False

    async def renew(self, name: str) -> None:
        """Says whether there is a subscription."""
        assert await self.topic.renew(name) == self.clients[name].subscribed

    async def settle(self, name: str) -> None:
        """A worker takes all that waits."""
        queue = f"{self.topic.name}_{name}"
        claimed = await self.sql.fetch("select id, attempt, lease from penstock.claim('w', array[$1], 1000)", queue)
        columns = [[row[column] for row in claimed] for column in ("id", "attempt", "lease")]
        await self.sql.execute(
            "select penstock.settle($1, $2::smallint[], $3::bigint[], $4)", *columns, ["succeeded"] * len(claimed)
        )
        self.clients[name].waiting.clear()

    async def check(self, step: str) -> None:
        """Compare what waits."""
        for name, client in self.clients.items():
            rows = await self.sql.fetch(
                "select (sent.data ->> 'n')::integer as n from penstock.queued_jobs as copy"
                " join penstock.topic_messages as sent on sent.number = copy.message where copy.name = $1",
                f"{self.topic.name}_{name}",
            )
            assert sorted(row["n"] for row in rows) == sorted(client.waiting), f"of {name} after {step}"

    def _data(self, number: int) -> dict[str, Any]:
        return {"n": number, "odd": number % 2 == 1}

    def _matches(self, client: Client, number: int) -> bool:
        return client.filter is None or number % 2 == 1

    def _published(self, seq: int, number: int, key: str | None) -> None:
        self.log.append((seq, number, key))
        for client in self.clients.values():
            if client.subscribed and self._matches(client, number):
                client.gets(number, key)


async def test_each_subscriber_has_what_the_documents_say(app: Penstock, sql: Sql) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    catch_up = dice.choice([0, 3])
    topic: Topic[Any] = app.topic("news", catch_up=catch_up)
    await topic.declare()
    model = Model(topic, sql, catch_up, dice)
    steps = [
        model.publish,
        model.publish,
        model.publish_many,
        model.subscribe,
        model.subscribe,
        model.unsubscribe,
        model.renew,
        model.settle,
    ]
    for at in range(STEPS):
        step, name = dice.choice(steps), dice.choice(CLIENTS)
        await step(name)
        await model.check(f"step {at}, {step.__name__} of {name}, seed {seed}")
    # The messages can be read in the order of their numbers, each once.
    read: list[tuple[int, int]] = []
    while part := await topic.read(since=read[-1][0] if read else 0, limit=7):
        read += [(message.seq, message.data["n"]) for message in part]
    assert read == [(seq, number) for seq, number, _ in model.log]
    assert [seq for seq, _ in read] == sorted({seq for seq, _ in read})
