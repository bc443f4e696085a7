"""What happens between two transactions: leases that several close at once, locks in a circle, answers that are lost."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SETTLE = "select * from penstock.settle($1, $2::smallint[], $3::bigint[], $4)"
EXTEND = "select * from penstock.extend($1, $2::smallint[], $3::bigint[])"


async def claim(sql: Sql, limit: int = 10, worker: str = "w1", names: tuple[str, ...] = ("ship",)) -> list[Any]:
    return list(await sql.fetch("select * from penstock.claim($1, $2, $3)", worker, list(names), limit))


def arguments(jobs: list[Any]) -> tuple[list[UUID], list[int], list[int]]:
    return [job["id"] for job in jobs], [job["attempt"] for job in jobs], [job["lease"] for job in jobs]


@pytest.fixture
async def other(url: str) -> Any:
    connection = await asyncpg.connect(url)
    yield connection
    connection.terminate()


async def waiting(sql: Sql) -> bool:
    return bool(
        await sql.fetchval(
            "select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')"
        )
    )


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "extended"])
async def test_a_lease_that_two_close_at_once_is_gone(sql: Sql, other: Sql, url: str, outcome: str) -> None:
    await sql.execute("select penstock.create_job_type('ship', '{\"concurrency\": 4}')")
    await sql.execute("select penstock.enqueue('ship') from generate_series(1, 4)")
    jobs = await claim(sql)
    watcher = await asyncpg.connect(url)
    transaction = sql.transaction()
    await transaction.start()
    await sql.fetch(SETTLE, *arguments(jobs[:2]), None)
    rest = arguments(jobs[2:])
    if outcome == "extended":
        second = asyncio.create_task(other.fetch(EXTEND, *rest))
    else:
        second = asyncio.create_task(other.fetch(SETTLE, *rest, [outcome] * 2))
    await eventually(lambda: waiting(watcher), "the wait of the second for the first")
    await transaction.commit()
    await second
    held = await watcher.fetchval("select coalesce(sum(open_jobs), 0) from penstock.leases")
    assert held == await watcher.fetchval("select count(*) from penstock.queued_jobs where status = 'in-progress'")
    watcher.terminate()


async def test_one_job_given_twice_counts_once(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship', '{\"max_attempts\": 3}')")
    await sql.execute("select penstock.enqueue('ship') from generate_series(1, 3)")
    jobs = await claim(sql)
    await sql.fetch(SETTLE, *arguments([jobs[0], jobs[0]]), ["failed", "failed"])
    assert await sql.fetchval("select sum(open_jobs) from penstock.leases") == 2
    await sql.fetch(EXTEND, *arguments([jobs[1], jobs[1]]))
    assert await sql.fetchval("select sum(open_jobs) from penstock.leases") == 2


async def test_an_extend_can_be_repeated_and_its_lease_is_known(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship', '{\"delivery_strategy\": \"at_most_once\"}')")
    await sql.execute("select penstock.enqueue('ship')")
    (job,) = await claim(sql)
    (lost,) = await sql.fetch(EXTEND, *arguments([job]))
    assert await sql.fetchval("select penstock.release_unknown('w1', array[$1::bigint])", job["lease"]) == 0
    (again,) = await sql.fetch(EXTEND, *arguments([job]))
    assert again["lease"] > lost["lease"]
    (third,) = await sql.fetch(EXTEND, *arguments([job]))
    assert await sql.fetch(EXTEND, [job["id"]], [job["attempt"]], [lost["lease"] - 1000]) == []
    assert await sql.fetch(SETTLE, [job["id"]], [job["attempt"]], [third["lease"]], None) == []
    assert await sql.fetchval("select count(*) from penstock.leases") == 0


async def test_claims_of_limited_types_do_not_wait_in_a_circle(sql: Sql, other: Sql) -> None:
    for name in ("alpha", "beta", "gamma"):
        await sql.execute("select penstock.create_job_type($1, '{\"concurrency\": 2}')", name)
    names = ["alpha", "beta", "gamma"]

    async def claims(connection: Sql, order: list[str]) -> None:
        for _ in range(150):
            await connection.fetch("select * from penstock.claim('w', $1, 1)", order)

    await asyncio.gather(claims(sql, names), claims(other, names[::-1]))
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    assert await sql.fetchval(deadlocks) == 0


async def test_a_dead_workers_locked_lease_is_recovered_later(sql: Sql, other: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("select penstock.enqueue('ship') from generate_series(1, 2)")
    await sql.execute("select penstock.register_worker('w1', '{ship}')")
    (first,) = await claim(sql, 1)
    await claim(sql, 1)
    await sql.execute("set penstock.clock = '2999-01-01'")
    await sql.execute("update penstock.workers set suspected_at = '2998-12-31' where id = 'w1'")
    await sql.execute("update penstock.leases set expires_at = '3000-01-01'")
    transaction = other.transaction()
    await transaction.start()
    await other.execute("select from penstock.leases where id = $1 for update", first["lease"])
    assert await sql.fetchval("select penstock.recover()") == 1
    assert await sql.fetchval("select known from penstock.heartbeat('w1')") is False
    await transaction.rollback()
    assert await sql.fetchval("select penstock.recover()") == 1
    assert await sql.fetchval("select count(*) from penstock.workers") == 0


async def test_a_rate_limit_holds_behind_a_slow_claim(sql: Sql, other: Sql, url: str) -> None:
    await sql.execute('select penstock.create_job_type(\'ship\', \'{"rate_limit": 2, "rate_period": "200 ms"}\')')
    await sql.execute("select penstock.enqueue('ship') from generate_series(1, 6)")
    watcher = await asyncpg.connect(url)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select penstock.lock_limits('{ship}')")
    second = asyncio.create_task(claim(other))
    await eventually(lambda: waiting(watcher), "the wait for the lock")
    before = await sql.fetchval("select clock_timestamp()")
    await transaction.commit()
    assert len(await second) == 2
    assert await watcher.fetchval("select min(started_at) from penstock.leases") >= before
    watcher.terminate()


async def test_only_the_owner_of_the_schema_can_hold_the_clock(sql: Sql, url: str) -> None:
    role = "clock_" + url.partition("/penstock_test_")[2].partition("?")[0][:20]
    await sql.execute(f'create role "{role}" login')
    try:
        await sql.execute("select penstock.grant_access($1, 'producer')", role)
        producer = await asyncpg.connect(url, user=role)
        await producer.execute("set penstock.clock = '2001-01-01'")
        assert (await producer.fetchval("select penstock.clock()")).year > 2001
        await producer.close()
    finally:
        await sql.execute(f'drop owned by "{role}"; drop role "{role}"')


async def test_the_first_use_of_a_priority_waits_for_no_other(sql: Sql, other: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select penstock.enqueue('ship', p_priority => 7::smallint)")
    await other.execute("set statement_timeout = '10s'")
    await other.execute("select penstock.enqueue('ship', p_priority => 7::smallint)")
    assert len(await claim(other)) == 1
    await transaction.commit()
    assert len(await claim(other)) == 1
    assert not await claim(other)
    await other.execute("select penstock.enqueue('ship', p_priority => 7::smallint) from generate_series(1, 3)")
    assert len(await claim(other)) == 3
