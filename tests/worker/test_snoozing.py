"""A handler that cannot go on yet puts its job off: no attempt is used up, and others run meanwhile."""

from __future__ import annotations

import asyncio
import pickle
from datetime import timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, InvalidInput, Job, JobFailed, Jobs, Penstock, Retry, Snooze, Status
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)
SOON = timedelta(milliseconds=20)


async def reason(app: Penstock, id: UUID) -> str:
    return (await app.why(id)).reason


async def test_a_snoozed_job_runs_again_and_has_used_no_attempt(app: Penstock) -> None:
    seen: list[tuple[int, int]] = []

    @app.job("fetch", max_attempts=1)
    async def fetch(job: Job[Any]) -> None:
        seen.append((job.attempt, job.snoozes))
        if job.snoozes < 2:
            raise Snooze(SOON)

    async with running_worker(app, at_once=True):
        record = await app.wait((await app.enqueue("fetch")).id)
    assert seen == [(1, 0), (1, 1), (1, 2)]
    assert (record.status, record.attempt, record.max_attempts, record.snoozes) == (Status.SUCCEEDED, 1, 1, 2)
    assert record.errors == []


async def test_a_failure_after_a_snooze_counts_as_the_first(app: Penstock) -> None:
    @app.job("fetch", max_attempts=2, backoff=Backoff(base=SOON))
    def fetch(job: Job[Any]) -> None:
        if job.snoozes == 0:
            raise Snooze(SOON)
        raise ValueError(f"attempt {job.attempt}")

    async with running_worker(app, at_once=True):
        with pytest.raises(JobFailed):
            await app.wait((await app.enqueue("fetch")).id)
    (record,) = await app.find_many(name="fetch")
    assert [error["message"] for error in record.errors] == ["attempt 1", "attempt 2"]
    assert (record.attempt, record.snoozes) == (2, 1)


async def test_a_snoozed_job_says_why_it_waits_and_can_be_run_or_cancelled(app: Penstock) -> None:
    @app.job("fetch")
    async def fetch(job: Job[Any]) -> None:
        if job.snoozes == 0:
            raise Snooze(HOUR)

    first, second = [(await app.enqueue("fetch")).id for _ in range(2)]
    async with running_worker(app, at_once=True):
        for id in (first, second):
            await eventually(lambda id=id: _is(app, id, "snoozed"), "the snooze")
        why = await app.why(first)
        assert why.since is not None and why.until is not None and why.until - why.since == HOUR
        assert "put it off" in why.message
        assert await app.cancel(second) == "cancelled"
        database = await app.database()
        assert await database.fetchval("select penstock.run_now(array[$1::uuid])", first) == first
        await app.wait(first)
    cancelled = await app.find(second)
    assert (cancelled.status, cancelled.attempt, cancelled.snoozes) == (Status.CANCELLED, 0, 1)


async def _is(app: Penstock, id: UUID, wanted: str) -> bool:
    return await reason(app, id) == wanted


async def test_a_snoozed_job_gives_back_its_place(app: Penstock, sql: Sql) -> None:
    done = asyncio.Event()

    @app.job("limited", concurrency=1)
    async def limited(job: Job[Any]) -> None:
        if job.data == "waits":
            raise Snooze(HOUR)
        done.set()

    async with running_worker(app, at_once=True):
        await app.enqueue("limited", "waits")
        await app.enqueue("limited", "runs")
        await asyncio.wait_for(done.wait(), 30)
    assert await sql.fetchval("select coalesce(sum(open_jobs), 0) from penstock.leases") == 0


@pytest.mark.parametrize("on_retry", ["block", "skip"])
async def test_a_snoozed_job_of_a_pool_holds_its_key_unless_the_pool_skips(
    url: str, sql: Sql, on_retry: Literal["block", "skip"]
) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=str, on_retry=on_retry)
    order: list[str] = []

    @pool.job
    async def work(job: Job[str]) -> None:
        order.append(job.data)
        if job.data == "first" and job.snoozes == 0:
            raise Snooze(HOUR)

    async with app:
        first = (await pool.enqueue("acme", "first")).id
        second = (await pool.enqueue("acme", "second")).id
        other = (await pool.enqueue("bolt", "other")).id
        async with running_worker(app, at_once=True):
            await app.wait(other)
            await eventually(lambda: _is(app, first, "snoozed"), "the snooze")
            if on_retry == "skip":
                await app.wait(second)
            else:
                why = await app.why(second)
                assert why.reason == "key-snoozed" and why.by_job == first
                await sql.execute("update penstock.queued_jobs set run_after = now() where id = $1", first)
                await app.wait(second)
                assert [name for name in order if name != "other"] == ["first", "first", "second"]


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
async def test_a_job_that_may_start_only_once_cannot_be_snoozed(app: Penstock, delivery: str) -> None:
    @app.job("charge", delivery=delivery, max_attempts=1)
    async def charge(job: Job[Any]) -> None:
        if job.snoozes == 0:
            raise Snooze(SOON)

    async with running_worker(app, at_once=True):
        id = (await app.enqueue("charge")).id
        if delivery == "at_least_once":
            await app.wait(id)
            return
        with pytest.raises(JobFailed, match="a job of an at_most_once type cannot be snoozed"):
            await app.wait(id)
    record = await app.find(id)
    assert (record.status, record.attempt, record.errors[0]["type"]) == (Status.FAILED, 1, "Snooze")


