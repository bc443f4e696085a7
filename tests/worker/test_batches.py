"""Batch handlers: one call for many jobs, and each job with its own outcome, time limit, cancellation and key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated, Any

import pytest

from penstock import Backoff, Depends, Fail, InvalidInput, Job, Jobs, NewJob, Penstock, Retry
from penstock.testing import run_due_jobs, running_worker

QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=10))


async def test_a_batch_is_one_call_for_many_jobs(app: Penstock) -> None:
    sizes: list[int] = []

    @app.job(max_batch_size=50, linger=timedelta(milliseconds=50), keep_result=True)
    async def index(jobs: list[Job[int]]) -> list[int]:
        sizes.append(len(jobs))
        return [job.data * 2 for job in jobs]

    receipts = await index.enqueue_many(range(120))
    records = await run_due_jobs(app)
    assert (sum(sizes), max(sizes)) == (120, 50)
    assert sorted(record.result for record in records) == [number * 2 for number in range(120)]
    assert {record.id for record in records} == {receipt.id for receipt in receipts}


async def test_a_plain_batch_handler_runs_in_a_thread_and_may_return_nothing(app: Penstock) -> None:
    seen: list[int] = []

    @app.job(max_batch_size=10)
    def index(jobs: Jobs[int]) -> None:
        seen.extend(job.data for job in jobs)

    await index.enqueue_many(range(30))
    records = await run_due_jobs(app)
    assert sorted(seen) == list(range(30))
    assert {str(record.status) for record in records} == {"succeeded"}


async def test_each_job_of_a_batch_has_its_own_outcome(app: Penstock) -> None:
    calls: list[list[int]] = []

    @app.job(max_batch_size=10, linger=timedelta(milliseconds=50), max_attempts=3, backoff=QUICK, keep_result=True)
    async def index(jobs: list[Job[int]]) -> list[Any]:
        calls.append([job.data for job in jobs])
        answer: list[Any] = []
        for job in jobs:
            if job.data == 1 and job.attempt == 1:
                answer.append(Retry("later", after=timedelta(0)))
            elif job.data == 2:
                answer.append(Fail("never"))
            elif job.data == 3 and job.attempt < 3:
                answer.append(ValueError("odd"))
            else:
                answer.append(job.data)
        return answer

    receipts = await index.enqueue_many(range(5))
    async with running_worker(app):
        records = [await app_finished(app, receipt.id) for receipt in receipts]
    assert [str(record.status) for record in records] == ["succeeded", "succeeded", "failed", "succeeded", "succeeded"]
    assert [len(record.errors) for record in records] == [0, 1, 1, 2, 0]
    assert [record.result for record in records] == [0, 1, None, 3, 4]


async def test_the_class_of_an_exception_is_an_outcome_as_it_can_be_raised(app: Penstock) -> None:
    @app.job(max_batch_size=10, linger=timedelta(milliseconds=50), max_attempts=1)
    async def index(jobs: list[Job[int]]) -> list[Any]:
        return [ValueError, UnicodeDecodeError, int][: len(jobs)]

    await index.enqueue_many(range(3))
    records = await run_due_jobs(app)
    assert [[error["type"] for error in record.errors] for record in records] == [["ValueError"], ["TypeError"], []]


async def app_finished(app: Penstock, id: Any) -> Any:
    async with asyncio.timeout(30):
        while not (record := await app.find(id)).status.finished:
            await asyncio.sleep(0.02)
    return record


async def test_a_handler_may_sort_its_jobs_and_answer_in_that_order(app: Penstock) -> None:
    @app.job(max_batch_size=10, linger=timedelta(milliseconds=50), keep_result=True)
    async def index(jobs: list[Job[int]]) -> list[Any]:
        jobs.sort(key=lambda job: -job.data)
        return [Fail("odd") if job.data == 3 else job.data for job in jobs]

    receipts = await index.enqueue_many(range(5))
    await run_due_jobs(app)
    records = [await app.find(receipt.id) for receipt in receipts]
    assert [record.result for record in records] == [0, 1, 2, None, 4]
    assert [str(record.status) for record in records] == ["succeeded", "succeeded", "succeeded", "failed", "succeeded"]


@pytest.mark.parametrize("answer", [[1], "ab", 5, [1, 2, 3, 4]])
async def test_an_answer_that_does_not_fit_the_batch_fails_its_jobs(app: Penstock, answer: Any) -> None:
    @app.job(max_batch_size=3, linger=timedelta(milliseconds=50), max_attempts=1)
    async def index(jobs: list[Job[int]]) -> Any:
        return answer

    await index.enqueue_many(range(3))
    records = await run_due_jobs(app)
    assert {record.errors[-1]["type"] for record in records} == {"InvalidInput"}
    assert all("for 3 jobs" in record.errors[-1]["message"] for record in records)


async def test_an_error_of_the_call_fails_each_job_with_a_short_traceback(app: Penstock) -> None:
    @app.job(max_batch_size=200, linger=timedelta(milliseconds=50), max_attempts=1)
    async def index(jobs: list[Job[int]]) -> None:
        raise ValueError("the index is closed")

    await index.enqueue_many(range(200))
    records = await run_due_jobs(app)
    assert len(records) == 200
    traces = {len(record.errors[-1]["traceback"].splitlines()) for record in records}
    assert max(traces) < 20
    assert all("the index is closed" in record.errors[-1]["traceback"] for record in records)


async def test_batches_by_key_have_one_key_each(app: Penstock) -> None:
    batches: list[set[str | None]] = []

    @app.job(max_batch_size=10, linger=timedelta(milliseconds=20), batch_by_key=True)
    async def index(jobs: list[Job[int]]) -> None:
        batches.append({job.key for job in jobs})

    await index.enqueue_many([NewJob(number, key=f"k{number % 3}") for number in range(30)])
    await run_due_jobs(app)
    assert all(len(keys) == 1 for keys in batches)
    assert {key for keys in batches for key in keys} == {"k0", "k1", "k2"}


async def test_a_cancelled_job_leaves_its_batch_and_the_others_go_on(app: Penstock) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @app.job(max_batch_size=3, linger=timedelta(milliseconds=100))
    async def index(jobs: list[Job[int]]) -> None:
        started.set()
        await go_on.wait()

    receipts = await index.enqueue_many(range(3))
    async with running_worker(app):
        await started.wait()
        await app.cancel(receipts[1].id)
        cancelled = await app_finished(app, receipts[1].id)
        go_on.set()
        others = [await app_finished(app, receipts[place].id) for place in (0, 2)]
    assert str(cancelled.status) == "cancelled"
    assert [str(record.status) for record in others] == ["succeeded", "succeeded"]


async def test_a_job_that_is_cancelled_while_the_middleware_waits_is_not_handed_to_the_handler(app: Penstock) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    around: list[list[int]] = []

    @app.middleware
    async def waits(work: Any, call_next: Any) -> Any:
        around.append([job.data for job in work])
        started.set()
        await go_on.wait()
        answer = await call_next(work)
        around.append([job.data for job in work])
        return answer

    @app.job(max_batch_size=3, linger=timedelta(seconds=10), keep_result=True)
    async def index(jobs: list[Job[int]]) -> list[int]:
        return [job.data * 10 for job in jobs]

    receipts = await index.enqueue_many([1, 2, 3])
    async with running_worker(app):
        await started.wait()
        await app.cancel(receipts[1].id)
        cancelled = await app_finished(app, receipts[1].id)
        go_on.set()
        others = [await app_finished(app, receipts[place].id) for place in (0, 2)]
    assert str(cancelled.status) == "cancelled"
    assert [other.result for other in others] == [10, 30]
    assert around == [[1, 2, 3], [1, 3]]


async def test_a_batch_that_runs_too_long_is_stopped(app: Penstock) -> None:
    ended: list[str] = []

    @app.job(max_batch_size=3, linger=timedelta(milliseconds=20), max_attempts=1, time_limit=timedelta(seconds=1))
    async def index(jobs: list[Job[int]]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    await index.enqueue_many(range(3))
    records = await run_due_jobs(app)
    assert {record.errors[-1]["type"] for record in records} == {"TimeLimit"}
    assert ended


async def test_middleware_and_dependencies_are_around_the_batch(app: Penstock) -> None:
    seen: list[Any] = []

    async def get_session(jobs: Jobs[Any]) -> AsyncIterator[str]:
        yield f"session for {len(jobs)}"
        seen.append("commit")

    @app.middleware
    async def counted(work: Any, call_next: Any) -> Any:
        seen.append(len(work))
        return await call_next(work)

    @app.job(max_batch_size=5, linger=timedelta(milliseconds=50))
    async def index(jobs: list[Job[int]], session: Annotated[str, Depends(get_session)]) -> None:
        seen.append(session)

    await index.enqueue_many(range(5))
    await run_due_jobs(app)
    assert seen == [5, "session for 5", "commit"]


async def test_the_rate_and_concurrency_of_a_type_hold_job_by_job(app: Penstock) -> None:
    most = 0

    @app.job(max_batch_size=50, linger=timedelta(milliseconds=20), concurrency=7)
    async def index(jobs: list[Job[int]]) -> None:
        nonlocal most
        most = max(most, len(jobs))

    receipts = await index.enqueue_many(range(40))
    async with running_worker(app):
        for receipt in receipts:
            await app_finished(app, receipt.id)
    assert 1 <= most <= 7


def in_process(jobs: list[Job[int]]) -> None: ...


def test_wrong_batch_handlers_are_refused() -> None:
    app = Penstock("postgresql://nowhere/x")

    async def one(job: Job[int]) -> None: ...
    async def many(jobs: list[Job[int]]) -> None: ...
    async def more(jobs: list[Job[int]], path: str) -> None: ...

    with pytest.raises(InvalidInput, match="lists of jobs and max_batch_size go together"):
        app.job("x", max_batch_size=3)(one)
    with pytest.raises(InvalidInput, match="lists of jobs and max_batch_size go together"):
        app.job("x")(many)
    with pytest.raises(InvalidInput, match="batches are not sent to processes"):
        app.job("x", max_batch_size=3, executor="process")(in_process)
    with pytest.raises(InvalidInput, match="takes a list of jobs, and path besides"):
        app.job("x", max_batch_size=3)(more)
    with pytest.raises(InvalidInput, match="need max_batch_size"):
        app.job("x", linger=timedelta(seconds=1))
    with pytest.raises(InvalidInput, match="max_batch_size of x must be an integer"):
        app.job("x", max_batch_size=0)
