"""What a rebalance does to handlers that run: nothing, as long as their worker lives."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import Any

import asyncpg

from penstock import Job, Penstock, Settings
from tests.waiting import eventually
from tests.workers import Workers

QUICK = {"heartbeat_interval": timedelta(seconds=0.5), "handover_grace": timedelta(milliseconds=50)}


def quick(url: str, **more: Any) -> Penstock:
    return Penstock(url, settings=Settings(**{"database_url": url, **QUICK, **more}))


async def test_a_rebalance_waits_for_a_running_handler_while_the_other_keys_of_its_slot_go_on(url: str) -> None:
    ran: Counter[str] = Counter()
    attempts: list[int] = []
    finish = asyncio.Event()
    async with quick(url) as app:
        pool = app.pool("work", slots=2)

        @pool.job
        async def handle(job: Job[int]) -> None:
            if job.key == "long":
                attempts.append(job.attempt)
                await finish.wait()
            ran[str(job.key)] += 1

        async with Workers(app) as working:
            await pool.enqueue("long", 1)
            await eventually(lambda: attempts == [1], "the long job")
            slot = pool.slot_of("long")
            (first,) = await pool.workers()
            beside = next(key for n in range(1000) if pool.slot_of(key := f"beside{n}") == slot)
            # Of two slots the one that runs the job moves to the other worker: the sticky assignor moves the highest slot.
            await working.add()
            second = await eventually(lambda: other(pool, first.id), "the second worker")
            connection = await asyncpg.connect(url)
            await connection.execute(
                "update penstock.slots set target = case when slot = $1 then $2 else $3 end where group_name = 'work'",
                slot, second, first.id,
            )  # fmt: skip
            # The handler's worker learns of the move with a heartbeat of its loop; the one beside the loop writes the time too.
            seen = "select seen_at from penstock.members where group_name = 'work' and id = $1"
            for _ in range(6):
                before = await connection.fetchval(seen, first.id)
                await eventually(
                    lambda before=before: connection.fetchval(f"select ({seen}) > $2", first.id, before), "a heartbeat"
                )
            await connection.close()
            for n in range(5):
                await pool.enqueue(beside, n)
                await eventually(lambda n=n: ran[beside] == n + 1, "a job of another key of the slot")
            assert attempts == [1]
            finish.set()
            await eventually(lambda: owner(pool, slot, second), "the move")
            await eventually(lambda: ran["long"] == 1, "the end of the long job")
        assert attempts == [1]
    assert ran["long"] == 1


async def other(pool: Any, first: str) -> str | None:
    return next((worker.id for worker in await pool.workers() if worker.id != first), None)


async def owner(pool: Any, slot: int, member: str) -> bool:
    return any(each.slot == slot and each.owner == member for each in await pool.slots())


async def test_a_worker_that_is_told_to_stop_cancels_what_runs_after_its_grace_period(url: str) -> None:
    cancelled = 0
    async with quick(url, shutdown_grace=timedelta(milliseconds=100)) as app:
        pool = app.pool("work", slots=2)

        @pool.job
        async def handle(job: Job[int]) -> None:
            nonlocal cancelled
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                cancelled += 1
                raise

        async with Workers(app):
            await pool.enqueue("long", 1)
            await eventually(lambda: app_in_progress(app), "the job")
    assert cancelled == 1


async def app_in_progress(app: Penstock) -> bool:
    return any(count.in_progress for count in await app.counts())


async def test_a_draining_worker_is_not_counted_as_one_that_works(app: Penstock) -> None:
    pool = app.pool("work", slots=4)

    @pool.job
    async def handle(job: Job[int]) -> None: ...

    async with Workers(app) as working:
        await working.add()
        await eventually(lambda: count(pool, 2), "both")
        assert [one.workers for one in await app.scale_advice()] == [2]
        await pool.drain((await pool.workers())[0].id)
        assert [one.workers for one in await app.scale_advice()] == [1]


async def count(pool: Any, workers: int) -> bool:
    return len(await pool.workers()) == workers
