"""Durable steps: results that are kept over attempts, in workers and from every way to call them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, Conflict, InvalidInput, Job, NotFound, Penstock, Retry, Status
from penstock.jobs.models import make_id
from penstock.postgres.database import Database
from penstock.testing import advance, run_due_jobs, running_worker
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = Backoff(base=timedelta(0))


@dataclass
class Payment:
    id: int
    cents: int


@dataclass
class Approval:
    by: str


async def test_a_retry_goes_on_behind_the_last_step_that_was_kept(app: Penstock) -> None:
    calls: list[str] = []

    async def charge(cents: int) -> Payment:
        calls.append("charge")
        return Payment(7, cents)

    def number() -> int:
        calls.append("number")
        return 12

    @app.job("order", backoff=AT_ONCE, keep_result=True)
    async def order(job: Job[int]) -> str:
        paid = await job.step("pay", charge, job.data)
        invoice = await job.step("invoice", number)
        if job.attempt < 3:
            raise Retry("the mail server is away")
        return f"{paid!r} {invoice}"

    receipt = await order.enqueue(500)
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, record.attempt, record.result) == (Status.SUCCEEDED, 3, "Payment(id=7, cents=500) 12")
    assert calls == ["charge", "number"]
    assert [(step.name, step.kind, step.result) for step in await app.steps(receipt.id)] == [
        ("pay", "step", {"id": 7, "cents": 500}),
        ("invoice", "step", 12),
    ]


async def test_a_step_that_fails_is_done_again(app: Penstock) -> None:
    calls: list[int] = []

    async def flaky() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError

    @app.job("order", backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        try:
            await job.step("pay", flaky)
        except ConnectionError:
            # In the same run, too.
            await job.step("pay", flaky)

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert (await status(app, receipt.id), len(calls)) == ("succeeded", 3)
    assert [step.result for step in await app.steps(receipt.id)] == [None]


async def test_a_replay_starts_from_the_beginning(app: Penstock) -> None:
    calls: list[UUID] = []

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.step("pay", calls.append, job.id)

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    copy = await app.replay(receipt.id)
    await run_due_jobs(app)
    assert calls == [receipt.id, copy.id]


async def test_a_worker_that_lost_the_job_keeps_no_step(app: Penstock, sql: Sql) -> None:
    raised: list[BaseException] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> str:
        begun.set()
        await go_on.wait()
        return "late"

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        try:
            await job.step("pay", slow)
        except Conflict as error:
            raised.append(error)
            raise

    async with running_worker(app, at_once=True):
        receipt = await order.enqueue({})
        await begun.wait()
        await app.pause("order")
        await sql.execute("update penstock.leases set expires_at = now() - interval '1 second'")
        await sql.fetchval("select penstock.recover()")
        go_on.set()
        await eventually(lambda: bool(raised))
    assert "no longer belongs to this worker" in str(raised[0])
    assert await app.steps(receipt.id) == []


async def test_a_plain_handler_has_the_blocking_steps(app: Penstock, sql: Sql) -> None:
    calls: list[str] = []

    @app.job("child", keep_result=True)
    def child(number: int) -> int:
        return number * 2

    @app.job("order", keep_result=True)
    def order(job: Job[Any]) -> Any:
        def charge(cents: int) -> Payment:
            calls.append("charge")
            return Payment(1, cents)

        paid = job.step_blocking("pay", charge, 500)
        job.sleep_blocking("cool off", timedelta(days=3))
        answer = job.wait_for_blocking("approved", Approval)
        parts = job.gather_blocking("parts", [child.child(number) for number in range(3)])
        return [paid.cents, answer.by, parts]

    receipt = await order.enqueue({})
    assert app.sync.signal(receipt.id, "approved", Approval("ada"))
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "waiting"
    await advance(app, timedelta(days=3))
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, record.result, calls) == (Status.SUCCEEDED, [500, "ada", [0, 2, 4]], ["charge"])


async def test_a_task_group_of_the_handler_suspends_the_job(app: Penstock) -> None:
    done: list[str] = []

    @app.job("order", backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(job.step("a", done.append, "a"))
            group.create_task(job.wait_for("approved"))

    receipt = await order.enqueue({})
    await app.signal(receipt.id, "unrelated")
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "waiting"
    await app.signal(receipt.id, "approved")
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "succeeded"


def range_of(most: int) -> list[int]:
    return [number % 10 for number in range(most)]


async def test_a_result_is_as_long_as_its_text(app: Penstock) -> None:
    """Stored as jsonb, small numbers are several times as long."""

    @app.job("order", max_attempts=1)
    async def order(job: Job[Any]) -> None:
        assert await job.step("count", range_of, 50_000) == await job.wait_for("numbers")

    receipt = await order.enqueue({})
    await app.signal(receipt.id, "numbers", range_of(50_000))
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "succeeded"


async def test_a_further_run_reads_many_and_large_results_in_parts(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,500 small results, some pages of them, and 40 of 200 KiB, each when the handler comes to it."""
    read, done = [], []
    fetch = Database.fetch

    async def noting(self: Database, statement: str, *args: Any, **options: Any) -> Any:
        rows = await fetch(self, statement, *args, **options)
        if "penstock.kept_" in statement:
            read.append(sum(len(row["result"] or "") for row in rows))
        return rows

    monkeypatch.setattr(Database, "fetch", noting)

    @app.job("order", backoff=AT_ONCE, keep_result=True)
    async def order(job: Job[Any]) -> int:
        def value(size: int) -> str:
            done.append(size)
            return "x" * size

        await job.step("first", value, 1)
        small = await asyncio.gather(*(job.step(f"small {n}", value, 100) for n in range(2_500)))
        large = await asyncio.gather(*(job.step(f"large {n}", value, 200 * 1024) for n in range(40)))
        if job.attempt == 1:
            read.clear()
            raise ValueError("again")
        return len("".join(small)) + len("".join(large))

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert (await app.find(receipt.id)).result == 2_500 * 100 + 40 * 200 * 1024
    assert len(done) == 2_541
    assert len(read) >= 5, "it was read in one part"
    assert max(read) <= 32 * 257 * 1024, "one statement read too much"


