"""Groups of errors, as a task group in a handler raises them: the error that decides what becomes of the job."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from penstock import Event, Fail, Job, OnFailure, Penstock, Retry, Snooze, Status
from penstock.core.user_code import verdict_of
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

SOON, LATER = timedelta(minutes=1), timedelta(hours=1)


async def raising(*errors: Exception) -> None:
    """Raise each error in a task of its own, in a task group within a task group."""

    async def one(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        for error in errors:
            inner.create_task(one(error))
        outer.create_task(asyncio.sleep(0))


@pytest.mark.parametrize(
    ("errors", "decides"),
    [
        ([ValueError("x"), Fail("never")], 1),
        ([Snooze(LATER), ValueError("x")], 1),
        ([Snooze(LATER), Retry("away")], 1),
        ([Retry("away", after=SOON), Retry("away", after=LATER)], 1),
        ([Snooze(SOON), Snooze(LATER)], 1),
        ([ValueError("x"), KeyError("y")], 0),
    ],
)
def test_one_error_of_a_group_decides(errors: list[Exception], decides: int) -> None:
    assert verdict_of(ExceptionGroup("outer", [ExceptionGroup("inner", errors)])) is errors[decides]


async def test_a_job_whose_task_group_raises_fail_is_not_retried(app: Penstock) -> None:
    @app.job
    async def pay(job: Job[int]) -> None:
        await raising(ValueError("x"), Fail("never"))

    await pay.enqueue(1)
    [record] = await run_due_jobs(app)
    assert (record.status, len(record.errors)) == (Status.FAILED, 1)
    assert "Fail: never" in record.errors[0]["traceback"]


async def test_a_job_whose_task_group_raises_snooze_uses_no_attempt(app: Penstock) -> None:
    @app.job(max_attempts=1)
    async def pay(job: Job[int]) -> None:
        await raising(Snooze(LATER))

    receipt = await pay.enqueue(1)
    await run_due_jobs(app)
    record = await app.find(receipt.id)
    assert (record.status, record.attempt, record.errors) == (Status.QUEUED, 1, [])


async def test_an_event_whose_task_group_raises_fail_is_not_retried(app: Penstock) -> None:
    events, seen = app.stream("events", int, partitions=1), list[int]()

    @events.consumer(group="g", on_failure=OnFailure(max_attempts=3, then="quarantine"))
    async def handle(event: Event[int]) -> None:
        seen.append(event.data)
        await raising(Fail("never"))

    await events.append(1)

    async def quarantined() -> bool:
        return any(lag.quarantined for lag in await events.lag("g"))

    async with running_worker(app, at_once=True):
        await eventually(quarantined, "the quarantine of the partition")
    assert seen == [1]
