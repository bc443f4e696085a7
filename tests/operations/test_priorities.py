"""Another priority for jobs that wait: for one, for some, and for all that match."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import InvalidInput, JobFilter, NewJob, Penstock, Status
from penstock.jobs import queries as jobs
from penstock.operations import queries
from penstock.operations.models import OperationRecord
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def claimed(sql: Sql, name: str = "mail", limit: int = 100, watermarks: str = "{}") -> list[UUID]:
    """Claim jobs. Returns their ids by priority and age, as a worker starts them."""
    rows = await sql.fetch(
        "select id, priority, seq from penstock.claim('w', array[$1], $2, $3::jsonb) order by priority, seq",
        name,
        limit,
        watermarks,
    )
    return [row["id"] for row in rows]


async def advanced(app: Penstock, id: UUID, limit: int = 1_000) -> OperationRecord:
    """Do an operation to its end, as maintenance does."""
    database = await app.database()
    while await queries.advance(database, limit) is not None:
        pass
    return await app.operations.find(id)


async def test_a_job_with_another_priority_starts_in_its_new_place(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    first, second, third = [job.id for job in await app.enqueue_many("mail", [1, 2, 3])]
    early = await app.enqueue("mail", "early", priority=-10)
    assert await app.set_priority(third, -10)
    assert await app.set_priority(first, 100)
    assert not await app.set_priority(second, 0), "it has this priority"
    assert (await app.find(third)).priority == -10
    assert await claimed(sql) == [early.id, third, second, first]


async def test_jobs_keep_their_order_and_stand_behind_those_that_have_the_priority(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    ids = [job.id for job in await app.enqueue_many("mail", range(20))]
    there = await app.enqueue("mail", "there", priority=5)
    changed = await jobs.set_priority(await app.database(), [*reversed(ids), uuid4()], 5)
    assert changed == set(ids)
    assert await claimed(sql) == [there.id, *ids]


async def test_a_claim_that_has_looked_further_in_a_priority_finds_what_comes_to_it(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    old = (await app.enqueue("mail", "old")).id
    await app.enqueue_many("mail", [NewJob(n, priority=-1) for n in range(3)])
    seen = await sql.fetchval("select max(seq) from penstock.queued_jobs where priority = -1")
    assert await app.set_priority(old, -1)
    assert await claimed(sql, watermarks=f'{{"mail": {{"-1": {seen}}}}}') == [old]


async def test_only_jobs_that_wait_change(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.create_pool("tenants", slots=4)
    running = (await app.enqueue("mail", "running")).id
    lease = await sql.fetchval("select lease from penstock.claim('w', array['mail'], 1)")
    later = await app.enqueue("mail", "later", run_after=timedelta(hours=1))
    kept = await app.enqueue("mail", "kept", after=running)
    of_pool = await (await app.find_pool("tenants")).enqueue("acme", 1)
    done = await app.enqueue("mail", "done")
    await app.cancel(done.id)
    changed = await jobs.set_priority(await app.database(), [running, later.id, kept.id, of_pool.id, done.id], -7)
    assert changed == {later.id, kept.id}
    assert [(await app.find(id)).priority for id in (running, later.id, kept.id, of_pool.id)] == [0, -7, -7, 0]
    assert (await app.find(later.id)).status is Status.QUEUED, "its time has not come"
    # What waited for its time, or for another job, comes with its priority.
    await jobs.run_now(await app.database(), [later.id])
    await app.enqueue("mail", "last")
    await sql.fetch("select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", running, lease)
    await sql.fetch("select penstock.resolve_workflows()")
    assert (await claimed(sql))[:2] == [later.id, kept.id]


async def test_all_that_match_get_another_priority_each_once(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.create_job_type("bill")
    ids = [job.id for job in await app.enqueue_many("mail", [NewJob(n, key=f"k{n % 2}") for n in range(40)])]
    await app.enqueue_many("bill", range(3))
    wanted = JobFilter(name="mail", key="k1")
    preview = await app.operations.preview("set-priority", wanted, priority=-5)
    assert (preview.jobs, preview.whole) == (20, True)
    started = await app.operations.start("set-priority", wanted, priority=-5)
    assert started.filter == {"name": "mail", "key": "k1", "new_priority": "-5"}
    late = await app.enqueue("mail", "late", key="k1")
    record = await advanced(app, started.id, limit=7)
    assert (record.state, record.done, record.failed, record.postponed) == ("finished", 20, 0, 0)
    assert await claimed(sql) == [*ids[1::2], *ids[0::2], late.id]


async def test_a_job_that_another_transaction_has_locked_changes_later(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    ids = [job.id for job in await app.enqueue_many("mail", range(3))]
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            await other.fetch("select from penstock.queued_jobs where id = $1 for update", ids[0])
            started = await app.operations.start("set-priority", JobFilter(name="mail"), priority=9)
            record = await queries.advance(await app.database())
            assert record is not None and (record.done, record.postponed, record.state) == (2, 1, "running")

        async def done() -> bool:
            return (await advanced(app, started.id)).done == 3

        await eventually(done)
    finally:
        await other.close()
    assert await claimed(sql) == [ids[1], ids[2], ids[0]]


@pytest.mark.parametrize(
    ("filter", "priority", "problem"),
    [
        ({"name": "mail"}, None, "set-priority needs the new priority"),
        ({"name": "mail"}, 101, "priority 101 is out of range"),
        ({"name": "mail"}, 12345, "new_priority is no priority: 12345"),
        ({}, 5, "a filter without a condition"),
        ({"name": "tenants"}, 5, "jobs of the pool tenants have no priority"),
        ({"name": "mail", "status": "in-progress"}, 5, "set-priority does not apply to jobs with the status in-progress"),
        ({"name": "mail", "error": "TimeLimit"}, 5, "invalid condition of a filter for set-priority: error"),
    ],
)
async def test_what_does_not_fit_is_refused(app: Penstock, filter: dict[str, str], priority: int | None, problem: str) -> None:
    await app.create_job_type("mail")
    await app.create_pool("tenants", slots=4)
    with pytest.raises(InvalidInput, match=problem):
        await app.operations.start("set-priority", JobFilter(**filter), priority=priority)
    assert await app.operations.list() == []


async def test_a_priority_is_for_its_operation_alone(app: Penstock) -> None:
    await app.create_job_type("mail")
    with pytest.raises(InvalidInput, match="cancel takes no priority, and 5 is given"):
        await app.operations.start("cancel", JobFilter(name="mail"), priority=5)
    with pytest.raises(InvalidInput, match="priority must be an integer from -100 to 100"):
        await app.set_priority(uuid4(), 101)
