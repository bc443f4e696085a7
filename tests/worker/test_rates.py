"""A worker writes what it counted into the rates of its database, and gives each failure its signature."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, Penstock, Settings
from penstock.core.signatures import signature_of
from penstock.jobs import rates
from penstock.testing import running_worker
from penstock.worker.rates import write_rates
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_worker_writes_what_it_counted_when_it_stops(app: Penstock) -> None:
    @app.job("square", max_attempts=1)
    async def square(job: Job[int]) -> None:
        if job.data == 3:
            raise ValueError("three")

    async with running_worker(app):
        await app.enqueue_many("square", range(10))
        await eventually(_archived(app, 10))
        assert await rates.rates_of(await app.database()) == []
    database = await app.database()
    for names in (None, ["square"]):
        for wide in (False, True):
            whole = (await rates.read_period(database, names, wide=wide)).whole
            assert (whole.succeeded, whole.failed, sum(whole.runs), sum(whole.waits)) == (9, 1, 10.0, 10.0)
    (one,) = await rates.type_rates(database)
    assert one.name == "square" and (one.rate.run(0.5) or 0.0) < 1.0
    # What was written is not written again.
    await write_rates(database)
    assert (await rates.read_period(database)).whole.finished == 10


async def test_what_a_program_pulls_is_counted_with_its_times_from_when_it_gets_it(app: Penstock, sql: Sql) -> None:
    pool = app.pool("parcels", int, max_attempts=1)
    await pool.enqueue_many([("a", n) for n in range(3)])
    await sql.execute(
        "update penstock.queued_jobs set created_at = now() - interval '1 hour', run_after = now() - interval '45 s'"
    )
    async with pool.worker() as worker:
        async for job in worker.jobs():
            if job.data == 0:
                await job.ack()
            elif job.data == 1:
                await job.fail("no address")
            else:
                await job.release()
                break
    # The worker writes what it counted when it stops.
    whole = (await rates.read_period(await app.database(), ["parcels"])).whole
    assert (whole.succeeded, whole.failed) == (1, 1)
    assert (sum(whole.waits), sum(whole.runs)) == (2.0, 2.0), "what is released may not have been begun"
    assert whole.wait_s == pytest.approx(90, rel=0.4) and whole.run_s < 40


async def test_without_rates_nothing_is_written(url: str) -> None:
    async with Penstock(url, settings=Settings(rates=False)) as app:

        @app.job("square")
        async def square(job: Job[int]) -> None:
            pass

        async with running_worker(app):
            await app.enqueue("square", 1)
            await eventually(_archived(app, 1))
        assert await rates.rates_of(await app.database()) == []


async def test_a_failure_has_the_signature_of_its_cause_and_the_version_of_the_code(url: str) -> None:
    async with Penstock(url, settings=Settings(code_version="1.7")) as app:

        @app.job("find", max_attempts=1)
        async def find(job: Job[int]) -> None:
            raise ValueError(f"no order {job.data}")

        async with running_worker(app):
            await app.enqueue_many("find", [17, 18])
            await eventually(_archived(app, 2))
        database = await app.database()
        rows = await database.fetch("select signature, errors -> 0 ->> 'version' as version from penstock.archived_jobs")
        assert [tuple(row) for row in rows] == [(signature_of("ValueError", "no order 1"), "1.7")] * 2


def _archived(app: Penstock, number: int):  # type: ignore[no-untyped-def]
    async def archived() -> bool:
        database = await app.database()
        return bool(await database.fetchval("select count(*) = $1 from penstock.archived_jobs", number))

    return archived
