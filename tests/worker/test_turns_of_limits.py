"""The places of a limit go round among those who wait for one (P12), never more at once than the limit (P5), none left idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, Penstock, RateLimit
from penstock.groups.assignors import Candidate
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"
# Three periods of jobs, and one more. A fetcher that only polled for the next place would leave many idle.
LIMIT, PERIOD = 30, timedelta(seconds=3)
JOBS = 3 * LIMIT + 1


class Process:
    """One of several workers in this process, each an application of its own that counts what it runs."""

    def __init__(self, app: Penstock, name: str, ran: Counter[str], running: Counter[str]) -> None:
        self.app, self.name, self.ran, self.running = app, name, ran, running
        self.most = 0

    async def run(self, job: Job[Any], seconds: float) -> None:
        self.ran[str(job.key or self.name)] += 1
        self.running[job.name] += 1
        self.most = max(self.most, self.running[job.name])
        await asyncio.sleep(seconds)
        self.running[job.name] -= 1


async def processes(stack: AsyncExitStack, url: str, count: int) -> list[Process]:
    ran: Counter[str] = Counter()
    running: Counter[str] = Counter()
    return [Process(await stack.enter_async_context(Penstock(url)), f"w{n}", ran, running) for n in range(count)]


async def test_a_quiet_key_on_one_worker_gets_its_turn_beside_saturated_keys_on_another(url: str) -> None:
    def assign(key: str, workers: Sequence[Candidate]) -> int:
        return 0 if key.startswith("noisy") else len(workers) - 1

    async with AsyncExitStack() as stack:
        each = await processes(stack, url, 2)
        for process in each:
            pool = process.app.pool("work", assign=assign, concurrency=10)

            @pool.job
            async def handle(job: Job[int], process: Process = process) -> None:
                await process.run(job, 0.05)

        first, second = each
        await pool.enqueue_many([(f"noisy{n}", n) for n in range(10)] * 200)
        await stack.enter_async_context(Workers(first.app))
        await eventually(lambda: sum(first.ran.values()) > 20, "that the limit is reached")
        await pool.enqueue_many([("quiet", n) for n in range(20)])
        await stack.enter_async_context(Workers(second.app))
        await eventually(lambda: first.ran["quiet"] == 20, "the quiet key's jobs")
        assert sum(first.ran.values()) < 1000, "the quiet key had to wait for the noisy ones"
        await first.app.pause("work")
    assert max(process.most for process in each) == 10


async def test_a_member_leaves_the_place_to_the_member_that_waits_for_it(app: Penstock, sql: Sql) -> None:
    await app.pool("work", slots=32, concurrency=1).declare()
    for member in ("noisy", "quiet"):
        await sql.execute("select penstock.join_group('work', $1, gen_random_uuid())", member)
    await sql.execute("select penstock.enqueue('work', to_jsonb(n), p_key => 'a') from generate_series(1, 9) as n")
    await sql.execute("select penstock.enqueue('work', to_jsonb(n), p_key => 'b') from generate_series(11, 12) as n")
    await sql.execute(
        "update penstock.slots set owner = given.member, target = given.member, epoch = 1"
        " from (select distinct slot, case key when 'a' then 'noisy' else 'quiet' end as member from penstock.queued_jobs)"
        " as given"
        " where slots.slot = given.slot"
    )

    async def claim(member: str) -> list[int]:
        rows = await sql.fetch(
            "select claimed.* from (select array_agg(slot) as mine from penstock.slots where owner = $1) as owned"
            " cross join penstock.claim_keys($1, 'work', owned.mine, array[1], 5) as claimed",
            member,
        )
        return [int(row["data"]) for row in rows if row["id"] is not None]

    async def wait(member: str) -> bool:
        rows = await sql.fetch("select * from penstock.wait_for_places($1, '{work}')", member)
        return bool(rows and rows[0]["is_new"])

    async def settle() -> None:
        await sql.execute(
            "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease))"
            " from penstock.queued_jobs where status = 'in-progress'"
        )

    assert (await claim("noisy"), await claim("quiet")) == ([1], [])
    assert await wait("quiet")
    await settle()
    assert await claim("noisy") == [], "the member that settled took the place of the one that waits"
    assert await claim("quiet") == [11]


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.02, marks=pytest.mark.soak)])
async def test_workers_of_a_queue_with_a_limit_take_turns(url: str, seconds: float) -> None:
    async with AsyncExitStack() as stack:
        each = await processes(stack, url, 3)
        for process in each:

            @process.app.job("work", concurrency=2)
            async def handle(job: Job[int], process: Process = process) -> None:
                await process.run(job, seconds)

        for process in each:
            await stack.enter_async_context(Workers(process.app))
        # All of them are there before the first could be through with the jobs.
        await each[0].app.enqueue_many("work", range(1_200))
        ran = each[0].ran
        await eventually(lambda: sum(ran.values()) == 1_200, "all jobs", 90.0)
    assert min(ran[process.name] for process in each) >= 60, ran
    assert max(process.most for process in each) <= 2


async def test_a_worker_that_does_not_come_for_its_place_loses_it(url: str, sql: Sql) -> None:
    done = 0
    async with Penstock(url) as app:

        @app.job("work", concurrency=1)
        async def handle(job: Job[int]) -> None:
            nonlocal done
            done += 1
            await asyncio.sleep(0.001)

        await handle.enqueue_many(range(200))
        await sql.execute("update penstock.jobs set concurrency = 1")
        claimed = await sql.fetch("select * from penstock.claim('other', '{work}', 1)")
        assert [row["name"] for row in await sql.fetch("select * from penstock.wait_for_places('stopped', '{work}')")] == ["work"]
        async with Workers(app):
            await sql.execute(
                "select penstock.settle($1, $2, $3)", *[[row[name] for row in claimed] for name in ("id", "attempt", "lease")]
            )
            await eventually(lambda: done == 199, "the others")
    assert await sql.fetchval("select count(*) from penstock.place_waiters where worker = 'stopped'") == 0


async def test_the_worker_that_waits_longest_is_offered_the_place(app: Penstock, sql: Sql, url: str) -> None:
    await sql.execute("select penstock.create_job_type('work', '{\"concurrency\": 1}')")
    await sql.execute("select penstock.enqueue('work', to_jsonb(n)) from generate_series(1, 9) as n")

    async def claim(worker: str) -> list[int]:
        return [int(row["data"]) for row in await sql.fetch("select * from penstock.claim($1, '{work}', 5)", worker)]

    async def wait(worker: str) -> bool:
        rows = await sql.fetch("select * from penstock.wait_for_places($1, '{work}')", worker)
        return bool(rows and rows[0]["is_new"])

    async def settle() -> None:
        await sql.execute(
            "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease))"
            " from penstock.queued_jobs where status = 'in-progress'"
        )

    heard: list[str] = []
    listener = await asyncpg.connect(url)
    await listener.add_listener("penstock_second", lambda *said: heard.append(str(said[3])))
    await listener.add_listener("penstock_third", lambda *said: heard.append("third"))
    assert await claim("first") == [1]
    assert (await wait("second"), await wait("third"), await wait("second")) == (True, True, False)
    await settle()
    await eventually(lambda: heard == ["place work"], "the notification of the settle")
    assert await claim("first") == []
    assert await claim("third") == []
    assert await claim("second") == [2]
    await settle()
    assert await claim("second") == []
    assert await claim("third") == [3]
    await settle()
    assert await claim("first") == []
    assert await claim("second") == [4]
    await listener.close()


async def test_a_worker_that_comes_new_waits_for_one_turn_of_each_that_waits_already(app: Penstock, sql: Sql) -> None:
    """Also of one that was granted its places while no other member waited: what it asked for then was the place after these."""
    await sql.execute("select penstock.create_job_type('work', '{\"concurrency\": 1}')")
    await sql.execute("select penstock.enqueue('work', to_jsonb(n)) from generate_series(1, 20) as n")

    async def claim(worker: str) -> list[int]:
        return [int(row["data"]) for row in await sql.fetch("select * from penstock.claim($1, '{work}', 5)", worker)]

    async def wait(worker: str) -> None:
        await sql.fetch("select * from penstock.wait_for_places($1, '{work}')", worker)

    async def settle() -> None:
        await sql.execute(
            "select penstock.settle(array_agg(id), array_agg(attempt), array_agg(lease))"
            " from penstock.queued_jobs where status = 'in-progress'"
        )

    started: list[str] = []

    async def next_turn(*workers: str) -> None:
        """The place is free, and each worker asks for it, the first one first, and waits when it does not get it."""
        await settle()
        for worker in workers:
            if await claim(worker):
                started.append(worker)
            await wait(worker)

    await next_turn("first", "second")
    # The second worker goes away; the first one has all turns.
    await sql.execute("delete from penstock.place_waiters where worker = 'second'")
    for _ in range(3):
        await next_turn("first")
    assert started == ["first"] * 4
    started.clear()
    await wait("second")
    await wait("third")
    for _ in range(7):
        await next_turn("first", "second", "third")
    assert started == ["first", "second", "third", "first", "second", "third", "first"]


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_rate_limit_is_used_up_and_never_passed(url: str, sql: Sql, workers: int) -> None:
    async with AsyncExitStack() as stack:
        each = await processes(stack, url, workers)
        for process in each:

            @process.app.job("work", rate_limit=RateLimit(LIMIT, PERIOD))
            async def handle(job: Job[int], process: Process = process) -> None:
                await process.run(job, 0.0)

        await each[0].app.enqueue_many("work", range(JOBS))
        for process in each:
            await stack.enter_async_context(Workers(process.app))
        await eventually(lambda: sum(each[0].ran.values()) == JOBS, "all jobs")
    await check_rate(sql)


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_rate_limit_of_a_key_is_used_up_and_never_passed(url: str, sql: Sql, workers: int) -> None:
    async with AsyncExitStack() as stack:
        each = await processes(stack, url, workers)
        for process in each:
            pool = process.app.pool("work", slots=4, key_rate=RateLimit(LIMIT, PERIOD))

            @pool.job
            async def handle(job: Job[int], process: Process = process) -> None:
                await process.run(job, 0.0)

        await pool.enqueue_many([("a", n) for n in range(JOBS)])
        for process in each:
            await stack.enter_async_context(Workers(process.app))
        await eventually(lambda: sum(each[0].ran.values()) == JOBS, "all jobs")
    await check_rate(sql)


async def check_rate(sql: Sql) -> None:
    """Never more in a period than the limit, and 0.95 of it at least, by the start times that the database has recorded."""
    await eventually(lambda: archived(sql), "all results")
    at: list[datetime] = [row[0] for row in await sql.fetch("select started_at from penstock.archived_jobs order by started_at")]
    assert [n for n, start in enumerate(at) if n >= LIMIT and start - at[n - LIMIT] < PERIOD] == []
    share = (len(at) - 1) / LIMIT / ((at[-1] - at[0]) / PERIOD)
    assert share >= 0.95, f"places were left idle: {share:.3f} of the limit was used"


async def archived(sql: Sql) -> bool:
    return bool(await sql.fetchval("select count(*) = $1 from penstock.archived_jobs", JOBS))
