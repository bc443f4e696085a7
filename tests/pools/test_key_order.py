"""P6 with producers that overlap: jobs of one key start in the order in which their transactions commit, with the defaults.

A number is drawn before its transaction commits, so a lower one can become visible after a higher one. What holds whatever the
producers do: jobs of one transaction start in the order of its calls, and a transaction that began after another had committed
comes behind it. How two that overlap are interleaved is open.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass

import asyncpg

from penstock import Job, Penstock
from tests.waiting import eventually
from tests.workers import Workers


@dataclass(frozen=True, slots=True)
class Call:
    """One job as its producer knows it."""

    key: str
    n: int
    transaction: int
    begun: int
    committed: int


def violations(calls: list[Call], started: list[int]) -> list[str]:
    """Where a history of starts, of one key each, breaks the order. `begun` and `committed` are places in one order of events."""
    known = {call.n: call for call in calls}
    found = []
    by_key: dict[str, list[Call]] = {}
    for n in started:
        by_key.setdefault(known[n].key, []).append(known[n])
    for key, line in by_key.items():
        of_transaction: dict[int, Call] = {}
        latest = line[0]
        for call in line:
            before = of_transaction.get(call.transaction)
            if before is not None and before.n > call.n:
                found.append(f"{key}: {call.n} started after {before.n}, which the same transaction enqueued later")
            of_transaction[call.transaction] = call
            if latest.begun > call.committed:
                found.append(
                    f"{key}: {call.n} started after {latest.n}, whose transaction began when that of {call.n} had committed"
                )
            latest = max(latest, call, key=lambda each: each.begun)
    return found


def test_the_checker_rejects_what_it_is_to_find() -> None:
    first, second = Call("a", 1, 1, 1, 2), Call("a", 2, 2, 3, 4)
    assert violations([first, second], [1, 2]) == []
    assert len(violations([first, second], [2, 1])) == 1
    beside = [Call("a", 1, 1, 1, 4), Call("a", 2, 2, 2, 3), Call("a", 3, 1, 1, 4)]
    assert violations(beside, [1, 2, 3]) == violations(beside, [2, 1, 3]) == violations(beside, [1, 3, 2]) == []
    assert len(violations(beside, [3, 1, 2])) == 1


async def test_calls_of_one_transaction_start_in_their_order_while_others_enqueue_in_between(app: Penstock, url: str) -> None:
    started: list[int] = []
    pool = app.pool("work", slots=8)

    @pool.job
    async def handle(job: Job[int]) -> None:
        started.append(job.data)
        await asyncio.sleep(0)

    async with Workers(app):
        connection = await asyncpg.connect(url)
        for trial in range(8):
            started.clear()
            async with connection.transaction():
                await pool.enqueue("acme", 1, connection=connection)
                await pool.enqueue_many([("acme", 0)] * 400)
                await eventually(lambda: len(started) > 50, "that the key is under way")
                await pool.enqueue("acme", 2, connection=connection)
            await eventually(lambda: len(started) == 402, "all jobs")
            assert started.index(1) < started.index(2), f"trial {trial}"
        await connection.close()


async def test_order_holds_at_full_speed_with_overlapping_producers(app: Penstock, url: str) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    started: list[int] = []
    pool = app.pool("work", slots=16)
    ticks, numbers, transactions = itertools.count(), itertools.count(), itertools.count()
    calls: list[Call] = []

    @pool.job
    async def handle(job: Job[int]) -> None:
        started.append(job.data)

    async def produce(chance: random.Random) -> None:
        connection = await asyncpg.connect(url)
        for _ in range(30):
            transaction, mine, begun = next(transactions), [], next(ticks)
            async with connection.transaction():
                for _ in range(chance.randrange(1, 4)):
                    batch = [(f"k{chance.randrange(20)}", next(numbers)) for _ in range(chance.choice([1, 20, 150]))]
                    await pool.enqueue_many(batch, connection=connection)
                    mine += batch
                    await asyncio.sleep(chance.choice([0, 0, 0.003]))
            committed = next(ticks)
            calls.extend(Call(key, n, transaction, begun, committed) for key, n in mine)
        await connection.close()

    async with Workers(app):
        await asyncio.gather(*[produce(random.Random(seed + n)) for n in range(6)])
        await eventually(lambda: len(started) == len(calls), "all jobs")
    assert violations(calls, started) == []


async def test_what_is_visible_and_lower_is_never_passed(app: Penstock, sql: asyncpg.Connection, url: str) -> None:  # type: ignore[type-arg]
    await app.pool("work", slots=4).declare()
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    late = await asyncpg.connect(url)

    async def claim(in_hand: str) -> list[str]:
        rows = await sql.fetch(
            "select * from penstock.claim_keys('m', 'work', '{0,1,2,3}', '{1,1,1,1}', 10, 2, null, null, $1::text::jsonb)",
            in_hand,
        )
        return [row["data"] for row in rows[:-1]]

    async def enqueue(connection: asyncpg.Connection, data: str) -> None:  # type: ignore[type-arg]
        await connection.execute("select penstock.enqueue('work', $1::text::jsonb, p_key => 'a')", data)

    transaction = late.transaction()
    await transaction.start()
    await enqueue(late, "1")
    await enqueue(sql, "2")
    await enqueue(late, "3")
    await enqueue(sql, "4")
    assert await claim("{}") == ["2", "4"]
    await transaction.commit()
    await enqueue(sql, "5")
    assert await claim('{"a": 1}') == ["1", "3"]
    assert await claim('{"a": 1}') == ["5"]
    await late.close()
