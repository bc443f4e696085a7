"""Ends of children from which nothing follows but the numbers of their group are folded later, and all others at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Job, JobGroupRecord, Penstock, Settings, Status
from penstock.testing import running_worker
from tests.postgres.plans import explain, nodes, seq_scans
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)


@pytest.fixture
async def other(url: str) -> AsyncIterator[Sql]:
    """A second connection, which fails when it waits for a lock."""
    connection = await asyncpg.connect(url, server_settings={"lock_timeout": "5s"})
    yield connection
    await connection.close()


def declare(app: Penstock) -> Any:
    """A job type for children, and one for the end of a group."""

    @app.job("step", max_attempts=1)
    async def step(job: Job[str]) -> None:
        pass

    @app.job("report")
    async def report(job: Job[Any]) -> None:
        pass

    return step


def counts(group: JobGroupRecord) -> tuple[str, int, int, int, int]:
    return group.status, group.added, group.succeeded, group.failed, group.cancelled


async def settle(sql: Sql, jobs: int, outcome: str = "succeeded") -> None:
    claimed = await sql.fetch("select id, attempt, lease from penstock.claim('psql', '{step}', $1)", jobs)
    assert len(claimed) == jobs
    await sql.fetch(
        "select * from penstock.settle($1::uuid[], $2::smallint[], $3::bigint[], array_fill($4::text, array[$5::integer]))",
        *[[row[n] for row in claimed] for n in range(3)], outcome, jobs,
    )  # fmt: skip


async def ticks(sql: Sql) -> int:
    return int(await sql.fetchval("select count(*) from penstock.workflow_ticks"))


async def resolve_if_due(sql: Sql) -> int:
    return int(await sql.fetchval("select penstock.resolve_workflows(p_if_due => true)"))


async def resolve_all_due(sql: Sql) -> None:
    while await resolve_if_due(sql):
        pass


async def test_ends_of_children_from_which_nothing_follows_are_folded_with_the_one_that_ends_the_group(
    app: Penstock, sql: Sql
) -> None:
    step = declare(app)
    async with app.job_group("import", then="report", on_failure="continue") as group:
        await step.options(group=group).enqueue_many([f"{n}" for n in range(4)])
    await sql.fetchval("select penstock.resolve_workflows()")
    for outcome in ("succeeded", "failed", "cancelled"):
        await settle(sql, 1, outcome)
        assert await resolve_if_due(sql) == 0
    assert await ticks(sql) == 3
    assert counts(await group.find()) == ("running", 4, 1, 1, 1)
    await settle(sql, 1)
    assert await resolve_if_due(sql) > 0
    assert await ticks(sql) == 0
    assert counts(await group.find()) == ("failed", 4, 2, 1, 1)
    assert (await app.find((await group.find()).then_job or UUID(int=0))).status is Status.QUEUED


async def test_ticks_are_folded_when_they_are_many_and_by_a_call_for_all(app: Penstock, sql: Sql) -> None:
    step = declare(app)
    group = await app.job_group("import").open()
    for number in range(99):
        await step.options(group=group).enqueue(f"{number}")
    assert (await resolve_if_due(sql), await ticks(sql)) == (0, 99)
    await step.options(group=group).enqueue("one more")
    assert (await resolve_if_due(sql), await ticks(sql)) == (100, 0)
    await step.options(group=group).enqueue("last")
    assert (await resolve_if_due(sql), await ticks(sql)) == (0, 1)
    await sql.fetchval("select penstock.resolve_workflows()")
    assert await ticks(sql) == 0


async def test_a_failure_and_a_seal_are_due(app: Penstock, sql: Sql) -> None:
    step = declare(app)
    outer = await app.job_group("outer").open()
    failing = await app.job_group("failing").open()
    complete = await app.job_group("complete", parent=outer).open()
    for group in (failing, complete):
        await step.options(group=group).enqueue(group.name)
    await settle(sql, 1, "failed")
    assert await resolve_if_due(sql) > 0
    assert await sql.fetchval("select cancelled_at is not null from penstock.job_groups where id = $1", failing.id)
    await settle(sql, 1)
    await outer.seal()
    await resolve_all_due(sql)
    assert ((await complete.find()).status, (await outer.find()).status) == ("open", "running")
    await complete.seal()
    await resolve_all_due(sql)
    assert ((await complete.find()).status, (await outer.find()).status) == ("succeeded", "succeeded")
    assert await ticks(sql) == 0


async def test_a_child_that_comes_to_a_cancelled_group_is_due(app: Penstock, sql: Sql, other: Sql) -> None:
    step = declare(app)
    group = await app.job_group("import").open()
    async with sql.transaction():
        await step.options(group=group, connection=sql).enqueue("late")
        await group.cancel()
        await resolve_all_due(other)
    cancellations = "select count(*) from penstock.operations where kind = 'cancel'"
    before = await sql.fetchval(cancellations)
    await resolve_all_due(other)
    assert await sql.fetchval(cancellations) == before + 1


@pytest.mark.parametrize("grouped", [False, True])
async def test_the_end_of_a_job_for_which_others_wait_is_due(app: Penstock, sql: Sql, grouped: bool) -> None:
    step = declare(app)
    group = await app.job_group("import").open()
    first = await (step.options(group=group) if grouped else step).enqueue("first")
    early = await step.options(after=first).enqueue("early")
    claimed = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    late = await step.options(after=first).enqueue("late")
    await resolve_all_due(sql)
    assert await sql.fetchval("select count(*) from penstock.job_dependencies where not linked") == 0
    await sql.fetch("select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *claimed)
    await resolve_all_due(sql)
    assert [(await app.find(job)).status for job in (early.id, late.id)] == [Status.QUEUED] * 2


async def test_a_worker_needs_no_interval_to_end_a_group(url: str) -> None:
    async with Penstock(url, settings=Settings(maintenance_interval=HOUR)) as app:
        step = declare(app)
        async with running_worker(app):
            for number in range(3):
                async with app.job_group(f"import {number}", then="report", then_data=number) as group:
                    await step.options(group=group).enqueue_many([f"{n}" for n in range(200)])
                then = (await group.find()).then_job
                assert then is not None
                assert (await app.wait(then)).status is Status.SUCCEEDED


async def test_a_worker_folds_at_intervals_what_is_not_due(app: Penstock, sql: Sql) -> None:
    step = declare(app)
    group = await app.job_group("import").open()
    async with running_worker(app):
        jobs = await step.options(group=group).enqueue_many(["one", "two"])
        for job in jobs:
            await app.wait(job.id)

        async def folded() -> bool:
            return await sql.fetchval("select succeeded = 2 from penstock.job_groups") and await ticks(sql) == 0

        await eventually(folded, "the ticks of the group are folded")


async def test_a_look_for_what_is_due_goes_by_the_indexes(app: Penstock, sql: Sql) -> None:
    declare(app)
    await sql.execute(
        "insert into penstock.job_groups (id, name, created_at, changed_at, on_failure)"
        " select gen_random_uuid(), 'group ' || n, now(), now(), 'continue' from generate_series(1, 5000) as n"
    )
    few = "insert into penstock.workflow_ticks (workflow, succeeded) select id, 1 from penstock.job_groups order by id limit 90"
    await sql.execute(few)
    plan = await explain(sql, "has_due_ticks", "select\n        exists", "    into due", {"most": "100"})
    assert seq_scans(plan) == []
    assert "job_groups_pkey" in {node.get("Index Name") for node in nodes(plan)}
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 90 * 4 + 50
    await sql.execute(few.replace("limit 90", ""))
    plan = await explain(sql, "has_due_ticks", "select\n        exists", "    into due", {"most": "100"})
    # More of them are not counted.
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 50
