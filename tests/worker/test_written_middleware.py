"""Middleware as users write it: retries, a time limit, and metrics, around handlers of every form, in a real worker.

Each is short. docs/jobs.md ("Around handlers") has three of the kind: what Penstock has built in can be written with middleware.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from penstock import Batch, Fail, Job, JobRecord, Jobs, Penstock, Retry, Status, Tick
from penstock.testing import consumed, running_worker
from tests.waiting import eventually

CallNext = Callable[[Any], Awaitable[Any]]
FORMS = ["async", "thread", "async batch", "thread batch", "message"]


class Busy(Exception):
    """A service that is called answers that it is busy."""


# -- what a user writes


def retries(tries: int, pause: timedelta) -> Callable[[Any, CallNext], Awaitable[Any]]:
    """Middleware: a job that meets a busy service comes again after a pause, until it has been tried so often."""

    def of(job: Job[Any], error: BaseException) -> Exception:
        if job.attempt < tries:
            return Retry(f"busy, attempt {job.attempt}", after=pause)
        return Fail(f"busy {tries} times")

    async def retry(work: Any, call_next: CallNext) -> Any:
        try:
            outcomes = await call_next(work)
        except Busy as error:
            if not isinstance(work, Jobs):
                raise of(work, error) from error
            return [of(job, error) for job in work]
        if isinstance(work, Jobs) and outcomes is not None:
            return [of(job, one) if isinstance(one, Busy) else one for job, one in zip(work, outcomes, strict=True)]
        return outcomes

    return retry


def time_limit(limit: timedelta) -> Callable[[Any, CallNext], Awaitable[Any]]:
    """Middleware: what takes longer than the limit fails."""

    async def limited(work: Any, call_next: CallNext) -> Any:
        async with asyncio.timeout(limit.total_seconds()):
            return await call_next(work)

    return limited


@dataclass
class Metrics:
    """Middleware: counts what ended, by its name and outcome, and measures how long it took."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    async def __call__(self, work: Any, call_next: CallNext) -> Any:
        began = time.perf_counter()
        jobs = work if isinstance(work, Jobs) else [work]
        outcomes: list[Any] = [None] * len(jobs)
        try:
            result = await call_next(work)
            if isinstance(work, Jobs) and result is not None:
                outcomes = result
            return result
        except Exception as error:
            outcomes = [error] * len(jobs)
            raise
        finally:
            for one, outcome in zip(jobs, outcomes, strict=True):
                name = one.stream if isinstance(one, Batch) else one.name
                self.ended[name, type(outcome).__name__ if isinstance(outcome, BaseException) else "ok"] += 1
                self.seconds[name] += time.perf_counter() - began


# -- handlers of every form


def declare(app: Penstock, form: str, called: Callable[[Job[Any]], None]) -> Callable[[Any], Awaitable[Any]]:
    """Declare a handler of this form that calls a function for each job. Returns what makes it a job."""

    async def asked(job: Job[Any]) -> None:
        called(job)

    def plain(job: Job[Any]) -> None:
        called(job)

    def outcome(job: Job[Any]) -> Any:
        try:
            return called(job)
        except Exception as error:
            return error

    async def batch(jobs: list[Job[Any]]) -> list[Any]:
        return [outcome(job) for job in jobs]

    def plain_batch(jobs: list[Job[Any]]) -> list[Any]:
        return [outcome(job) for job in jobs]

    options: dict[str, Any] = {"max_attempts": 10}
    in_batches: dict[str, Any] = {"max_batch_size": 5, "linger": timedelta(milliseconds=20)}
    match form:
        case "async":
            return app.job("work", **options)(asked).enqueue
        case "thread":
            return app.job("work", **options)(plain).enqueue
        case "async batch":
            return app.job("work", **options, **in_batches)(batch).enqueue
        case "thread batch":
            return app.job("work", **options, **in_batches)(plain_batch).enqueue
        case _:
            topic = app.topic("memos")
            topic.subscriber("all", **options)(asked)
            return topic.publish


async def records(app: Penstock, count: int) -> list[JobRecord]:
    """All jobs, once so many are finished, in the order of their payloads."""

    async def finished() -> list[JobRecord] | None:
        found = [job for job in await app.find_many(limit=1_000) if job.status.finished]
        return found if len(found) == count else None

    found = await eventually(finished, f"{count} finished jobs")
    full = [await app.find(job.id) for job in found]
    return sorted(full, key=lambda job: str(job.data))


@pytest.mark.parametrize("form", FORMS)
async def test_retries_can_be_written_as_middleware(app: Penstock, form: str) -> None:
    attempts: Counter[int] = Counter()

    def called(job: Job[Any]) -> None:
        attempts[job.data] = job.attempt
        if job.data == 2 or (job.data == 1 and job.attempt < 3):
            raise Busy("the service is busy")

    app.middleware(retries(tries=4, pause=timedelta(milliseconds=20)))
    give = declare(app, form, called)
    async with running_worker(app):
        for number in range(3):
            await give(number)
        at_once, later, never = await records(app, 3)
    assert [job.status for job in (at_once, later, never)] == [Status.SUCCEEDED, Status.SUCCEEDED, Status.FAILED]
    assert attempts == {0: 1, 1: 3, 2: 4}
    assert [error["message"] for error in later.errors] == ["busy, attempt 1", "busy, attempt 2"]
    # Not tried for the fifth time, though its type permits ten attempts.
    assert [error["message"] for error in never.errors][-1] == "busy 4 times"


