"""Every role that can connect can send any notification on any channel, so what a notification says of a job is looked up."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, JobFailed, Penstock
from penstock.testing import running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
ODD = ["", "x", "not-an-id", "00000000-0000-0000-0000-000000000000", "a:b", "\N{GRINNING FACE}" * 1_000]


@pytest.mark.parametrize("kind", ["jobs", "pool", "pull"])
async def test_a_notification_alone_cancels_nothing(app: Penstock, sql: Sql, kind: str) -> None:
    stopped: Counter[str] = Counter()
    began: Counter[str] = Counter()
    go_on = asyncio.Event()

    async def work(job: Job[str]) -> None:
        began[job.data] += 1
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            stopped[job.data] += 1
            raise

    if kind == "jobs":
        app.job("work", max_attempts=1)(work)
    else:
        pool = app.pool("work", str)
        if kind == "pool":
            pool.job(work)
        else:
            await check_pulled(app, sql, pool)
            return
    database = await app.database()
    async with running_worker(app, at_once=True):
        await eventually(lambda: database.fetchval("select exists(select from penstock.jobs where name = 'work')"))
        ids = [await sql.fetchval("select penstock.enqueue('work', $1, p_key => $2)", f'"{name}"', name) for name in ("a", "b")]
        await eventually(lambda: began.total() == 2, "both to run")
        await forge(sql, ids[0])
        assert await app.cancel(ids[1]) == "cancelling"
        await eventually(lambda: stopped["b"] == 1, "the one that is cancelled to stop")
        assert stopped["a"] == 0
        go_on.set()
        await app.wait(ids[0])
        with pytest.raises(JobFailed, match="cancelled"):
            await app.wait(ids[1])


async def check_pulled(app: Penstock, sql: Sql, pool: Any) -> None:
    async with pool.worker("me", prefetch=2) as worker:
        ids = [(await pool.enqueue(name, name)).id for name in ("a", "b")]
        pulled = worker.jobs()
        jobs = {job.key: job for job in [await anext(pulled), await anext(pulled)]}
        await forge(sql, ids[0])
        assert await app.cancel(ids[1]) == "cancelling"
        await eventually(lambda: jobs["b"].cancelled, "the one that is cancelled to know it")
        assert not jobs["a"].cancelled
        await jobs["a"].ack()


async def forge(sql: Sql, id: Any) -> None:
    """As a role without any access: that the job is cancelled, and nonsense."""
    holder = await sql.fetchval(
        "select leases.worker from penstock.queued_jobs join penstock.leases on leases.id = lease where queued_jobs.id = $1", id
    )
    role = f"anybody_{id.hex[-12:]}"
    await sql.execute(f"create role {role}")
    await sql.execute(f"set role {role}")
    try:
        for word in ("cancel", "settled", "taken", "place", "keys", "x"):
            for odd in ODD:
                await sql.execute("select pg_notify($1, $2)", f"penstock_{holder}", f"{word} {odd}".strip())
        await sql.execute("select pg_notify($1, $2)", f"penstock_{holder}", f"cancel {id}")
    finally:
        await sql.execute("reset role")
        await sql.execute(f"drop role {role}")
