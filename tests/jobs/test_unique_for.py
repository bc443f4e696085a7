"""Unique keys with a period: a job holds its key while it waits or runs, and for a time also when it has ended."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import psycopg
import pytest

from penstock import EnqueueOutcome, InvalidInput, Job, NewJob, Penstock
from penstock.testing import advance, run_due
from tests.activity import seen_now
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)
QUEUED, COALESCED = EnqueueOutcome.QUEUED, EnqueueOutcome.COALESCED


async def test_the_key_is_held_when_the_job_has_ended_until_the_period_is_over(app: Penstock) -> None:
    @app.job("report")
    async def report(job: Job[int]) -> None: ...

    once = report.options(unique="acme", unique_for=HOUR)
    first = await once.enqueue(1)
    assert await once.enqueue(2) == (first.id, COALESCED)
    await run_due(app)
    assert (await app.find(first.id)).status.finished
    assert await once.enqueue(3) == (first.id, COALESCED)
    await advance(app, HOUR)
    second = await once.enqueue(4)
    assert second.outcome == QUEUED
    assert second.id != first.id


async def test_the_key_is_held_while_the_job_waits_or_runs_also_after_the_period(app: Penstock, sql: Sql) -> None:
    report = app.job_type("report")
    await app.declare()
    once = report.options(unique="acme", unique_for=timedelta(seconds=1))
    first = await once.enqueue(1)
    await advance(app, HOUR)
    assert await once.enqueue(2) == (first.id, COALESCED)
    assert await sql.fetchval("select count(*) from penstock.claim('w', array['report'], 1)") == 1
    assert await once.enqueue(3) == (first.id, COALESCED)
    await sql.execute(
        "select penstock.settle(array[id], array[attempt], array[lease], array['succeeded'], array[null::jsonb])"
        " from penstock.queued_jobs"
    )
    assert (await once.enqueue(4)).outcome == QUEUED


async def test_without_a_period_a_key_is_held_while_its_job_is_queued(app: Penstock) -> None:
    @app.job("report")
    async def report(job: Job[int]) -> None: ...

    await report.options(unique="acme", unique_for=HOUR).enqueue(1)
    assert (await report.options(unique="acme").enqueue(2)).outcome == COALESCED
    await run_due(app)
    plain = await report.options(unique="acme").enqueue(3)
    assert plain.outcome == QUEUED
    # A queued job without a period takes one over from an enqueue that coalesces with it.
    await advance(app, HOUR)
    assert await report.options(unique="acme", unique_for=HOUR).enqueue(4) == (plain.id, COALESCED)
    await run_due(app)
    assert await report.options(unique="acme", unique_for=HOUR).enqueue(5) == (plain.id, COALESCED)


async def test_a_repeated_enqueue_of_an_id_is_the_same_job(app: Penstock) -> None:
    @app.job("report")
    async def report(job: Job[int]) -> None: ...

    first = await report.options(unique="acme", unique_for=HOUR).enqueue(1)
    again = report.options(id=first.id, unique="acme", unique_for=HOUR)
    assert (await again.enqueue(1)).outcome == EnqueueOutcome.DUPLICATE
    await run_due(app)
    assert (await again.enqueue(1)).outcome == EnqueueOutcome.ARCHIVED
    await advance(app, HOUR)
    await report.options(unique="acme", unique_for=HOUR).enqueue(2)
    assert (await again.enqueue(1)).outcome == EnqueueOutcome.ARCHIVED


async def test_in_a_pool_it_is_of_the_key(app: Penstock) -> None:
    pool = app.pool("bolts", payload=int)

    @pool.job
    async def bolt(job: Job[int]) -> None: ...

    first = await pool.enqueue("acme", 1, unique="u", unique_for=HOUR)
    other = await pool.enqueue("globex", 2, unique="u", unique_for=HOUR)
    assert (first.outcome, other.outcome) == (QUEUED, QUEUED)
    await run_due(app)
    assert await pool.enqueue("acme", 3, unique="u", unique_for=HOUR) == (first.id, COALESCED)


async def test_every_way_to_enqueue_has_it(app: Penstock, url: str, sql: Sql) -> None:
    report = app.job_type("report")
    await app.declare()
    first = await report.options(unique="u", unique_for=HOUR).enqueue(1)
    call = report.options(unique="u", unique_for=HOUR)
    await app.cancel(first.id)
    assert await report.enqueue_many([call.new(2)]) == [(first.id, COALESCED)]
    assert await app.enqueue("report", 3, unique="u", unique_for=HOUR, run_after=timedelta(0)) == (first.id, COALESCED)
    assert await call.through(sql).enqueue(4) == (first.id, COALESCED)
    async with await psycopg.AsyncConnection.connect(url) as connection:
        assert await call.through(connection).enqueue(5) == (first.id, COALESCED)
    assert await sql.fetchval("select penstock.enqueue('report', '6', p_unique_key => 'u', p_unique_for => '1 h')") == first.id
    found = await sql.fetchrow(
        """select id, outcome from penstock.enqueue_json('report', '[{"data": 7, "unique_key": "u", "unique_for": "1 hour"}]')"""
    )
    assert tuple(found) == (first.id, "coalesced")
    assert await app.find_many(name="report") == [await app.find(first.id)]


async def test_of_enqueues_at_the_same_time_one_is_the_job(app: Penstock, url: str, sql: Sql) -> None:
    report = app.job_type("report")
    await app.declare()
    call = report.options(unique="u", unique_for=HOUR)
    async with sql.transaction():
        first = await call.through(sql).enqueue(1)
        others = [asyncio.create_task(call.enqueue(n)) for n in range(2, 8)]

        async def wait() -> bool:
            blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            return bool(await seen_now(sql, blocked))

        await eventually(wait)
    assert {await other for other in others} == {(first.id, COALESCED)}
    # After the period, all at once: one takes the key over.
    await app.cancel(first.id)
    await advance(app, HOUR)
    receipts = await asyncio.gather(*(call.enqueue(n) for n in range(20)))
    assert [receipt.outcome for receipt in receipts].count(QUEUED) == 1
    assert len({receipt.id for receipt in receipts}) == 1


async def test_a_rolled_back_enqueue_holds_nothing(app: Penstock, sql: Sql) -> None:
    report = app.job_type("report")
    await app.declare()
    transaction = sql.transaction()
    await transaction.start()
    await report.options(unique="u", unique_for=HOUR, connection=sql).enqueue(1)
    await transaction.rollback()
    assert (await report.options(unique="u", unique_for=HOUR).enqueue(2)).outcome == QUEUED


async def test_maintenance_forgets_periods_that_are_over(app: Penstock, sql: Sql) -> None:
    report = app.job_type("report")
    await app.declare()
    waiting, ended = [await report.options(unique=key, unique_for=HOUR).enqueue(1) for key in ("waiting", "ended")]
    held = "select array_agg(id) from penstock.unique_periods"
    await app.cancel(ended.id)
    await sql.execute("select penstock.recover()")
    assert len(await sql.fetchval(held)) == 2
    await advance(app, HOUR)
    await sql.execute("select penstock.recover()")
    assert await sql.fetchval(held) == [waiting.id]
    assert await report.options(unique="waiting", unique_for=HOUR).enqueue(2) == (waiting.id, COALESCED)


async def test_a_period_without_a_key_or_of_a_wrong_length_is_refused(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("report")
    with pytest.raises(InvalidInput, match="unique_for is given without unique"):
        await app.enqueue("report", unique_for=HOUR)
    with pytest.raises(InvalidInput, match="unique_for of a job must be a span of time"):
        await app.enqueue_many("report", [NewJob(1, unique="u", unique_for=timedelta(0))])
    with pytest.raises(InvalidInput, match="unique_for of a job must be at most 30 days"):
        await app.enqueue("report", unique="u", unique_for=timedelta(days=31))
    with pytest.raises(asyncpg.PostgresError, match="unique_for without a unique key") as refused:
        await sql.execute("select penstock.enqueue('report', p_unique_for => '1 h')")
    assert refused.value.sqlstate == "PS400"
    assert await app.find_many(name="report") == []