async def test_a_program_that_pulls_jobs_snoozes_them(app: Penstock) -> None:
    pool = app.pool("fibonacci", int, slots=4)
    await pool.enqueue("a", 1)
    seen: list[tuple[int, int]] = []
    async with pool.worker("my-worker") as worker:
        async for job in worker.jobs():
            seen.append((job.attempt, job.snoozes))
            if job.snoozes:
                await job.ack()
                break
            with pytest.raises(InvalidInput):
                await job.snooze(timedelta(0))
            await job.snooze(SOON)
    assert seen == [(1, 0), (1, 1)]


async def test_a_snooze_in_a_test_leaves_the_job_for_later(app: Penstock) -> None:
    @app.job("fetch")
    async def fetch(job: Job[Any]) -> None:
        raise Snooze(HOUR)

    await app.enqueue("fetch")
    (record,) = await run_due_jobs(app)
    assert (record.status, record.snoozes) == (Status.QUEUED, 1)


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(seconds=-1), timedelta(days=367), 5, None])
def test_a_snooze_lasts_more_than_nothing_and_less_than_a_year(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="cannot snooze for"):
        Snooze(wrong)


@pytest.mark.parametrize("wrong", [timedelta(seconds=-1), timedelta(days=367), timedelta.min, timedelta.max, 5, float("nan")])
def test_a_retry_comes_after_no_time_or_more_and_less_than_a_year(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="cannot retry after"):
        Retry("away", after=wrong)
    assert Retry("away", after=timedelta(0)).after == timedelta(0)


@pytest.mark.parametrize("executor", ["auto", "process"])
@pytest.mark.parametrize("asked", ["retry", "snooze"])
async def test_a_handler_that_asks_for_an_impossible_delay_fails_its_attempt_and_loses_no_job(
    app: Penstock, asked: str, executor: Any
) -> None:
    app.job("fetch", max_attempts=3, backoff=Backoff(base=SOON), executor=executor)(too_soon)
    async with running_worker(app, at_once=True):
        record = await app.wait((await app.enqueue("fetch", asked)).id)
    assert (record.status, record.attempt, record.snoozes) == (Status.SUCCEEDED, 3, 0)
    assert [error["type"] for error in record.errors] == ["InvalidDelay"] * 2
    word = "retry after" if asked == "retry" else "snooze for"
    assert all(error["message"] == f"cannot {word} {timedelta(seconds=-1)!r}" for error in record.errors)


def too_soon(job: Job[str]) -> None:
    if job.attempt < 3:
        raise Retry("away", after=-timedelta(seconds=1)) if job.data == "retry" else Snooze(-timedelta(seconds=1))


async def test_a_settlement_with_an_impossible_delay_is_refused_and_changes_nothing(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("fetch")
    id = (await app.enqueue("fetch")).id
    (claimed,) = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{fetch}', 1)")
    for outcome in ("failed", "snoozed"):
        for delay in (timedelta(seconds=-1), timedelta(days=367)):
            with pytest.raises(asyncpg.PostgresError, match="cannot be retried or snoozed for") as refused:
                await sql.fetch(
                    "select penstock.settle($1, $2, $3, $4, null, $5)",
                    [id],
                    [claimed["attempt"]],
                    [claimed["lease"]],
                    [outcome],
                    [delay],
                )
            assert refused.value.sqlstate == "PS400"
    assert (await app.find(id)).status is Status.IN_PROGRESS


def test_a_snooze_comes_out_of_a_process() -> None:
    assert pickle.loads(pickle.dumps(Snooze(HOUR))).duration == HOUR


async def test_a_worker_in_sql_snoozes_with_a_time(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail")
    job = await sql.fetchrow("select id, attempt, lease, snoozes from penstock.claim('psql', '{mail}', 1)")
    assert job["snoozes"] == 0
    settle = "select outcome from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], '{snoozed}'"
    held = job["id"], job["attempt"], job["lease"]
    with pytest.raises(asyncpg.PostgresError, match="snoozed without a time"):
        await sql.fetch(f"{settle})", *held)
    assert await sql.fetchval(f"{settle}, null, array[interval '1 hour'])", *held) == "snoozed"
    assert await sql.fetchval(f"{settle}, null, array[interval '1 hour'])", *held) == "stale"
    row = await sql.fetchrow("select status::text, attempt, snoozes, run_after - snoozed_at as after from penstock.queued_jobs")
    assert tuple(row) == ("queued", 1, 1, HOUR)


async def test_a_batch_handler_snoozes_some_of_its_jobs(app: Penstock) -> None:
    @app.job("index", max_batch_size=10)
    async def index(jobs: Jobs[int]) -> list[Any]:
        return [Snooze(SOON) if job.data % 2 and not job.snoozes else None for job in jobs]

    async with running_worker(app, at_once=True):
        ids = [receipt.id for receipt in await app.enqueue_many("index", range(6))]
        records = [await app.wait(id) for id in ids]
    assert [(record.attempt, record.snoozes) for record in records] == [(1, 0), (1, 1)] * 3
