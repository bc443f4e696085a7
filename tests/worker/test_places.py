"""A place belongs to a job from its start to its end, and comes free however it ends: none leaks, and none is left unsettled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conftest import eventually
from penstock import Job, Penstock, Settings, Status
from penstock.core.serialization import Codec
from penstock.jobs import queries as jobs
from penstock.jobs.handler import HandlerKind
from penstock.jobs.models import ClaimedJob, Options, Outcome, Settlement
from penstock.jobs.worked import WorkedType
from penstock.testing import running_worker
from penstock.worker.executor import Executor

PLACES = 4


@pytest.fixture
async def small(url: str) -> AsyncIterator[Penstock]:
    async with Penstock(url, settings=Settings(concurrency=PLACES, threads=PLACES, processes_for_handlers=PLACES)) as app:
        yield app


class Harness:
    """An executor with real jobs, without a fetcher beside it: the test decides what happens between two steps of the loop."""

    def __init__(self, app: Penstock, kind: HandlerKind) -> None:
        self.app = app
        self.kind: HandlerKind = kind
        self.results: list[Settlement] = []
        self.entered = 0

    async def open(self) -> None:
        async def on_loop(job: Job[Any]) -> None:
            self.entered += 1

        def elsewhere(job: Job[Any]) -> None:
            self.entered += 1

        options = Options()
        handler = on_loop if self.kind == "async" else elsewhere
        worked = WorkedType("brief", options, Codec(Any, "brief"), handler, self.kind)
        self.database = await self.app.database()
        await jobs.declare_job_type(self.database, "brief", options.as_json())
        await jobs.register_worker(self.database, "w", ["brief"], "", 0, 1, self.app.settings.dead_after)
        self.executor = Executor(self.database, {"brief": worked}, self.app.settings, self.results.append, lambda *_: None)

    async def claim(self) -> list[ClaimedJob]:
        await self.app.enqueue_many("brief", [{}] * PLACES)
        return (await jobs.claim(self.database, "w", ["brief"], PLACES, {})).jobs


@pytest.fixture(params=["async", "thread", "process"])
async def harness(small: Penstock, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    harness = Harness(small, request.param)
    await harness.open()
    yield harness
    harness.executor.close()


@pytest.mark.parametrize(
    ("reason", "outcome"), [("cancelled", Outcome.CANCELLED), ("moved", Outcome.RELEASED), ("shutdown", Outcome.RELEASED)]
)
async def test_a_job_that_is_stopped_before_its_first_step_frees_its_place_and_is_settled(
    harness: Harness, reason: str, outcome: Outcome
) -> None:
    claimed = await harness.claim()
    harness.executor.submit(claimed, asyncio.get_running_loop().time())
    for job in claimed:  # no step of the loop in between
        harness.executor.cancel(job.id, reason)
    await eventually(lambda: len(harness.results) == PLACES, "all results")
    assert {result.id for result in harness.results} == {job.id for job in claimed}
    if harness.kind != "thread":  # what is in a thread cannot be stopped
        assert harness.entered == 0
        assert {(result.outcome, result.detail) for result in harness.results} == {(outcome, None)}
    await eventually(lambda: harness.executor.room(harness.kind) == PLACES, "free places")
    assert harness.executor.in_flight == 0


async def test_a_job_that_is_lost_before_its_first_step_frees_its_place(harness: Harness) -> None:
    claimed = await harness.claim()
    harness.executor.submit(claimed, asyncio.get_running_loop().time())
    ending = harness.executor.abandon([job.id for job in claimed])
    await asyncio.gather(*ending, return_exceptions=True)
    await eventually(lambda: harness.executor.room(harness.kind) == PLACES, "free places")
    assert (harness.executor.in_flight, harness.results) == (0, [])


@pytest.mark.parametrize("keyed", [False, True], ids=["queue", "pool"])
async def test_thousands_of_jobs_cancelled_as_they_start_leave_every_place_free(small: Penstock, keyed: bool) -> None:
    together = asyncio.Event()
    at_once: set[str] = set()

    async def work(job: Job[Any]) -> None:
        if job.data == "brief":
            return
        at_once.add(str(job.id))
        if len(at_once) == PLACES:
            together.set()
        await together.wait()

    if keyed:
        small.pool("work").job(work)
    else:
        small.job("work")(work)

    async def cancel_each(number: int) -> None:
        for _ in range(250):
            receipt = await small.enqueue("work", "brief", key=f"k{number}" if keyed else None)
            await small.cancel(receipt.id)

    async def over() -> bool:
        return all(count.ready + count.deferred + count.in_progress == 0 for count in await small.counts())

    async with running_worker(small, at_once=True):
        await asyncio.gather(*[cancel_each(number) for number in range(8)])
        await eventually(over, "the end of all jobs")
        # Only when all places are free can these run at once.
        receipts = [await small.enqueue("work", "full", key=f"k{n}" if keyed else None) for n in range(PLACES)]
        for receipt in receipts:
            assert (await small.wait(receipt.id)).status is Status.SUCCEEDED
