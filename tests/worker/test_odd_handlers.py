"""Handlers that do odd things, each of which must become of its own job alone; and how long handlers may take."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Event, Fail, Job, JobFailed, NotFound, Penstock, Settings, Standing, Status, Stream
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


class Odd(BaseException):
    """No Exception."""


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def nested() -> BaseException:
    """A group whose traceback cannot be written: it is too deep."""
    error: Exception = ValueError("x")
    for _ in range(3_000):
        error = ExceptionGroup("group", [error])
    return error


ODD: list[Callable[[], BaseException]] = [
    Odd, Mute, lambda: Fail(ValueError("x")), StopIteration, StopAsyncIteration, asyncio.CancelledError, KeyboardInterrupt,  # type: ignore[arg-type]
    SystemExit, GeneratorExit, nested,
]  # fmt: skip


@pytest.mark.parametrize("plain", [True, False])
async def test_whatever_a_handler_raises_its_job_fails(url: str, plain: bool) -> None:
    async with Penstock(url, settings=Settings(threads=1)) as app:

        async def raise_async(job: Job[int]) -> None:
            raise ODD[job.data]()

        def raise_plain(job: Job[int]) -> None:
            raise ODD[job.data]()

        odd = app.job("odd", max_attempts=1)(raise_plain if plain else raise_async)
        receipts = await odd.enqueue_many(list(range(len(ODD))))
        async with running_worker(app, at_once=True):
            for receipt in receipts:
                with pytest.raises(JobFailed):
                    await app.wait(receipt.id, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("plain", [True, False])
async def test_run_due_jobs_ends_whatever_a_handler_raises(app: Penstock, plain: bool) -> None:
    async def raise_async(job: Job[int]) -> None:
        raise ODD[job.data]()

    def raise_plain(job: Job[int]) -> None:
        raise ODD[job.data]()

    odd = app.job("odd", max_attempts=1)(raise_plain if plain else raise_async)
    await odd.enqueue_many(list(range(len(ODD))))
    records = await asyncio.wait_for(run_due_jobs(app), 60)
    assert {record.status for record in records} == {Status.FAILED}
    assert len(records) == len(ODD)


@pytest.mark.parametrize("span", [None, timedelta(seconds=2)])
async def test_extending_a_job_moves_its_time_limit(app: Penstock, span: timedelta | None) -> None:
    @app.job("long", max_attempts=1, visibility_timeout=timedelta(seconds=2))
    async def long(job: Job[Any]) -> None:
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 3:
            await asyncio.sleep(0.1)
            await job.extend(span)

    async with running_worker(app, at_once=True):
        await app.wait((await long.enqueue()).id)


async def test_jobs_that_waited_in_a_worker_too_long_are_handed_back(url: str) -> None:
    """A worker takes some jobs ahead, by how fast they were. When they turn slow, those that wait must not fail for it."""
    go_on: threading.Event = threading.Event()
    ran: list[Any] = []
    async with Penstock(url, settings=Settings(threads=1)) as app:

        @app.job("uneven", delivery="at_most_once", visibility_timeout=timedelta(seconds=2))
        def uneven(job: Job[bool]) -> None:
            ran.append(job.id)
            if job.data:
                go_on.wait(30)

        quick = await uneven.enqueue_many([False] * 500)
        slow = await uneven.enqueue_many([True] * 20)
        database = await app.database()
        async with running_worker(app, at_once=True):
            await app.wait(quick[-1].id)
            await eventually(lambda: _held(database, at_least=2), "jobs taken ahead")
            with pytest.raises(JobFailed, match="time limit"):
                await app.wait(slow[0].id)
            go_on.set()
            failed = []
            for receipt in slow:
                try:
                    await app.wait(receipt.id)
                except JobFailed:
                    failed.append(receipt.id)
        assert set(failed) <= set(ran)


async def _held(database: Any, at_least: int) -> bool:
    return bool(await database.fetchval("select coalesce(sum(open_jobs), 0) from penstock.leases") >= at_least)


@pytest.mark.parametrize("plain", [True, False])
async def test_whatever_a_consumer_raises_its_policy_is_followed(app: Penstock, plain: bool) -> None:
    events = app.stream("events", int, partitions=1)
    handled: list[int] = []

    def handle(event: Event[int]) -> None:
        if event.data < len(ODD):
            raise ODD[event.data]()
        handled.append(event.data)

    async def handle_async(event: Event[int]) -> None:
        handle(event)

    events.consumer(group="g", on_failure="dead-letter")(handle if plain else handle_async)
    await events.append_many([*range(len(ODD)), 99])
    async with running_worker(app, at_once=True):
        await eventually(lambda: handled == [99], "the event behind those that fail")
        dead = app.stream("events.dead", int)
        await eventually(lambda: _ends(dead, len(ODD)), "the dead letters")


async def _ends(stream: Stream[int], at: int) -> bool:
    with suppress(NotFound):
        return sum(bounds.next for bounds in (await stream.bounds()).values()) == at
    return False


async def test_whatever_a_standing_job_raises_the_others_run(app: Penstock, sql: Sql) -> None:
    pool = app.pool("tenants", int, slots=16)
    runs: Counter[int] = Counter()

    @pool.standing
    async def run(job: Standing[int]) -> AsyncIterator[None]:
        runs[job.data] += 1
        if job.data < len(ODD):
            raise ODD[job.data]()
        yield

    for number in range(len(ODD) + 1):
        await pool.start(f"key-{number}", number)
    async with running_worker(app, at_once=True):
        failed = "select count(*) from penstock.standing_jobs where failures >= 2"

        async def all_failed_twice() -> bool:
            return bool(await sql.fetchval(failed) == len(ODD))

        await eventually(all_failed_twice, "each run's failure is written, and it runs again")
        assert runs[len(ODD)] == 1


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("per_worker", [True, False])
async def test_whatever_a_timer_raises_its_next_time_comes(app: Penstock, plain: bool, per_worker: bool) -> None:
    calls: Counter[int] = Counter()

    def declare(number: int) -> None:
        def tick() -> None:
            calls[number] += 1
            raise ODD[number]()

        async def tick_async() -> None:
            tick()

        as_job = None if per_worker else False
        named = app.timer(every=timedelta(milliseconds=100), name=f"odd-{number}", per_worker=per_worker, as_job=as_job)
        named(tick if plain else tick_async)

    for number in range(len(ODD)):
        declare(number)
    async with running_worker(app, at_once=True):
        await eventually(lambda: all(calls[number] >= 3 for number in range(len(ODD))), "three times of each timer")
