"""The times of a job and of those for which it waited are in one order, and `expired` means one thing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from penstock.jobs.records import Status
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SETTLE = "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4])"


@pytest.fixture
async def other(url: str) -> AsyncIterator[Sql]:
    """A second connection."""
    connection = await asyncpg.connect(url)
    await connection.execute("select penstock.create_job_type('step', '{\"max_attempts\": 3}')")
    yield connection
    await connection.close()


async def resolve(sql: Sql) -> None:
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass


async def test_a_job_that_is_released_during_a_claim_starts_after_the_end_of_its_dependency(
    app: Penstock, sql: Sql, other: Sql
) -> None:
    first = await other.fetchval("select penstock.enqueue('step')")
    running = await other.fetchrow("select id, attempt, lease from penstock.claim('one', '{step}', 1)")
    await app.enqueue("step", "free")
    behind = await app.enqueue("step", "behind", after=first)
    transaction = sql.transaction()
    await transaction.start()
    # The claim has looked at the clock when it comes to this table.
    await sql.execute("lock table penstock.large_payloads in access exclusive mode")
    fetching = await (await app.database()).connect()
    try:
        claiming = asyncio.ensure_future(fetching.fetch("select id from penstock.claim('two', '{step}', 10)"))
        blocked = "select cardinality(pg_blocking_pids($1)) > 0"
        await eventually(lambda: other.fetchval(blocked, fetching.get_server_pid()), "a claim that waits")
        await other.fetch(SETTLE, *running, "succeeded")
        await resolve(other)
        await transaction.commit()
        claimed = await claiming
        assert behind.id in [row["id"] for row in claimed]
    finally:
        await fetching.close()
    found, ended = await app.find(behind.id), await app.find(first)
    assert found.started_at is not None
    assert ended.finished_at is not None
    assert found.started_at >= ended.finished_at


@pytest.mark.parametrize("how", ["failed", "lost", "released", "suspended", "never claimed"])
async def test_a_job_that_waits_at_its_expires_at_expires_whether_it_has_started_or_not(
    app: Penstock, sql: Sql, other: Sql, how: str
) -> None:
    job = await app.enqueue("step", "x", expires_at=timedelta(hours=1))
    if how != "never claimed":
        id, attempt, lease = await other.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
        if how == "suspended":
            wait = "select * from penstock.begin_waits(array[$1::uuid], array[$2::bigint], '{wait}', '{approved}')"
            await other.fetch(wait, id, lease)
            settle = SETTLE.replace("array[$4])", 'array[$4], array[\'{"step": "approved"}\'::jsonb])')
            await other.fetch(settle, id, attempt, lease, "suspended")
        elif how == "lost":
            await other.execute("update penstock.leases set expires_at = penstock.clock() - interval '1 minute'")
            await other.execute("select penstock.recover()")
        else:
            await other.fetch(SETTLE, id, attempt, lease, how)
    await other.execute("update penstock.queued_jobs set expires_at = penstock.clock()")
    await other.execute("select penstock.expire()")
    found = await app.find(job.id)
    # Its errors stay, and `attempt` says whether it has started.
    attempts = {"failed": 1, "lost": 1, "suspended": 1}.get(how, 0)
    assert (found.status, found.attempt, len(found.errors)) == (Status.EXPIRED, attempts, int(how in ("failed", "lost")))


async def test_an_attempt_that_runs_at_its_expires_at_goes_on_and_counts(app: Penstock, sql: Sql, other: Sql) -> None:
    job = await app.enqueue("step", "x", expires_at=timedelta(hours=1))
    running = await other.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    await other.execute("update penstock.queued_jobs set expires_at = penstock.clock()")
    await other.execute("select penstock.expire()")
    await other.fetch(SETTLE, *running, "succeeded")
    assert (await app.find(job.id)).status is Status.SUCCEEDED


async def test_a_job_that_waits_for_one_which_expired_says_so(app: Penstock, sql: Sql, other: Sql) -> None:
    job = await app.enqueue("step", "x", expires_at=timedelta(hours=1))
    behind = await app.enqueue("step", "behind", after=job)
    await other.execute("update penstock.queued_jobs set expires_at = penstock.clock()")
    await other.execute("select penstock.expire()")
    await resolve(other)
    found, before = await app.find(behind.id), await app.find(job.id)
    assert (found.status, found.reason) == (Status.CANCELLED, "dependency")
    assert "which expired" in found.errors[0]["message"]
    assert found.finished_at is not None
    assert before.finished_at is not None
    assert found.finished_at >= before.finished_at
