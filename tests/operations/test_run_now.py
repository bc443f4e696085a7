"""Deferred jobs that are made due at once: one, and all that match."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import InvalidInput, JobFilter, NewJob, Penstock, Status
from penstock.operations import queries
from penstock.operations.models import OperationRecord
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)


async def claimed(sql: Sql, name: str = "mail", limit: int = 100) -> list[asyncpg.Record]:
    """Claim jobs. Returns them in the order in which a worker starts them."""
    query = "select id, lease, attempt from penstock.claim('w', array[$1], $2) order by priority, seq"
    return await sql.fetch(query, name, limit)


async def settled(sql: Sql, job: asyncpg.Record, outcome: str, after: timedelta = HOUR) -> None:
    """Say what became of a job, so that it waits."""
    await sql.fetch(
        "select penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4], array[$5::jsonb], "
        "array[$6::interval])",
        job["id"], job["attempt"], job["lease"], outcome, '{"type": "E"}' if outcome == "failed" else None, after,
    )  # fmt: skip


async def advanced(app: Penstock, id: UUID, limit: int = 1_000) -> OperationRecord:
    """Do an operation to its end, as maintenance does."""
    database = await app.database()
    while await queries.advance(database, limit) is not None:
        pass
    return await app.operations.find(id)


async def test_a_deferred_job_is_due_at_once_and_any_other_stays_as_it_is(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    ready = await app.enqueue("mail", "ready")
    later = await app.enqueue("mail", "later", run_after=HOUR)
    kept = await app.enqueue("mail", "kept", after=ready.id)
    assert await app.run_now(later.id)
    assert [await app.run_now(id) for id in (later.id, ready.id, kept.id, uuid4())] == [False] * 4
    assert [job["id"] for job in await claimed(sql)] == [ready.id, later.id]
    assert (await app.find(kept.id)).status is Status.WAITING


async def test_all_that_match_are_due_in_the_order_of_their_times_each_once(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.create_job_type("bill")
    new = [NewJob(n, key=f"k{n % 2}", run_after=timedelta(hours=100 - n)) for n in range(40)]
    ids = [job.id for job in await app.enqueue_many("mail", new)]
    ready = await app.enqueue("mail", "ready", key="k1")
    await app.enqueue("bill", "bill", run_after=HOUR)
    wanted = JobFilter(name="mail", key="k1")
    preview = await app.operations.preview("run-now", wanted)
    assert (preview.jobs, preview.whole) == (20, True), "the ready one is not among them"
    assert set(preview.sample) <= set(ids[1::2])
    started = await app.operations.start("run-now", wanted)
    await app.enqueue("mail", "late", key="k1", run_after=HOUR)
    record = await advanced(app, started.id)
    assert (record.kind, record.state, record.done, record.failed, record.postponed) == ("run-now", "finished", 20, 0, 0)
    assert [job["id"] for job in await claimed(sql)] == [ready.id, *reversed(ids[1::2])]
    assert (await app.operations.preview("run-now", wanted)).jobs == 1, "what came later"


async def test_an_operation_goes_on_in_batches(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    ids = [job.id for job in await app.enqueue_many("mail", [NewJob(n, run_after=HOUR) for n in range(25)])]
    started = await app.operations.start("run-now", JobFilter(name="mail"))
    first = await queries.advance(await app.database(), 10)
    assert first is not None and (first.done, first.looked_at, first.state) == (10, 10, "running")
    record = await advanced(app, started.id, limit=10)
    assert (record.done, record.looked_at, record.state) == (25, 25, "finished")
    assert {job["id"] for job in await claimed(sql)} == set(ids)


async def test_jobs_that_wait_for_a_further_attempt_are_due_and_others_are_left(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail", max_attempts=3)
    await app.create_pool("tenants", slots=4)
    retried, snoozed, running = [job.id for job in await app.enqueue_many("mail", ["retried", "snoozed", "running"])]
    jobs = {job["id"]: job for job in await claimed(sql)}
    await settled(sql, jobs[retried], "failed")
    await settled(sql, jobs[snoozed], "snoozed")
    kept = await app.enqueue("mail", "kept", after=running, run_after=HOUR)
    isolated = await app.enqueue("mail", "isolated", run_after=HOUR)
    suspended = await app.enqueue("mail", "suspended", run_after=HOUR)
    await sql.execute("update penstock.queued_jobs set crashes = 2 where id = $1", isolated.id)
    await sql.execute("update penstock.queued_jobs set waits_for = 'approved' where id = $1", suspended.id)
    of_pool = await (await app.find_pool("tenants")).enqueue("acme", 1, run_after=HOUR)
    started = [await app.operations.start("run-now", JobFilter(name=name)) for name in ("mail", "tenants")]
    assert [(await advanced(app, one.id)).done for one in started] == [2, 1]
    assert {job["id"] for job in await claimed(sql)} == {retried, snoozed}
    assert await sql.fetchval("select seq is not null and run_after <= now() from penstock.queued_jobs where id = $1", of_pool.id)
    left = await sql.fetch("select id from penstock.queued_jobs where seq is null union select id from penstock.waiting_jobs")
    assert {row["id"] for row in left} == {kept.id, isolated.id, suspended.id}


async def test_a_job_that_is_locked_follows_later_and_one_that_failed_again_does_not(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    locked, again = [job.id for job in await app.enqueue_many("mail", [NewJob(n, run_after=HOUR) for n in range(2)])]
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            await other.fetch("select from penstock.queued_jobs where id = $1 for update", locked)
            started = await app.operations.start("run-now", JobFilter(name="mail"))
            record = await queries.advance(await app.database())
            assert record is not None and (record.done, record.postponed, record.state) == (1, 1, "running")
            (job,) = await claimed(sql)
            assert job["id"] == again
            await settled(sql, job, "failed")

        async def done() -> bool:
            return (await advanced(app, started.id)).state == "finished"

        await eventually(done)
    finally:
        await other.close()
    assert (await app.operations.find(started.id)).done == 2
    assert [job["id"] for job in await claimed(sql)] == [locked], "the other one waits for its third attempt"


@pytest.mark.parametrize(
    ("filter", "priority", "problem"),
    [
        ({}, None, "a filter without a condition"),
        ({"name": "mail", "status": "waiting"}, None, "run-now does not apply to jobs with the status waiting"),
        ({"name": "mail", "status": "in-progress"}, None, "run-now does not apply to jobs with the status in-progress"),
        ({"name": "mail", "error": "TimeLimit"}, None, "invalid condition of a filter for run-now: error"),
        ({"name": "mail"}, 5, "run-now takes no priority, and 5 is given"),
    ],
)
async def test_what_does_not_fit_is_refused(app: Penstock, filter: dict[str, str], priority: int | None, problem: str) -> None:
    await app.create_job_type("mail")
    with pytest.raises(InvalidInput, match=problem):
        await app.operations.start("run-now", JobFilter(**filter), priority=priority)
    assert await app.operations.list() == []
