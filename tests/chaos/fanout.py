"""One process of the chaos test of topics: a publisher or a subscriber that acts at random and records the answers.

python fanout.py publisher|subscriber NAME SEED
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

import asyncpg

from penstock import NewMessage, Penstock, PenstockError, Topic
from penstock.jobs import claim_queries
from penstock.jobs.models import Outcome, Settlement
from penstock.topics import queries as topics

TOPICS = ["red", "green"]


def record(**event: Any) -> None:
    """Append one event; a killed process leaves a torn line at most."""
    file = os.open(os.environ["CHAOS_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, (json.dumps(event, default=str) + "\n").encode())
    finally:
        os.close(file)


async def publisher(app: Penstock, name: str, chance: random.Random) -> None:
    """Publish, sometimes twice, or in a transaction that is rolled back."""
    connection: asyncpg.Connection[Any] = await (await app.database()).connect()
    while True:
        topic = app.topic(chance.choice(TOPICS))
        id = uuid.UUID(int=chance.getrandbits(128), version=4)
        unique = chance.choice([None, None, None, "u"])
        if chance.random() < 0.2:
            transaction = connection.transaction()
            await transaction.start()
            await topic.publish({"by": name}, id=id, unique=unique, connection=connection)
            # The time for which the transaction is open is what is tested.
            await asyncio.sleep(chance.uniform(0, 0.02))
            if chance.random() < 0.5:
                await transaction.rollback()
                record(kind="given up", id=id)
                continue
            await transaction.commit()
            record(kind="published", id=id, topic=topic.name)
        if chance.random() < 0.1:
            many = [
                NewMessage({"by": name}, uuid.UUID(int=chance.getrandbits(128), version=4), chance.choice([None, None, "u"]))
                for _ in range(5)
            ]
            for receipt in await topic.publish_many(many):
                record(kind="published", id=receipt.id, topic=topic.name, seq=receipt.seq)
        for _ in range(chance.choice([1, 1, 2])):
            receipt = await topic.publish({"by": name}, id=id, unique=unique)
            record(kind="published", id=id, topic=topic.name, seq=receipt.seq)


async def subscriber(app: Penstock, name: str, chance: random.Random) -> None:
    """Subscribe, work for a while, then unsubscribe, run the maintenance of topics, or leave without unsubscribing."""
    database = await app.database()
    while True:
        topic = app.topic(chance.choice(TOPICS))
        client = f"{name}-{chance.randrange(3)}"
        ttl = chance.choice([None, timedelta(seconds=1)])
        receipt = await topic.subscribe(client, ttl=ttl)
        record(kind="subscribed", topic=topic.name, client=client, created=receipt.created, seq=receipt.seq)
        async with asyncio.timeout(5):
            for _ in range(chance.randrange(1, 30)):
                await _work(database, receipt.queue, name)
                if ttl is not None and not await topic.renew(client):
                    break
        match chance.randrange(3):
            case 0:
                await topic.unsubscribe(client, drop=chance.random() < 0.5)
            case 1:
                await topics.maintain(database)


async def _work(database: Any, queue: str, worker: str) -> None:
    claim = await claim_queries.claim(database, worker, [queue], 20, {})
    for job in claim.jobs:
        record(kind="received", job=job.id)
    if claim.jobs:
        await claim_queries.settle(database, [Settlement(j.id, j.attempt, j.lease, Outcome.SUCCEEDED) for j in claim.jobs])


async def main(role: str, name: str, seed: int) -> None:
    """Publish or subscribe until killed; a call that fails is repeated."""
    chance = random.Random(seed)
    async with Penstock() as app:
        for topic in TOPICS:
            declared: Topic[Any] = app.topic(topic)
            await declared.declare()
        while True:
            with suppress(PenstockError, TimeoutError):
                await (publisher if role == "publisher" else subscriber)(app, name, chance)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
