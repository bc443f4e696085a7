"""Job types share the places of a process: one that has very much work does not keep another from starting."""

from __future__ import annotations

import asyncio
import importlib
import random
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import Job, Jobs, Penstock, Settings, Status
from penstock.testing import running_worker
from tests.waiting import eventually


class Long:
    """A handler whose jobs last until they are released."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.ended = 0
        self._one = asyncio.Semaphore(0)

    async def __call__(self, job: Job[Any]) -> None:
        self.running.append(job.id)
        await self._one.acquire()
        self.ended += 1

    def release(self, jobs: int = 1) -> None:
        for _ in range(jobs):
            self._one.release()


async def ends_before(others: asyncio.Queue[Any], long: Long) -> int:
    """How many long jobs end, one after the other, until a job of another source starts.

    The notification of a job that has just been enqueued can come after the first place is free: then it gets the next one.
    """
    ended = 0
    while others.empty():
        running = len(long.running)
        long.release()
        ended += 1
        await eventually(lambda running=running: not others.empty() or len(long.running) > running, "a start")
    others.get_nowait()
    return ended


def with_places(url: str, places: int, **settings: Any) -> Penstock:
    return Penstock(url, settings=Settings(concurrency=places, **settings))


@pytest.mark.parametrize("first", ["long", "other"])
async def test_beside_a_thousand_long_jobs_another_type_starts_without_any_of_them_ending(url: str, first: str) -> None:
    async with with_places(url, 5) as app:
        long, others = Long(), asyncio.Queue[Any]()

        async def other(job: Job[Any]) -> None:
            others.put_nowait(job.id)

        handlers: dict[str, Any] = {"long": long.__call__, "other": other}
        for name in sorted(handlers, reverse=first == "other"):
            app.job(name)(handlers[name])
        await app.enqueue_many("long", [{}] * 1_000)
        receipt = await app.enqueue("other")
        async with running_worker(app):
            assert await asyncio.wait_for(others.get(), 60) == receipt.id
            # And the long ones have all places that no other type needs.
            await eventually(lambda: len(long.running) == 5, "all places")
            assert long.ended == 0
            long.release(2_000)


@pytest.mark.parametrize(("long", "other", "places"), [("long", "other", 2), ("long-thread", "other-thread", 3)])
async def test_a_type_gets_a_place_of_threads_and_of_processes(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: str, other: str, places: int
) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    sharing = importlib.reload(importlib.import_module("tests.worker.sharing_app"))
    async with sharing.app as app:
        await app.enqueue_many(long, [{"folder": str(tmp_path)}] * 50)
        receipt = await app.enqueue(other, {})
        async with running_worker(app):
            try:
                record = await app.wait(receipt.id, timeout=timedelta(seconds=60))
                assert record.status is Status.SUCCEEDED
                await eventually(lambda: len(list(tmp_path.iterdir())) == places, "all places")
                assert not list(await app.find_many(name=long, status="succeeded"))
            finally:
                (tmp_path / "end").touch()


async def test_a_type_that_begins_to_have_work_gets_the_next_place(url: str) -> None:
    async with with_places(url, 3) as app:
        long, others = Long(), asyncio.Queue[Any]()
        app.job("long")(long.__call__)

        @app.job("other")
        async def other(job: Job[Any]) -> None:
            others.put_nowait(job.id)
            await asyncio.Event().wait()

        await app.enqueue_many("long", [{}] * 1_000)
        async with running_worker(app, at_once=True):
            await eventually(lambda: len(long.running) == 3, "all places")
            receipt = await app.enqueue("other")
            long.release()
            assert await asyncio.wait_for(others.get(), 60) == receipt.id
            assert len(long.running) == 3, "none of the long type came before it"
            long.release(2_000)


async def test_more_types_than_places_take_turns(url: str) -> None:
    seed = secrets.randbits(32)
    print("seed", seed)
    dice = random.Random(seed)
    async with with_places(url, 2) as app:
        starts: list[str] = []
        names = [f"t{number}" for number in range(5)]

        async def handle(job: Job[Any]) -> None:
            starts.append(job.name)
            # Longer than what a worker claims ahead of its places.
            await asyncio.sleep(0.05)

        for name in dice.sample(names, 5):
            app.job(name)(handle)
        for name in dice.sample(names, 5):
            await app.enqueue_many(name, [{}] * 8)
        async with running_worker(app):
            await eventually(lambda: len(starts) == 40, "all jobs")
    # No type is served a third time before every other one was served for the first time, and so on.
    for number in range(1, 41):
        served = [starts[:number].count(name) for name in names]
        assert max(served) - min(served) <= 2, starts


async def test_a_pool_and_the_copies_of_a_topic_get_places_beside_a_queue(url: str) -> None:
    async with with_places(url, 6) as app:
        long, others = Long(), asyncio.Queue[str]()
        pool = app.pool("keyed")
        topic = app.topic("news")
        app.job("long")(long.__call__)

        @pool.job
        async def keyed(job: Job[Any]) -> None:
            others.put_nowait("keyed")
            await asyncio.Event().wait()

        @topic.subscriber("mail")
        async def mail(job: Job[Any]) -> None:
            others.put_nowait("mail")
            await asyncio.Event().wait()

        async with running_worker(app, at_once=True):
            await app.enqueue_many("long", [{}] * 1_000)
            await eventually(lambda: len(long.running) == 6, "all places")
            await pool.enqueue("a", {})
            await topic.publish({})
            assert await ends_before(others, long) + await ends_before(others, long) <= 3
            long.release(2_000)


async def test_a_queue_gets_places_beside_a_pool(url: str) -> None:
    async with with_places(url, 4) as app:
        long, others = Long(), asyncio.Queue[Any]()
        pool = app.pool("keyed")
        pool.job(long.__call__)

        @app.job("other")
        async def other(job: Job[Any]) -> None:
            others.put_nowait(job.id)
            await asyncio.Event().wait()

        async with running_worker(app, at_once=True):
            for key in range(40):
                await pool.enqueue(str(key), {})
            await eventually(lambda: len(long.running) == 4, "all places")
            await app.enqueue("other")
            assert await ends_before(others, long) <= 2
            long.release(2_000)


async def test_a_free_thread_is_filled_although_the_loop_has_places_and_nothing_to_do(url: str) -> None:
    """The worker rests, since it found nothing for the loop; it has to look when a thread is free."""
    async with with_places(url, 10, threads=1, poll_interval=300.0) as app:
        done: list[Any] = []

        @app.job("threaded")
        def threaded(job: Job[Any]) -> None:
            done.append(job.id)

        @app.job("idle")
        async def idle(job: Job[Any]) -> None:
            """Nothing."""

        @app.job("batches", max_batch_size=5)
        async def batches(jobs: Jobs[Any]) -> None:
            """Nothing."""

        await app.enqueue_many("threaded", [{}] * 30)
        async with running_worker(app):
            await eventually(lambda: len(done) == 30, "all jobs")


async def test_jobs_of_a_long_type_are_left_to_other_workers_while_short_ones_are_claimed_ahead(url: str) -> None:
    async with with_places(url, 4) as app:
        long = Long()
        app.job("long")(long.__call__)
        short = 0

        @app.job("short")
        async def count(job: Job[Any]) -> None:
            nonlocal short
            short += 1

        await app.enqueue_many("short", [{}] * 3_000)
        async with running_worker(app, at_once=True):
            await eventually(lambda: short > 1_000, "short jobs at full speed")
            await app.enqueue_many("long", [{}] * 100)
            await eventually(lambda: len(long.running) == 3 or (short == 3_000 and len(long.running) == 4), "long jobs")

            async def held() -> int:
                return sum(each.in_progress for each in await app.counts() if each.name == "long")

            await eventually(lambda: short == 3_000, "the short jobs, beside the long ones")
            assert await held() <= 4
            long.release(2_000)
