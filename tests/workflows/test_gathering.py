"""Children of a job: a step that enqueues them and gathers their results."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Fail, Job, JobFailed, NotFound, Penstock, Retry, Status
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = Backoff(base=timedelta(0))


async def test_the_children_of_a_job_are_found_again_and_their_results_are_kept(app: Penstock, sql: Sql) -> None:
    resized: list[int] = []

    @app.job("resize", keep_result=True)
    async def resize(job: Job[int]) -> int:
        resized.append(job.data)
        return job.data * 10

    @app.job("order", backoff=AT_ONCE, keep_result=True)
    async def order(job: Job[list[int]]) -> Any:
        parts = await job.gather("resize", [resize.child(image) for image in job.data])
        assert await job.gather("none", []) == []
        if job.attempt == 1:
            raise Retry("after the children")
        return parts

    receipt = await order.enqueue([3, 1, 2])
    await run_due_jobs(app)
    assert ((await app.find(receipt.id)).result, sorted(resized)) == ([30, 10, 20], [1, 2, 3])
    group = await app.find_group(f"{receipt.id}.resize")
    assert (group.status, group.added) == ("succeeded", 3)


@pytest.mark.parametrize("runs", [[0, 3], [3, 0], [2, 3]])
async def test_a_further_run_with_another_number_of_children_is_refused(app: Penstock, runs: list[int]) -> None:
    resized: list[int] = []

    @app.job("resize", keep_result=True)
    async def resize(job: Job[int]) -> None:
        resized.append(job.data)

    @app.job("order", backoff=AT_ONCE, max_attempts=2)
    async def order(job: Job[Any]) -> None:
        await job.gather("resize", [resize.child(image) for image in range(runs[job.attempt - 1])])
        raise Retry("after the children")

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    job = await app.find(receipt.id)
    assert [error["type"] for error in job.errors] == ["Retry", "Conflict"]
    # What the first run was given is its result, also when it is nothing.
    assert len(resized) == runs[0]
    assert [step.state for step in await app.steps(receipt.id)] == ["done"]


async def test_a_child_that_fails_fails_the_step_and_all_children_have_ended(app: Penstock) -> None:
    ended: list[int] = []

    @app.job("resize", max_attempts=1)
    async def resize(job: Job[int]) -> None:
        ended.append(job.data)
        if job.data == 2:
            raise Fail("no image")

    @app.job("order", max_attempts=1)
    async def order(job: Job[Any]) -> None:
        try:
            await job.gather("resize", [resize.child(image) for image in range(4)])
        except JobFailed as error:
            assert "1 of the 4 children of resize did not succeed" in str(error)
            assert "no image" in str(error)
            raise

    receipt = await order.enqueue({})
    await run_due_jobs(app)
    assert (await status(app, receipt.id), sorted(ended)) == ("failed", [0, 1, 2, 3])
    assert (await app.find(receipt.id)).errors[-1]["type"] == "JobFailed"


async def test_a_job_that_is_cancelled_while_it_waits_takes_its_children_with_it(app: Penstock) -> None:
    @app.job("resize")
    async def resize(job: Job[int]) -> None: ...

    @app.job("order")
    async def order(job: Job[Any]) -> None:
        await job.gather("resize", [resize.child(image) for image in range(4)])

    receipt = await order.enqueue({})
    await run_due_jobs(app, "order")
    assert (await app.why(receipt.id)).reason == "children"
    assert await app.cancel(receipt.id) == "cancelled"
    record = await app.find(receipt.id)
    assert (record.status, record.attempt) == (Status.CANCELLED, 1)
    async with running_worker(app, "order"):
        await eventually(lambda: _group_ended(app, f"{receipt.id}.resize"))
    assert (await app.find_group(f"{receipt.id}.resize")).cancelled == 4


async def _group_ended(app: Penstock, name: str) -> bool:
    return (await app.find_group(name)).finished_at is not None


async def test_the_group_of_children_is_kept_while_their_gatherer_has_not_ended(app: Penstock, sql: Sql) -> None:
    @app.job("resize", keep_result=True)
    async def resize(job: Job[int]) -> int:
        return job.data

    @app.job("order", keep_result=True)
    async def order(job: Job[Any]) -> Any:
        return await job.gather("resize", [resize.child(7)])

    receipt = await order.enqueue({})
    await run_due_jobs(app, "order")
    await run_due_jobs(app, "resize")
    forget = "select penstock.forget_groups(now() + interval '1 day')"
    await sql.execute(forget)
    assert (await app.find_group(f"{receipt.id}.resize")).status == "succeeded"
    await run_due_jobs(app, "order")
    assert (await app.find(receipt.id)).result == [7]
    await sql.execute(forget)
    with pytest.raises(NotFound):
        await app.find_group(f"{receipt.id}.resize")
