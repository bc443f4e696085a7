"""A handler ends its job in its own transaction: exactly once, together with its effects."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from penstock import Backoff, Conflict, InvalidInput, Job, Jobs, NewJob, Penstock, Status
from penstock.testing import run_due_jobs, run_job, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
Transaction: TypeAlias = Callable[[str], Any]
QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=10))
EFFECT = "insert into effects select 'done' where true"


class Undo(Exception):
    """Rolls a transaction back."""


@asynccontextmanager
async def asyncpg_transaction(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(EFFECT)
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def repeatable_transaction(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.execute(EFFECT)
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def psycopg_transaction(url: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute("insert into effects values ('done')")
        yield connection


@asynccontextmanager
async def session_transaction(url: str) -> AsyncIterator[Any]:
    from sqlalchemy import text

    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with AsyncSession(engine) as session, session.begin():
            await session.execute(text("insert into effects values ('done')"))
            yield session
    finally:
        await engine.dispose()


@pytest.fixture(autouse=True)
async def effects(sql: Sql) -> Callable[[], Awaitable[int]]:
    """A table of effects, and how many there are."""
    await sql.execute("create table effects (what text)")

    async def count() -> int:
        return int(await sql.fetchval("select count(*) from effects"))

    return count


@pytest.fixture(autouse=True)
async def nothing_is_left(sql: Sql) -> AsyncIterator[None]:
    """No lease counts a job that has ended."""
    yield
    counted = await sql.fetchval("select coalesce(sum(open_jobs), 0) from penstock.leases")
    held = await sql.fetchval("select count(*) from penstock.queued_jobs where status = 'in-progress'")
    unfolded = await sql.fetchval("select count(*) from penstock.finished_jobs")
    assert (counted, unfolded) == (held, 0)


@pytest.mark.parametrize("transaction", [asyncpg_transaction, repeatable_transaction, psycopg_transaction, session_transaction])
async def test_a_job_ends_with_the_commit_of_its_handler(
    url: str, app: Penstock, effects: Callable[[], Awaitable[int]], transaction: Transaction
) -> None:
    @app.job
    async def book(job: Job[str]) -> str:
        async with transaction(url) as connection:
            job.log("booked")
            await job.finish(connection, result={"booked": job.data})
            assert (await app.find(job.id)).status is Status.IN_PROGRESS
        assert (await app.find(job.id)).status is Status.SUCCEEDED
        return "ignored"

    receipt = await app.enqueue("book", "order")
    (record,) = await run_due_jobs(app)
    assert (record.id, record.status, record.attempt, record.result) == (receipt.id, Status.SUCCEEDED, 1, {"booked": "order"})
    assert [line.line for line in record.log] == ["booked"]
    assert record.started_at is not None and record.worker is not None
    assert await effects() == 1


@pytest.mark.parametrize("transaction", [asyncpg_transaction, psycopg_transaction, session_transaction])
async def test_a_rollback_means_that_the_job_is_not_finished_and_is_retried(
    url: str, app: Penstock, effects: Callable[[], Awaitable[int]], transaction: Transaction
) -> None:
    @app.job(backoff=QUICK)
    async def book(job: Job[Any]) -> None:
        try:
            async with transaction(url) as connection:
                job.log(f"attempt {job.attempt}")
                await job.finish(connection)
                if job.attempt == 1:
                    raise Undo
        except Undo:
            return

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
    assert (record.status, record.attempt) == (Status.SUCCEEDED, 2)
    assert [error["type"] for error in record.errors] == ["NotCommitted"]
    assert await effects() == 1
    assert [line.line for line in (await app.find(receipt.id)).log] == ["attempt 1", "attempt 2"]


async def test_after_the_commit_it_does_not_matter_how_the_handler_ends(
    url: str, app: Penstock, effects: Callable[[], Awaitable[int]]
) -> None:
    @app.job(backoff=QUICK)
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
        raise ValueError("too late")

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
        assert (record.status, record.errors) == (Status.SUCCEEDED, [])
    assert await effects() == 1


async def test_a_handler_can_try_its_transaction_again(url: str, app: Penstock, effects: Callable[[], Awaitable[int]]) -> None:
    @app.job(max_attempts=1)
    async def book(job: Job[Any]) -> None:
        for _ in range(2):
            try:
                async with asyncpg_transaction(url) as connection:
                    await job.finish(connection)
                    if not tries:
                        tries.append(1)
                        raise Undo
            except Undo:
                # It is in progress again, so its lease can be extended.
                await job.extend()

    tries: list[int] = []
    await app.enqueue("book")
    (record,) = await run_due_jobs(app)
    assert record.status is Status.SUCCEEDED
    assert await effects() == 1


async def take_away(sql: Sql, id: Any) -> None:
    """End the lease of a job, as when its time is up."""
    await sql.execute(
        "update penstock.leases set expires_at = penstock.clock() - interval '1 second'"
        " where id = (select lease from penstock.queued_jobs where id = $1)",
        id,
    )
    await sql.execute("select penstock.recover()")


async def test_a_stale_owner_cannot_finish_and_its_transaction_fails(
    url: str, app: Penstock, sql: Sql, effects: Callable[[], Awaitable[int]]
) -> None:
    seen: list[str] = []

    @app.job(backoff=QUICK)
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            if job.attempt == 1:
                await take_away(sql, job.id)
                with pytest.raises(Conflict, match="no longer belongs to this worker") as refused:
                    await job.finish(connection)
                assert "Roll the transaction back" in str(refused.value)
                with pytest.raises(asyncpg.InFailedSQLTransactionError):
                    await connection.fetchval("select 1")
                seen.append("stale")
                raise Undo
            await job.finish(connection)

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
        # The second attempt may end first.
        await eventually(lambda: seen, "the refusal of the first attempt", timeout=60)
    assert (record.status, record.attempt) == (Status.SUCCEEDED, 2)
    assert await effects() == 1


async def test_a_job_whose_lease_is_lost_before_the_commit_is_finished(
    url: str, app: Penstock, sql: Sql, effects: Callable[[], Awaitable[int]]
) -> None:
    runs: list[int] = []

    @app.job
    async def book(job: Job[Any]) -> None:
        runs.append(job.attempt)
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            async with asyncio.timeout(60):
                await take_away(sql, job.id)

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
    assert (runs, record.status) == ([1], Status.SUCCEEDED)
    assert await effects() == 1


async def test_a_lease_that_is_lost_before_a_rollback_ends_the_attempt(
    url: str, app: Penstock, sql: Sql, effects: Callable[[], Awaitable[int]]
) -> None:
    runs: list[int] = []

    @app.job(backoff=QUICK)
    async def book(job: Job[Any]) -> None:
        runs.append(job.attempt)
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            if job.attempt == 1:
                await take_away(sql, job.id)
                raise ValueError("rolled back")

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
    assert (runs, record.status) == ([1, 2], Status.SUCCEEDED)
    assert [error["type"] for error in record.errors] == ["ValueError"]
    assert await effects() == 1


async def test_a_cancellation_waits_for_the_transaction_that_finishes_the_job(
    url: str, app: Penstock, sql: Sql, effects: Callable[[], Awaitable[int]]
) -> None:
    answers: list[str] = []

    @app.job
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            cancelling = asyncio.create_task(app.cancel(job.id))
            await eventually(lambda: sql.fetchval("select count(*) from pg_locks where not granted"), timeout=60)
        answers.append(await cancelling)

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id)
        await eventually(lambda: answers, "the answer", timeout=60)
    assert (answers, record.status) == (["succeeded"], Status.SUCCEEDED)
    assert await effects() == 1


async def test_a_time_limit_before_the_commit_rolls_back(url: str, app: Penstock, effects: Callable[[], Awaitable[int]]) -> None:
    @app.job(backoff=QUICK, time_limit=timedelta(seconds=3))
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            if job.attempt == 1:
                await asyncio.Event().wait()

    receipt = await app.enqueue("book")
    async with running_worker(app):
        record = await app.wait(receipt.id, timeout=timedelta(seconds=60))
    # On a busy machine the time may not suffice for another attempt either.
    assert record.status is Status.SUCCEEDED and record.attempt >= 2
    assert {error["type"] for error in record.errors} == {"TimeLimit"}
    assert await effects() == 1


def blocking_effect(url: str, job: Job[Any], before_commit: Callable[[], object] = lambda: None) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("insert into effects values ('done')")
        job.finish_blocking(connection, result="done")
        before_commit()


async def test_a_plain_handler_finishes_its_job_in_its_thread(
    url: str, app: Penstock, effects: Callable[[], Awaitable[int]]
) -> None:
    @app.job
    def book(job: Job[Any]) -> None:
        blocking_effect(url, job)

    await app.enqueue("book")
    (record,) = await run_due_jobs(app)
    assert (record.status, record.result) == (Status.SUCCEEDED, "done")
    assert await effects() == 1


async def test_an_open_transaction_delays_no_other_job(
    url: str, app: Penstock, sql: Sql, effects: Callable[[], Awaitable[int]]
) -> None:
    """A thread cannot be cancelled: past its time limit, its transaction decides what becomes of the job."""
    finished, proceed = threading.Event(), threading.Event()

    def wait() -> None:
        finished.set()
        proceed.wait(60)

    @app.job(time_limit=timedelta(milliseconds=300))
    def book(job: Job[str]) -> None:
        if job.data == "slow":
            blocking_effect(url, job, wait)

    slow, *others = await app.enqueue_many("book", [NewJob(data) for data in ("slow", "a", "b", "c")])
    async with running_worker(app):
        try:
            for other in others:
                assert (await app.wait(other.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
            await eventually(finished.is_set, timeout=60)
            late = (await app.enqueue("book", "late")).id
            assert (await app.wait(late, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
            await sql.execute("select penstock.recover()")
            assert (await app.find(slow.id)).status is Status.IN_PROGRESS
        finally:
            proceed.set()
        assert (await app.wait(slow.id, timeout=timedelta(seconds=60))).status is Status.SUCCEEDED
    assert await effects() == 1


async def test_the_key_of_a_pool_goes_on_after_the_commit(url: str, effects: Callable[[], Awaitable[int]]) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=int, backoff=QUICK)
    seen: list[tuple[int, int, list[int]]] = []
    committed: list[int] = []

    @pool.job
    async def work(job: Job[int]) -> None:
        seen.append((job.data, job.attempt, list(committed)))
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            if job.data == 1 and job.attempt == 1:
                raise ValueError("rolled back")
        committed.append(job.data)

    async with app:
        ids = [(await pool.enqueue("acme", number)).id for number in range(4)]
        async with running_worker(app):
            for id in ids:
                await app.wait(id, timeout=timedelta(seconds=60))
    assert seen == [(0, 1, []), (1, 1, [0]), (1, 2, [0]), (2, 1, [0, 1]), (3, 1, [0, 1, 2])]
    assert await effects() == 4


async def test_the_jobs_of_a_batch_are_finished_one_by_one(
    url: str, app: Penstock, effects: Callable[[], Awaitable[int]]
) -> None:
    @app.job(max_batch_size=10, linger=timedelta(milliseconds=50), backoff=QUICK)
    async def book(jobs: list[Job[int]]) -> None:
        for job in jobs:
            try:
                async with asyncpg_transaction(url) as connection:
                    await job.finish(connection, result=job.attempt)
                    if job.data == 3 and job.attempt == 1:
                        raise Undo
            except Undo:
                pass

    receipts = await app.enqueue_many("book", [NewJob(number) for number in range(6)])
    async with running_worker(app):
        records = [await app.wait(receipt.id, timeout=timedelta(seconds=60)) for receipt in receipts]
    assert [record.attempt for record in records] == [1, 1, 1, 2, 1, 1]
    assert await effects() == 6


async def test_all_jobs_of_a_batch_end_in_one_transaction(url: str, app: Penstock, effects: Callable[[], Awaitable[int]]) -> None:
    @app.job(max_batch_size=10, linger=timedelta(milliseconds=50))
    async def book(jobs: Jobs[int]) -> None:
        async with asyncpg_transaction(url) as connection:
            for job in jobs:
                await job.finish(connection)

    await app.enqueue_many("book", [NewJob(number) for number in range(6)])
    records = await run_due_jobs(app)
    assert {str(record.status) for record in records} == {"succeeded"}
    assert await effects() < 6


async def test_a_finished_job_gives_back_its_place(url: str, app: Penstock, sql: Sql) -> None:
    @app.job(concurrency=1)
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)

    receipts = await app.enqueue_many("book", [NewJob() for _ in range(5)])
    async with running_worker(app):
        for receipt in receipts:
            await app.wait(receipt.id, timeout=timedelta(seconds=60))


async def test_the_place_of_a_worker_that_died_after_the_commit_comes_back(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("book", concurrency=1)
    first, second = await app.enqueue_many("book", [NewJob(), NewJob()])
    (claimed,) = await sql.fetch("select * from penstock.claim('w', '{book}', 10, '{}')")
    assert claimed["id"] == first.id
    await sql.execute("select penstock.finish($1, $2, $3)", claimed["id"], claimed["attempt"], claimed["lease"])
    assert await sql.fetch("select * from penstock.claim('w', '{book}', 10, '{}')") == []
    await sql.execute("select penstock.recover()")
    (claimed,) = await sql.fetch("select * from penstock.claim('w', '{book}', 10, '{}')")
    assert claimed["id"] == second.id
    await sql.execute("select penstock.finish($1, $2, $3)", claimed["id"], claimed["attempt"], claimed["lease"])
    assert await sql.fetch("select * from penstock.confirm_finished(array[$1::uuid])", claimed["id"]) == []


async def test_where_a_job_cannot_be_finished_it_is_refused_with_the_reason(url: str, app: Penstock, sql: Sql) -> None:
    refused: list[str] = []

    @app.job(max_attempts=1)
    async def book(job: Job[Any]) -> None:
        async with asyncpg.create_pool(url, min_size=0) as pool:
            engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
            autocommit = await psycopg.AsyncConnection.connect(url, autocommit=True)
            for connection in (pool, sql, autocommit, engine, object()):
                with pytest.raises(InvalidInput) as error:
                    await job.finish(connection)
                refused.append(error.value.message)
            await autocommit.close()
            await engine.dispose()

    await app.enqueue("book")
    (record,) = await run_due_jobs(app)
    assert refused[:4] == [
        "a Pool has no transaction to write in",
        "this Connection has no transaction open",
        "this AsyncConnection has no transaction open",
        "a AsyncEngine has no transaction to write in",
    ]
    assert refused[4].startswith("connection cannot be <object object")
    assert record.status is Status.FAILED

    job: Job[Any] = Job(record.id, "book", None, 1, 1, None, record.created_at)
    with pytest.raises(Conflict, match="no connection to its worker in this process"):
        await job.finish(sql)


async def test_a_lease_cannot_be_extended_while_the_job_is_being_finished(url: str, app: Penstock) -> None:
    @app.job
    async def book(job: Job[Any]) -> None:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
            with pytest.raises(Conflict, match="is being finished"):
                await job.extend()

    await app.enqueue("book")
    (record,) = await run_due_jobs(app)
    assert record.status is Status.SUCCEEDED


async def test_a_pulled_job_is_finished_by_the_program(url: str, effects: Callable[[], Awaitable[int]]) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=int)
    seen: list[int] = []
    async with app:
        ids = [(await pool.enqueue("acme", number)).id for number in range(3)]
        async with pool.worker() as worker:
            async for job in worker.jobs():
                seen.append(job.data)
                if job.data == 1:
                    try:
                        async with asyncpg_transaction(url) as connection:
                            await job.finish(connection)
                            raise Undo
                    except Undo:
                        with pytest.raises(Conflict, match="was not committed"):
                            await job.ack()
                async with asyncpg_transaction(url) as connection:
                    await job.finish(connection, result=job.data)
                await job.ack("ignored")
                if job.data == 2:
                    break
        records = [await app.find(id) for id in ids]
    assert seen == [0, 1, 2]
    assert [(record.status, record.attempt, record.result) for record in records] == [(Status.SUCCEEDED, 1, n) for n in range(3)]
    assert await effects() == 3


async def test_a_job_that_a_test_runs_can_be_finished(url: str, app: Penstock) -> None:
    @app.job
    async def book(number: int, job: Job[Any]) -> int:
        async with asyncpg_transaction(url) as connection:
            await job.finish(connection)
        return number

    assert await run_job(book, 3) == 3
