"""Jobs with a number of attempts and a time limit of their own, in place of those of their type."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import Backoff, InvalidInput, Job, JobFailed, NewJob, Penstock, Status
from penstock.testing import running_worker

Sql: TypeAlias = "asyncpg.Connection[Any]"
QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))


async def test_a_job_has_the_attempts_that_it_was_given(app: Penstock) -> None:
    seen: list[tuple[int, int, int]] = []

    @app.job("resize", max_attempts=2, backoff=QUICK)
    async def resize(job: Job[int]) -> None:
        seen.append((job.data, job.attempt, job.max_attempts))
        raise ValueError("no")

    async with running_worker(app, at_once=True):
        ids = [
            (await resize.options(max_attempts=1).enqueue(1)).id,
            (await resize.enqueue(2)).id,
            (await app.enqueue("resize", 3, max_attempts=3)).id,
        ]
        for id in ids:
            with pytest.raises(JobFailed):
                await app.wait(id)
    assert sorted(seen) == [(1, 1, 1), (2, 1, 2), (2, 2, 2), (3, 1, 3), (3, 2, 3), (3, 3, 3)]


async def test_the_handler_of_a_job_runs_as_long_as_the_job_says(app: Penstock) -> None:
    stopped: list[str] = []

    @app.job("resize", time_limit=timedelta(minutes=4), max_attempts=1)
    async def resize(job: Job[Any]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append("loop")
            raise

    @app.job("render", max_attempts=1)
    def render(job: Job[Any]) -> None:
        while not job.cancelled:
            time.sleep(0.01)
        stopped.append("thread")

    async with running_worker(app, at_once=True):
        for declared in (resize, render):
            id = (await declared.options(time_limit=timedelta(milliseconds=100)).enqueue({})).id
            with pytest.raises(JobFailed, match="time limit"):
                await app.wait(id)
            assert (await app.find(id)).time_limit == timedelta(milliseconds=100)
    assert stopped == ["loop", "thread"]


async def test_a_job_of_a_pool_has_them_too(url: str) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=int, max_attempts=4, backoff=QUICK)

    @pool.job
    async def work(job: Job[int]) -> None:
        if job.data == 1:
            await asyncio.sleep(60)

    async with app, running_worker(app, at_once=True):
        slow = await pool.enqueue("acme", 1, max_attempts=1, time_limit=timedelta(milliseconds=50))
        behind = await pool.enqueue("acme", 2)
        await app.wait(behind.id)
        record = await app.find(slow.id)
    assert (record.status, record.attempt, record.max_attempts) == (Status.FAILED, 1, 1)


async def test_they_travel_through_every_way_to_enqueue(app: Penstock, url: str, sql: Sql) -> None:
    resize = app.job_type("resize", payload=int)
    limit = timedelta(seconds=7)
    call = resize.options(max_attempts=9, time_limit=limit)
    await resize.enqueue_many([call.new(1), resize.new(2), NewJob(3, time_limit=limit), 4])
    await resize.options(max_attempts=9, time_limit=limit, run_after=timedelta(0)).enqueue(5)
    async with sql.transaction():
        await resize.options(max_attempts=9, connection=sql).enqueue(6)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await resize.options(max_attempts=9, time_limit=limit, connection=connection).enqueue(7)
    await sql.execute("select penstock.enqueue('resize', '8', p_max_attempts => 9, p_time_limit => '7 s')")
    await sql.execute("""select penstock.enqueue_json('resize', '[{"data": 9, "max_attempts": 9, "time_limit": "7 seconds"}]')""")
    rows = await sql.fetch(
        "select data::int, max_attempts, (options ->> 'time_limit')::float8 as time_limit"
        " from penstock.queued_jobs order by data::int"
    )
    assert [tuple(row) for row in rows] == [
        (1, 9, 7.0), (2, 5, None), (3, 5, 7.0), (4, 5, None), (5, 9, 7.0), (6, 9, None), (7, 9, 7.0), (8, 9, 7.0), (9, 9, 7.0),
    ]  # fmt: skip
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where options is null") == 2


async def test_a_replay_has_the_options_of_its_job(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("resize", max_attempts=5)
    id = (await app.enqueue("resize", max_attempts=1, time_limit=timedelta(seconds=7))).id
    await app.cancel(id)
    copy = await app.find((await app.replay(id)).id)
    assert (copy.max_attempts, copy.time_limit, copy.attempt) == (1, timedelta(seconds=7), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts of a job must be an integer from 1 to 32,767, not 0"),
        ({"max_attempts": 2.5}, "max_attempts of a job"),
        ({"max_attempts": 40_000}, "max_attempts of a job"),
        ({"time_limit": 5}, "time_limit of a job must be a span of time, not 5"),
        ({"time_limit": timedelta(0)}, "time_limit of a job must be a span of time"),
        ({"time_limit": timedelta(days=31)}, "time_limit of a job must be at most 30 days"),
    ],
)
async def test_what_no_job_can_have_is_refused(app: Penstock, options: dict[str, Any], message: str) -> None:
    await app.create_job_type("resize")
    with pytest.raises(InvalidInput, match=message):
        await app.enqueue("resize", **options)
    assert await app.find_many(name="resize") == []


@pytest.mark.parametrize(
    "document",
    ['{"max_attempts": 0}', '{"max_attempts": 1.5}', '{"max_attempts": "many"}', '{"time_limit": "soon"}', '{"time_limit": -1}',
     '{"time_limit": "40 days"}', '{"attempts": 3}', '[]', '3'],
)  # fmt: skip
async def test_sql_refuses_it_too(app: Penstock, sql: Sql, document: str) -> None:
    await app.create_job_type("resize")
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.execute("select penstock.enqueue_many('resize', array['1'::jsonb], p_options => array[$1::jsonb])", document)
    assert refused.value.sqlstate == "PS400"


async def test_a_job_that_may_start_only_once_has_one_attempt(app: Penstock) -> None:
    await app.create_job_type("charge", delivery_strategy="at_most_once")
    await app.enqueue("charge", max_attempts=1)
    with pytest.raises(InvalidInput, match="a job of an at_most_once type has 1 attempt, not 2"):
        await app.enqueue("charge", max_attempts=2)


async def test_an_option_that_no_job_has_is_refused_with_the_nearest_one(app: Penstock) -> None:
    resize, bolts = app.job_type("resize"), app.pool("bolts")
    wrong: Any = {"max_attempt": 3}
    for call in (lambda: resize.options(**wrong), lambda: app.enqueue("resize", **wrong), lambda: bolts.enqueue("acme", **wrong)):
        with pytest.raises(InvalidInput, match=r"has no option max_attempt \(it was given 3\)") as refused:
            await call()
        assert refused.value.hint == "Did you mean 'max_attempts'?"
