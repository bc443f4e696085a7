"""Sleeps and waits for signals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, Conflict, InvalidInput, Job, Penstock, Retry, Status
from penstock.testing import advance, run_due_jobs, running_worker
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = Backoff(base=timedelta(0))
DAY = timedelta(days=1)


@dataclass
class Approval:
    by: str


async def test_a_sleep_lasts_its_time_and_uses_no_attempt_and_no_place(app: Penstock, sql: Sql) -> None:
    runs: list[int] = []

    @app.job("order", concurrency=1, max_attempts=1)
    async def order(job: Job[Any]) -> None:
        runs.append(job.attempt)
        await job.sleep("cool off", timedelta(hours=2))
        await job.sleep("no time", timedelta(0))

    first, second = await order.enqueue({}), await order.enqueue({})
    await run_due_jobs(app)
    assert runs == [1, 1]
    record = await app.find(first.id)
    assert (record.status, record.attempt) == (Status.WAITING, 1)
    assert (await app.why(first.id)).reason == "sleep"
    assert await sql.fetchval("select count(*) from penstock.leases") == 0
    assert [(each.waiting, each.deferred, each.ready) for each in await app.counts()] == [(2, 0, 0)]
    assert {job.id for job in await app.find_many(status="waiting")} == {first.id, second.id}
    assert await app.find_many(status="queued") == []
    await advance(app, timedelta(hours=1))
    await run_due_jobs(app)
    assert runs == [1, 1]
    await advance(app, timedelta(hours=1))
    await run_due_jobs(app)
    assert (runs, await status(app, first.id)) == ([1, 1, 1, 1], "succeeded")


async def test_a_worker_goes_on_with_a_job_at_its_signal_and_at_the_end_of_a_sleep(app: Penstock) -> None:
    @app.job("order", keep_result=True)
    async def order(job: Job[Any]) -> str:
        await job.sleep("a moment", timedelta(milliseconds=50))
        return (await job.wait_for("approved", Approval)).by

    async with running_worker(app):
        receipt = await order.enqueue({})
        await eventually(lambda: _waits_for(app, receipt.id, "signal"))
        assert await app.signal(receipt.id, "approved", Approval("ada"))
        assert (await app.wait(receipt.id)).result == "ada"


async def _waits_for(app: Penstock, id: UUID, reason: str) -> bool:
    return (await app.why(id)).reason == reason


@pytest.mark.parametrize("when", ["before the start", "while it waits"])
async def test_the_first_signal_counts_whenever_it_comes(app: Penstock, when: str) -> None:
    got: list[Any] = []

    @app.job("order", backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        got.append(await job.wait_for("approved"))
        if job.attempt == 1:
            raise Retry("once more, with the same signal")

    receipt = await order.enqueue({})
    if when == "while it waits":
        await run_due_jobs(app)
        assert await status(app, receipt.id) == "waiting"
    assert [await app.signal(receipt.id, "approved", value) for value in ("first", "second")] == [True, False]
    assert await app.signal(receipt.id, "another")
    await run_due_jobs(app)
    assert (got, await status(app, receipt.id)) == (["first", "first"], "succeeded")
    # A repeated call is told, and nothing more.
    assert not await app.signal(receipt.id, "approved", "late")
    with pytest.raises(Conflict, match="has ended: succeeded"):
        await app.signal(receipt.id, "again")


@pytest.mark.parametrize("name", [5, None, b"approved", "a\0b", "\ud800"])
async def test_the_name_of_a_signal_is_text(app: Penstock, name: Any) -> None:
    await app.create_job_type("order")
    receipt = await app.enqueue("order", {})
    with pytest.raises(InvalidInput, match="name of a signal"):
        await app.signal(receipt.id, name, 1)
    assert await app.signal(receipt.id, "approved", 1)


async def test_a_signal_in_a_transaction_counts_when_that_commits(app: Penstock, sql: Sql) -> None:
    @app.job("order", keep_result=True)
    async def order(job: Job[Any]) -> Any:
        return await job.wait_for("approved")

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    transaction = sql.transaction()
    await transaction.start()
    assert await app.signal(receipt.id, "approved", 1, connection=sql)
    await transaction.rollback()
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "waiting"
    async with sql.transaction():
        assert await app.signal(receipt.id, "approved", 2, connection=sql)
        await run_due_jobs(app)
        assert await status(app, receipt.id) == "waiting"
    await run_due_jobs(app)
    assert (await app.find(receipt.id)).result == 2


async def test_a_wait_that_times_out_refuses_the_signal_in_every_further_run(app: Penstock) -> None:
    late: list[bool] = []

    @app.job("order", backoff=AT_ONCE, max_attempts=2)
    async def order(job: Job[Any]) -> None:
        try:
            await job.wait_for("approved", timeout=DAY)
        except TimeoutError:
            late.append(await app.signal(job.id, "approved", "too late"))
            raise

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert (await app.why(receipt.id)).until is not None
    await advance(app, DAY)
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, late, record.errors[-1]["type"]) == (Status.FAILED, [False, False], "TimeoutError")
    assert [(step.kind, step.timed_out) for step in await app.steps(receipt.id)] == [("wait", True)]


async def test_a_timeout_does_not_wait_for_a_signal_whose_transaction_stays_open_and_one_of_them_counts(
    app: Penstock, sql: Sql
) -> None:
    got: list[Any] = []

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        got.append(await job.wait_for("approved", timeout=DAY))

    receipt, other = await order.enqueue({}), await order.enqueue({})
    await run_due_jobs(app)
    await advance(app, DAY)
    async with sql.transaction():
        assert await app.signal(receipt.id, "approved", "in time", connection=sql)
        async with running_worker(app, at_once=True):
            await eventually(lambda: _has_timed_out(app, other.id))
        assert got == []
    await advance(app, timedelta(seconds=1))
    await run_due_jobs(app)
    assert (got, await status(app, receipt.id)) == (["in time"], "succeeded")


async def _has_timed_out(app: Penstock, id: UUID) -> bool:
    return any(step.timed_out for step in await app.steps(id))


async def _except_base_exception(job: Job[Any]) -> None:
    with suppress(BaseException):
        await job.sleep("nap", DAY)


async def _return_in_finally(job: Job[Any]) -> None:
    try:
        await job.wait_for("nap", timeout=DAY)
    finally:
        return  # noqa: B012


async def _gather_with_exceptions(job: Job[Any]) -> None:
    await asyncio.gather(job.sleep("nap", DAY), return_exceptions=True)


async def _wait_for_tasks(job: Job[Any]) -> None:
    await asyncio.wait([asyncio.create_task(job.sleep("nap", DAY))])


async def _another_step_behind_it(job: Job[Any]) -> None:
    await asyncio.gather(job.sleep("nap", DAY), return_exceptions=True)
    await job.step("pay", int)


def _in_a_thread(job: Job[Any]) -> None:
    thread = threading.Thread(target=lambda: _except_base_exception_blocking(job))
    thread.start()
    thread.join()


def _except_base_exception_blocking(job: Job[Any]) -> None:
    with suppress(BaseException):
        job.sleep_blocking("nap", DAY)


CATCHING: list[Callable[[Job[Any]], Awaitable[None] | None]] = [
    _except_base_exception,
    _return_in_finally,
    _gather_with_exceptions,
    _wait_for_tasks,
    _another_step_behind_it,
    _in_a_thread,
    _except_base_exception_blocking,
]


@pytest.mark.parametrize("handler", CATCHING)
async def test_a_handler_that_catches_its_suspension_and_returns_has_failed(
    app: Penstock, handler: Callable[[Job[Any]], Any]
) -> None:
    app.job("order", max_attempts=1)(handler)
    receipt = await app.enqueue("order")
    [record] = await run_due_jobs(app)
    assert (record.id, record.status) == (receipt.id, "failed")
    assert record.errors[0]["type"] == "SuspensionCaught"
    assert "the step nap had not ended: it caught Suspended" in record.errors[0]["message"]


async def test_an_attempt_behind_a_caught_suspension_waits_for_the_rest_of_its_time(app: Penstock) -> None:
    catches = [True]

    @app.job("order", max_attempts=2, backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        await asyncio.gather(job.sleep("nap", DAY), return_exceptions=catches.pop() if catches else False)

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "waiting"
    await advance(app, DAY)
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, record.attempt) == ("succeeded", 2)