async def test_a_run_has_no_more_steps_than_a_job_can_read(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.steps.MOST_STEPS", 3)

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        for number in range(4):
            await job.step(f"count {number}", range_of, 1)

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, record.attempt) == (Status.FAILED, 1) and "has more than 3 steps" in record.errors[-1]["message"]


async def test_the_steps_of_a_job_say_what_became_of_each(app: Penstock) -> None:
    @app.job("child", keep_result=True)
    async def child(job: Job[int]) -> int:
        return job.data

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.step("pay", lambda: {"id": 7})
        with suppress(TimeoutError):
            await job.wait_for("refund", str, timeout=timedelta(0))
        await job.gather("parts", [child.child(1), child.child(2)])
        await job.sleep("cool off", timedelta(days=3))
        await job.wait_for("approved", str)

    receipt = await order.enqueue({})
    await app.signal(receipt.id, "approved", "by ada")

    async def states() -> dict[str, tuple[str, int | None]]:
        return {step.name: (step.state, step.size) for step in await app.steps(receipt.id)}

    await run_due_jobs(app)
    until_slept: dict[str, tuple[str, int | None]] = {
        "pay": ("done", len('{"id": 7}')), "refund": ("timed-out", None), "parts": ("done", len("[1, 2]")),
    }  # fmt: skip
    early = ("early", len('"by ada"'))
    assert await states() == {**until_slept, "cool off": ("waiting", None), "approved": early}
    await advance(app, timedelta(days=3))
    await run_due_jobs(app)
    assert await states() == {**until_slept, "cool off": ("done", None), "approved": ("done", len('"by ada"'))}


async def test_a_step_that_was_begun_and_is_not_waited_for_is_told_from_one_for_which_the_job_is_suspended(app: Penstock) -> None:
    @app.job("order", backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        await job.wait_for("approved", str)

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert [step.state for step in await app.steps(receipt.id)] == ["waiting"]
    await app.cancel(receipt.id)
    assert [step.state for step in await app.steps(receipt.id)] == ["begun"]


async def test_steps_come_in_pages_each_once_and_in_their_order(app: Penstock) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        for n in range(5):
            await job.step(f"part {n}", lambda n=n: n)
        await job.wait_for("approved", str)

    receipt = await order.enqueue({})
    # A signal for which the job does not wait may have the name of a step.
    await app.signal(receipt.id, "part 2", "early")
    await run_due_jobs(app)
    whole = await app.steps(receipt.id)
    assert sorted((step.name, step.kind) for step in whole) == sorted(
        [*((f"part {n}", "step") for n in range(5)), ("part 2", "signal"), ("approved", "wait")]
    )
    for limit in (1, 2, 3, 7):
        pages, after = [], None
        while page := await app.steps(receipt.id, after=after, limit=limit):
            assert len(page) <= limit
            pages += page
            after = page[-1].cursor
        assert pages == whole
    for wrong in ("x", "17:step:", "17:stop:a", "1" * 30 + ":step:a"):
        with pytest.raises(InvalidInput, match="invalid cursor"):
            await app.steps(receipt.id, after=wrong)
    for limit in (0, 1_001):
        with pytest.raises(InvalidInput, match="limit"):
            await app.steps(receipt.id, limit=limit)


async def test_unknown_jobs_have_no_steps_and_take_no_signals(app: Penstock) -> None:
    assert await app.steps(make_id()) == []
    with pytest.raises(NotFound, match="no such job"):
        await app.signal(make_id(), "approved")
