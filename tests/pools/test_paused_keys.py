"""A paused key waits, and says so, while all other keys go on."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, Job, NotFound, Penstock
from penstock.jobs.options import Delivery
from penstock.settings import Settings
from penstock.testing import running_worker
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_paused_key_waits_and_says_so_and_goes_on_in_order(app: Penstock, sql: Sql) -> None:
    done: list[tuple[str | None, int]] = []
    pool = app.pool("ledger", slots=4)

    @pool.job
    async def work(job: Job[int]) -> None:
        done.append((job.key, job.data))

    await pool.declare()
    since = await pool.pause_key("acme")
    assert await pool.pause_key("acme") == since
    async with Workers(app):
        waiting = await pool.enqueue_many([("acme", n) for n in range(5)])
        await pool.enqueue_many([("bolt", n) for n in range(100)])
        await eventually(lambda: len(done) == 100, "the jobs of the other key")
        assert {key for key, _ in done} == {"bolt"}
        for receipt in waiting:
            why = await app.why(receipt.id)
            assert (why.reason, why.since) == ("paused-key", since)
            assert "penstock pools resume-key ledger acme" in why.message
        state = await pool.state("acme")
        assert (state.paused_at, state.ready, state.next_job) == (since, 5, waiting[0].id)
        assert state.why is not None and state.why.reason == "paused-key"
        assert [(key.key, key.paused_at, key.jobs) for key in await pool.paused_keys()] == [("acme", since, 5)]
        assert await pool.paused_keys(after="acme") == []
        # No advice to start workers for jobs that no worker may run.
        assert await sql.fetchval("select oldest_ready_s from penstock.load_of_types() where name = 'ledger'") is None
        assert await pool.resume_key("acme")
        assert not await pool.resume_key("acme")
        await eventually(lambda: len(done) == 105, "the jobs of the key")
    assert done[100:] == [("acme", n) for n in range(5)]
    assert (await pool.state("acme")).paused_at is None
    assert await sql.fetchval("select keys_paused from penstock.pools") is False


async def test_jobs_that_were_claimed_ahead_go_back_to_their_places(app: Penstock, sql: Sql) -> None:
    done: list[int] = []
    release = asyncio.Event()
    pool = app.pool("ledger", slots=4)

    @pool.job
    async def work(job: Job[int]) -> None:
        if job.data == 0:
            await release.wait()
        done.append(job.data)

    async with running_worker(app):
        await pool.set_weight("acme", 10)
        await pool.enqueue_many([("acme", n) for n in range(50)])

        async def claimed_ahead() -> bool:
            return bool(await sql.fetchval("select count(*) > 1 from penstock.queued_jobs where status = 'in-progress'"))

        await eventually(claimed_ahead, "jobs to be claimed ahead")
        await pool.pause_key("acme")

        async def released() -> bool:
            return bool(await sql.fetchval("select count(*) = 1 from penstock.queued_jobs where status = 'in-progress'"))

        await eventually(released, "what has not started to be released")
        state = await pool.state("acme")
        assert ([job.attempt for job in state.running], state.ready) == ([1], 49)
        release.set()
        await eventually(lambda: done == [0], "the running job to finish")
        await pool.resume_key("acme")
        await eventually(lambda: len(done) == 50, "all jobs")
    assert done == list(range(50))
    assert await sql.fetchval("select bool_and(attempt = 1) from penstock.archived_jobs")


async def test_a_lost_notification_is_made_up_for(url: str, sql: Sql) -> None:
    app = Penstock(url, settings=Settings(heartbeat_interval=timedelta(milliseconds=200)))
    release = asyncio.Event()
    pool = app.pool("ledger", slots=1)

    @pool.job
    async def work(job: Job[int]) -> None:
        await release.wait()

    async with app, running_worker(app):
        await pool.set_weight("acme", 10)
        await pool.enqueue_many([("acme", n) for n in range(5)])

        async def held() -> int:
            return int(await sql.fetchval("select count(*) from penstock.queued_jobs where status = 'in-progress'"))

        async def claimed() -> bool:
            return await held() == 5

        await eventually(claimed, "all jobs to be claimed")
        # As pause_key does, without its notification.
        await sql.execute("insert into penstock.paused_keys values ('ledger', 'acme', now())")
        await sql.execute("update penstock.pools set keys_paused = true")

        async def released() -> bool:
            return await held() == 1

        await eventually(released, "what has not started to be released")
        release.set()


async def test_a_pause_outlives_restarts_and_a_job_that_waits_alone(url: str, sql: Sql) -> None:
    async with Penstock(url) as app:
        pool = app.pool("ledger", slots=1, delivery=Delivery.AT_LEAST_ONCE)
        await pool.declare()
        await pool.pause_key("acme")
        job = await pool.enqueue("acme", 1)
        await sql.execute(
            "update penstock.queued_jobs set crashes = 2, run_after = penstock.isolation_time() where id = $1", job.id
        )
    async with Penstock(url) as app:
        found = await app.find_pool("ledger")
        assert (await found.state("acme")).paused_at is not None
        assert not await sql.fetchval("select penstock.has_isolated_jobs('{ledger}')")
        await sql.execute("select penstock.join_group('ledger', 'm', gen_random_uuid())")
        await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
        alone = "select id from penstock.claim_alone('m', '{ledger}', '{0}', '{1}')"
        assert await sql.fetch(alone) == []
        await found.resume_key("acme")
        assert await sql.fetchval("select penstock.has_isolated_jobs('{ledger}')")
        assert [row["id"] for row in await sql.fetch(alone)] == [job.id]


async def test_what_cannot_be_paused_is_refused(app: Penstock) -> None:
    pool = app.pool("ledger")
    with pytest.raises(NotFound):
        await pool.pause_key("acme")
    await pool.declare()
    for key in ("", "\n", "x" * 256):
        with pytest.raises(InvalidInput, match="invalid key"):
            await pool.pause_key(key)


async def test_jobs_of_a_pool_are_listed_by_key_and_page(app: Penstock, sql: Sql) -> None:
    pool = app.pool("ledger", slots=8)
    keys = [f"k{n}" for n in range(10)]
    expected: dict[str, list[Any]] = {}
    for key in keys:
        receipts = await pool.enqueue_many([(key, n) for n in range(5)])
        expected[key] = [receipt.id for receipt in receipts]
    later = await pool.enqueue("k3", 9, run_after=timedelta(hours=1))
    expected["k3"].append(later.id)
    found = []
    after = None
    while page := await pool.list(after=after, limit=7):
        found += page
        after = page[-1].cursor
    assert len(found) == 51
    assert [job.key for job in found[:50]] == [key for key in dict.fromkeys(job.key for job in found) for _ in range(5)]
    for key in keys:
        assert [job.id for job in found if job.key == key] == expected[key]
        assert [job.id for job in await pool.list(key=key)] == expected[key]
    in_parts = []
    after = None
    while page := await pool.list(key="k3", after=after, limit=1):
        in_parts += page
        after = page[-1].cursor
    assert [job.id for job in in_parts] == expected["k3"]
    assert (await pool.state("k3")).deferred == 1
    await sql.execute("select penstock.join_group('ledger', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    claim = "select * from penstock.claim_keys('m', 'ledger', '{0,1,2,3,4,5,6,7}', '{1,1,1,1,1,1,1,1}', 10, 1)"
    assert len(await sql.fetch(claim)) == 11
    running = [job for job in await pool.list() if job.status == "in-progress"]
    assert sorted(job.key for job in running) == keys
    assert all((job.worker, job.started_at is not None, job.attempt) == ("m", True, 1) for job in running)
    state = await pool.state("k3")
    assert [(job.id, job.worker) for job in state.running] == [(expected["k3"][0], "m")]
    assert await pool.list(key="nobody") == []
    for cursor in ("x", "q1", "d1:a"):
        with pytest.raises(InvalidInput, match="invalid cursor"):
            await pool.list(after=cursor)
