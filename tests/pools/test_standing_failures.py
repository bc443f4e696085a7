"""Standing jobs that fail: they start again, and a caller that waits for the start is told why it failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import JobFailed, Penstock, Standing
from penstock.pools.pool import Pool
from tests.pools.standing_runs import Runs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_run_that_fails_is_started_again_later(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    tries = 0

    @pool.standing
    async def run(job: Standing[Any]) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")
        await asyncio.Event().wait()

    async with Workers(app):
        await pool.start("acme")
        await eventually(lambda: tries == 2)
        error = await sql.fetchval("select error ->> 'message' from penstock.standing_jobs")
        assert error == "not yet"


async def test_a_state_that_is_no_json_is_an_error_of_the_run(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs = Runs()

    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        runs.begin(job)
        if runs.starts[job.key] == 1:
            job.state = {"at": object()}
            raise ValueError("at first")
        yield
        runs.running[job.key] -= 1

    async with Workers(app):
        await pool.start("acme")
        failed = "select failures > 0 from penstock.standing_jobs"
        await eventually(lambda: sql.fetchval(failed), "the failure to be recorded")
        assert await sql.fetchval("select error ->> 'type' from penstock.standing_jobs") == "ValueError"
        await sql.execute("update penstock.standing_jobs set retry_at = null")
        await eventually(lambda: runs.starts["acme"] == 2, "the next run")


async def test_start_waits_for_the_start_side_and_says_how_it_failed(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        if job.data == "broken":
            raise ValueError("no such host")
        if job.data == "slow":
            await connected.wait()
        yield

    connected = asyncio.Event()
    with pytest.raises(TimeoutError):
        await pool.start("acme", "fine", timeout=timedelta(milliseconds=50))
    async with Workers(app):
        assert await pool.start("acme", "fine", timeout=timedelta(seconds=30)) == "unchanged"
        assert await pool.start("bolt", "fine", timeout=timedelta(seconds=30)) == "started"
        with pytest.raises(JobFailed, match="standing job cargo of pool tenants failed: ValueError: no such host"):
            await pool.start("cargo", "broken", timeout=timedelta(seconds=30))
        assert await pool.start("cargo", "fine", replace=True, timeout=timedelta(seconds=30)) == "replaced"
        # A worker runs it, and its start side has not ended.
        await pool.start("dock", "slow")
        begun = "select running_by is not null from penstock.standing_jobs where key = 'dock'"
        await eventually(lambda: sql.fetchval(begun), "the beginning of the start side")
        with pytest.raises(TimeoutError):
            await pool.start("dock", "slow", timeout=timedelta(milliseconds=50))
        connected.set()
        assert await pool.start("dock", "slow", timeout=timedelta(seconds=30)) == "unchanged"


async def test_a_worker_without_a_handler_says_why_nothing_runs(url: str) -> None:
    async with Penstock(url) as plain:
        pool = plain.pool("tenants", slots=16)
        async with pool.worker("puller"):
            with pytest.raises(
                JobFailed, match="NoHandler: worker puller owns the key and has no handler for standing jobs of tenants"
            ):
                await pool.start("acme", timeout=timedelta(seconds=30))
            # One that comes later, and one that was there before the worker.
            assert await pool.start("blue") == "starting"

            async def both_said() -> bool:
                return [(job.error or {}).get("type") for job in await pool.standing_jobs()] == ["NoHandler"] * 2

            await eventually(both_said, "the reason for both")
        async with pool.worker("next"):

            async def said_by_the_next() -> bool:
                return all("next" in (job.error or {})["message"] for job in await pool.standing_jobs())

            await eventually(said_by_the_next, "the reason with the new owner")
    async with Penstock(url) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app):
            await eventually(lambda: runs.now == {"acme", "blue"}, "the standing jobs run")
            assert [(job.error, job.failures) for job in await pool.standing_jobs()] == [(None, 0)] * 2
