"""Suspended jobs beside keys, unique keys, expiry, purges, pruning and erasure."""

from __future__ import annotations

import asyncio
import re
import shlex
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Job, JobFilter, Penstock
from penstock.testing import advance, run_due_jobs, running_worker
from tests.command_line import penstock
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
DAY = timedelta(days=1)


async def count(sql: Sql, table: str) -> int:
    return int(await sql.fetchval(f"select count(*) from penstock.{table}"))


@pytest.mark.parametrize(("on_retry", "behind"), [("block", []), ("skip", ["behind"])])
async def test_a_suspended_job_of_a_pool_holds_its_key_unless_the_pool_skips(
    app: Penstock, on_retry: Any, behind: list[str]
) -> None:
    ran: list[str] = []
    pool = app.pool("accounts", slots=4, on_retry=on_retry)

    @pool.job
    async def account(job: Job[str]) -> None:
        if job.data == "waits":
            await job.wait_for("approved")
            await job.sleep("a while", DAY)
        ran.append(job.data)

    first = await pool.enqueue("acme", "waits")
    await pool.enqueue("acme", "behind")
    await pool.enqueue("bolt", "other key")
    await run_due_jobs(app)
    assert sorted(ran) == sorted(["other key", *behind])
    await app.signal(first.id, "approved")
    await run_due_jobs(app)
    assert sorted(ran) == sorted(["other key", *behind])
    await advance(app, DAY)
    await run_due_jobs(app)
    assert sorted(ran) == ["behind", "other key", "waits"]
    assert ran[-1] == ("behind" if on_retry == "block" else "waits")


@pytest.mark.parametrize(
    ("step", "reason", "said"),
    [
        ("sleep", "sleep", "sleeps in the step it's long"),
        ("wait", "signal", "waits for the signal it's long"),
        ("gather", "children", "waits for its children in the step it's long"),
    ],
)
async def test_why_says_what_the_job_that_holds_a_key_waits_for(app: Penstock, step: str, reason: str, said: str) -> None:
    pool = app.pool("accounts", slots=1)

    @app.job("child")
    async def child() -> None: ...

    @pool.job
    async def account(job: Job[str]) -> None:
        if step == "sleep":
            await job.sleep("it's long", DAY)
        elif step == "wait":
            await job.wait_for("it's long")
        else:
            await job.gather("it's long", [child.options(run_after=DAY).child()])

    first, behind = await pool.enqueue("acme", "one"), await pool.enqueue("acme", "two")
    await run_due_jobs(app)
    async with running_worker(app):

        async def is_held() -> bool:
            # Until the worker has the key there is another reason.
            return (await app.why(behind.id)).by_job == first.id

        await eventually(is_held)
        assert (await app.why(first.id)).reason == reason
        why = await app.why(behind.id)
    assert why.reason == "key-suspended"
    assert why.message == f"Its key is held by a job whose handler {said}."
    assert (why.until is not None) == (step == "sleep")


async def test_a_job_that_no_time_lets_go_on_shows_none(app: Penstock, url: str) -> None:
    @app.job("order")
    async def order(job: Job[str]) -> None:
        await job.wait_for("approved", timeout=DAY if job.data == "timed" else None)

    waits, timed = await app.enqueue("order", "waits"), await app.enqueue("order", "timed")
    await run_due_jobs(app)
    assert (await app.find(timed.id)).not_before == (await app.steps(timed.id))[0].due
    for _ in range(2):
        assert (await app.find(waits.id)).not_before is None
        for command in (["jobs", "show", str(waits.id)], ["jobs", "list"]):
            shown = await asyncio.to_thread(penstock, url, *command)
            assert shown.returncode == 0
            assert str(waits.id) in shown.stdout
            assert re.search(r"9998-\d\d-\d\d", shown.stdout) is None
        # The archive has the time as it was.
        await app.cancel(waits.id)


async def test_why_says_that_the_job_for_which_another_one_waits_is_suspended(app: Penstock) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.wait_for("approved")

    first = await app.enqueue("order", {})
    behind = await app.enqueue("order", {}, after=first)
    assert f"{first.id} of order, which is queued" in (await app.why(behind.id)).message
    await run_due_jobs(app)
    assert f"{first.id} of order, which is waiting" in (await app.why(behind.id)).message


@pytest.mark.parametrize("name", ["approved", "it's approved", "-approved", "a b", "$(date)", "größe"])
async def test_the_command_that_why_names_sends_the_signal(app: Penstock, name: str) -> None:
    @app.job("order", keep_result=True)
    async def order(job: Job[Any]) -> Any:
        return await job.wait_for(name)

    job = await app.enqueue("order", {})
    await run_due_jobs(app)
    message = (await app.why(job.id)).message
    words = shlex.split(message[message.index("penstock ") :].removesuffix("."))
    assert words == ["penstock", "jobs", "signal", str(job.id), *(["--"] if name.startswith("-") else []), name]


async def test_a_waiting_job_that_has_a_unique_key_does_not_coalesce(app: Penstock) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.wait_for("approved")

    first = await app.enqueue("order", {}, unique="one")
    await run_due_jobs(app)
    second = await app.enqueue("order", {}, unique="one")
    assert (second.outcome, second.id == first.id) == ("queued", False)
    await app.signal(first.id, "approved")
    await run_due_jobs(app)
    assert (await status(app, first.id), await status(app, second.id)) == ("succeeded", "waiting")


async def test_waiting_jobs_expire_and_are_purged_and_dropped(app: Penstock) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.wait_for("approved")

    expires = await app.enqueue("order", {}, expires_at=DAY)
    await run_due_jobs(app)
    await advance(app, DAY)
    async with running_worker(app):
        await eventually(lambda: _has_status(app, expires.id, "expired"))
        purged = await order.enqueue({})
        await eventually(lambda: _has_status(app, purged.id, "waiting"))
        await app.operations.start("purge", JobFilter(name="order", status="waiting"))
        await eventually(lambda: _has_status(app, purged.id, "cancelled"))
        dropped = await order.enqueue({})
        await eventually(lambda: _has_status(app, dropped.id, "waiting"))
    await app.drop_job_type("order", force=True)
    assert await status(app, dropped.id) == "cancelled"


async def _has_status(app: Penstock, id: UUID, wanted: str) -> bool:
    return await status(app, id) == wanted


async def test_prune_and_erasure_take_steps_and_signals_with_them(app: Penstock, sql: Sql) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.step("pay", lambda: 1)
        await job.wait_for("approved")

    kept, erased = await order.enqueue({}), await app.enqueue("order", {}, key="acme")
    await run_due_jobs(app)
    for job in (kept, erased):
        await app.signal(job.id, "approved", "by somebody")
    await run_due_jobs(app)
    assert (await count(sql, "job_steps"), await count(sql, "job_signals")) == (4, 2)
    await sql.fetch('select penstock.start_erasure(\'{"key": "acme"}\')')
    while await sql.fetchval("select phase from penstock.operations") != "vacuum":
        await sql.fetch("select penstock.advance_operation()")
    assert (await count(sql, "job_steps"), await count(sql, "job_signals")) == (2, 1)
    assert await app.steps(erased.id) == []
    # Its day is over: as if it had finished two days ago.
    await sql.execute("select penstock.ensure_archive(now() - interval '2 days')")
    await sql.execute("update penstock.archived_jobs set finished_at = finished_at - interval '2 days'")
    await sql.fetch("select * from penstock.prune(interval '1 day')")
    assert (await count(sql, "job_steps"), await count(sql, "job_signals")) == (0, 0)
