"""Durable steps beside transactions: those of the handler, in which a step is kept, and those of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import psycopg
import pytest

from penstock import Backoff, InvalidInput, Job, JobFailed, Penstock, Retry, Status
from penstock.postgres.database import Database
from penstock.testing import run_due_jobs, running_worker
from penstock.workflows import queries
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = Backoff(base=timedelta(0))
DAY = timedelta(days=1)


def one() -> int:
    return 1


@asynccontextmanager
async def transaction_of(url: str) -> AsyncIterator[Sql]:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            yield connection
    finally:
        await connection.close()


async def test_a_step_in_a_transaction_of_the_handler_is_kept_when_that_commits(app: Penstock, sql: Sql, url: str) -> None:
    await sql.execute("create table payments (job uuid)")
    tries: list[int] = []

    async def charge(connection: Sql, id: UUID) -> int:
        await connection.execute("insert into payments values ($1)", id)
        return 1

    @app.job("order", backoff=AT_ONCE)
    async def order(job: Job[Any]) -> None:
        connection = await asyncpg.connect(url)
        try:
            tries.append(job.attempt)
            if job.attempt == 1:
                # What is rolled back is to be done again, in this run too.
                for _ in range(2):
                    transaction = connection.transaction()
                    await transaction.start()
                    await job.step("pay", charge, connection, job.id, connection=connection)
                    await transaction.rollback()
                raise Retry
            async with connection.transaction():
                await job.step("pay", charge, connection, job.id, connection=connection)
            if job.attempt == 2:
                with pytest.raises(InvalidInput, match="two steps of the name pay"):
                    await job.step("pay", charge, connection, job.id, connection=connection)
                raise Retry
        finally:
            await connection.close()

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert (await status(app, receipt.id), tries) == ("succeeded", [1, 2, 3])
    assert await sql.fetchval("select count(*) from payments") == 1


async def test_a_step_that_is_done_again_after_a_rollback_does_not_read_the_other_steps_again(
    app: Penstock, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    kept_steps = queries.kept_steps

    async def counted(database: Database, ids: Sequence[UUID]) -> Any:
        found = await kept_steps(database, ids)
        reads.append(len(found))
        return found

    monkeypatch.setattr(queries, "kept_steps", counted)

    @app.job("order", backoff=AT_ONCE, max_attempts=2)
    async def order(job: Job[Any]) -> None:
        for n in range(3):
            await job.step(f"part {n}", one)
        if job.attempt == 1:
            raise Retry
        for ends_well in (False, False, True):
            with suppress(ZeroDivisionError):
                async with transaction_of(url) as connection:
                    await job.step("pay", one, connection=connection)
                    if not ends_well:
                        raise ZeroDivisionError

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert await status(app, receipt.id) == "succeeded"
    assert [step.name for step in await app.steps(receipt.id)] == ["part 0", "part 1", "part 2", "pay"]
    assert reads == [0, 3], "once in each run"


async def test_a_step_in_an_open_transaction_of_a_thread_delays_no_settlement(app: Penstock, url: str) -> None:
    """A thread cannot be cancelled: past its time limit it still holds the row of its job."""
    begun, proceed = threading.Event(), threading.Event()
    holding: list[Job[str]] = []

    @app.job("order", backoff=AT_ONCE, time_limit=timedelta(seconds=1))
    def order(job: Job[str]) -> None:
        if job.data != "slow":
            return
        with psycopg.connect(url) as connection:
            job.step_blocking("pay", one, connection=connection)
            # The first attempt whose time sufficed for that.
            if not holding:
                holding.append(job)
                begun.set()
                proceed.wait(60)

    async with running_worker(app):
        try:
            slow = await order.enqueue("slow")
            await eventually(begun.is_set, timeout=60)
            # Its time is over, and the worker settles it without the thread.
            await eventually(lambda: holding[0].cancelled, timeout=60)
            other = await order.enqueue("other")
            assert (await app.wait(other.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
            assert (await app.find(slow.id)).status is Status.IN_PROGRESS
        finally:
            proceed.set()
        record = await app.wait(slow.id, timeout=timedelta(seconds=60))
    assert (record.status, {error["type"] for error in record.errors}) == (Status.SUCCEEDED, {"TimeLimit"})


async def test_what_would_wait_for_an_open_transaction_of_its_own_handler_says_so(
    app: Penstock, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.worker.steps.LONGEST_OPEN_S", 0.1)

    @app.job("order", max_attempts=1)
    async def order(job: Job[str]) -> None:
        async with transaction_of(url) as connection:
            if job.data == "a step behind the finish":
                await job.finish(connection)
            else:
                await job.step("pay", one, connection=connection)
            if job.data == "a sleep":
                await job.sleep("nap", DAY)
            elif job.data == "an extension":
                await job.extend(timedelta(hours=1))
            elif job.data == "none":
                await job.step("ship", one, connection=connection)
            else:
                await job.step("ship", one)
        await job.extend(timedelta(hours=1))
        await job.step("thank", one)

    @app.job("plain", max_attempts=1)
    def plain(job: Job[str]) -> None:
        with psycopg.connect(url) as connection:
            job.step_blocking("pay", one, connection=connection)
            job.sleep_blocking("nap", DAY)

    waiting = [await order.enqueue(name) for name in ("a step", "a step behind the finish", "a sleep")]
    waiting.append(await plain.enqueue(""))
    refused, good = await order.enqueue("an extension"), await order.enqueue("none")
    async with running_worker(app):
        for receipt in waiting:
            with pytest.raises(JobFailed, match="waits for a transaction of its own handler, which is open"):
                await app.wait(receipt.id)
        with pytest.raises(JobFailed, match="is in a transaction that is open"):
            await app.wait(refused.id)
        assert (await app.wait(good.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
    assert [await app.steps(receipt.id) for receipt in (*waiting, refused)] == [[]] * 5
    assert [step.name for step in await app.steps(good.id)] == ["pay", "ship", "thank"]


async def test_a_job_that_another_transaction_has_locked_delays_no_step_of_others(
    app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long that takes: it is none of the handler's own.
    monkeypatch.setattr("penstock.worker.steps.LONGEST_OPEN_S", 0.0)
    begun, go_on = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    @app.job("order")
    async def order(job: Job[str]) -> None:
        if job.data == "locked":
            begun.set()
            await go_on.wait()
        await job.step("pay", calls.append, job.data)
        await job.sleep("no time", timedelta(0))

    async with running_worker(app):
        locked = await order.enqueue("locked")
        await begun.wait()
        async with sql.transaction():
            await sql.execute("select from penstock.queued_jobs where id = $1 for update", locked.id)
            go_on.set()
            await eventually(lambda: calls == ["locked"])
            other = await order.enqueue("other")
            assert (await app.wait(other.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
            assert await app.steps(locked.id) == []
        assert (await app.wait(locked.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
    assert calls == ["locked", "other"]