@pytest.mark.parametrize("form", FORMS)
async def test_a_time_limit_can_be_written_as_middleware(app: Penstock, form: str) -> None:
    held = threading.Event()
    cancelled: list[Any] = []
    app.middleware(time_limit(timedelta(milliseconds=300)))

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("the handler is told")
            raise

    async def asked(job: Job[Any]) -> None:
        if job.data == 1:
            await hangs()

    def plain(job: Job[Any]) -> None:
        if job.data == 1:
            held.wait()

    async def batch(jobs: list[Job[Any]]) -> None:
        if jobs[0].data == 1:
            await hangs()

    def plain_batch(jobs: list[Job[Any]]) -> None:
        if jobs[0].data == 1:
            held.wait()

    in_batches: dict[str, Any] = {"max_batch_size": 1, "max_attempts": 1}
    topic = app.topic("memos")
    give: Callable[[Any], Awaitable[Any]] = topic.publish
    if form == "message":
        topic.subscriber("all", max_attempts=1)(asked)
    elif "batch" in form:
        give = app.job("work", **in_batches)(batch if form == "async batch" else plain_batch).enqueue
    else:
        give = app.job("work", max_attempts=1)(asked if form == "async" else plain).enqueue
    try:
        async with running_worker(app):
            for number in range(3):
                await give(number)
            first, second, third = await records(app, 3)
            held.set()
    finally:
        held.set()
    assert [job.status for job in (first, second, third)] == [Status.SUCCEEDED, Status.FAILED, Status.SUCCEEDED]
    assert second.errors[-1]["type"] == "TimeoutError"
    assert cancelled == ([] if "thread" in form else ["the handler is told"])


@pytest.mark.parametrize("form", FORMS)
async def test_metrics_can_be_written_as_middleware(app: Penstock, form: str) -> None:
    metrics = Metrics()
    app.middleware(metrics)

    def called(job: Job[Any]) -> None:
        if job.data == 1 and job.attempt == 1:
            raise Busy("once")
        if job.data == 2:
            raise Fail("for good")

    give = declare(app, form, called)
    async with running_worker(app):
        for number in range(4):
            await give(number)
        # The first retry comes after the backoff of two seconds, unless it is asked for now.
        await eventually(lambda: sum(metrics.ended.values()) == 4, "a first attempt of each")
        for job in await app.find_many(name="memos_all" if form == "message" else "work", limit=10):
            if not job.status.finished:
                await (await app.database()).fetch("select penstock.run_now(array[$1::uuid])", job.id)
        await records(app, 4)
    name = "memos_all" if form == "message" else "work"
    assert metrics.ended == {(name, "ok"): 3, (name, "Busy"): 1, (name, "Fail"): 1}
    assert metrics.seconds[name] > 0


async def test_the_same_middleware_is_around_consumers_and_schedules(app: Penstock) -> None:
    metrics = Metrics()
    app.middleware(metrics)
    orders = app.stream("orders", int, partitions=1)
    taken: list[int] = []

    @orders.consumer(group="billing", max_batch_size=10)
    async def bill(batch: Batch[int]) -> None:
        taken.extend(batch.records())

    @app.timer(every=timedelta(milliseconds=100), as_job=False)
    async def beat(tick: Tick) -> None:
        raise Busy("no pulse")

    await orders.append_many(range(5))
    async with running_worker(app):
        await consumed(orders, "billing")
        await eventually(lambda: metrics.ended["beat", "Busy"] >= 2, "runs of the timer")
    assert taken == [0, 1, 2, 3, 4]
    assert metrics.ended["orders", "ok"] >= 1


async def test_a_call_can_be_repeated_at_once_by_middleware(app: Penstock) -> None:
    """Retries within the attempt: the handler is called again, with dependencies of its own."""
    calls: Counter[int] = Counter()

    @app.middleware
    async def at_once(work: Any, call_next: CallNext) -> Any:
        for _ in range(2):
            try:
                return await call_next(work)
            except Busy:
                pass
        return await call_next(work)

    def called(job: Job[Any]) -> None:
        calls[job.data] += 1
        if calls[job.data] < 3:
            raise Busy("twice")

    give = declare(app, "thread", called)
    async with running_worker(app):
        await give(7)
        [record] = await records(app, 1)
    assert (record.status, record.attempt, record.errors) == (Status.SUCCEEDED, 1, [])
    assert calls == {7: 3}


async def test_all_three_together_see_each_others_outcomes_in_their_order(app: Penstock) -> None:
    """Outermost first: the metrics count what the retries made of what the time limit raised."""
    metrics = Metrics()

    @app.middleware
    async def outer(work: Any, call_next: CallNext) -> Any:
        return await metrics(work, call_next)

    @app.middleware
    async def slow_is_busy(work: Any, call_next: CallNext) -> Any:
        try:
            return await call_next(work)
        except TimeoutError as error:
            raise Retry("too slow", after=timedelta(milliseconds=10)) from error

    app.middleware(time_limit(timedelta(milliseconds=200)))

    @app.job
    async def work(job: Job[int]) -> None:
        if job.attempt == 1:
            await asyncio.Event().wait()

    async with running_worker(app):
        await work.enqueue(1)
        [record] = await records(app, 1)
    assert (record.status, record.attempt) == (Status.SUCCEEDED, 2)
    assert metrics.ended == {("work", "Retry"): 1, ("work", "ok"): 1}
