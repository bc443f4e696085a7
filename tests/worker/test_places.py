"""A place belongs to a job from its start to its end, and comes free however it ends: none leaks, and none is left unsettled."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import structlog

from penstock import Job, Jobs, Penstock, Settings, Status
from penstock.core.serialization import Codec
from penstock.jobs import claim_queries, type_queries, worker_queries
from penstock.jobs.handler import HandlerKind
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.jobs.options import Options
from penstock.jobs.worked import BatchOptions, WorkedType
from penstock.testing import running_worker
from penstock.worker.executor import Executor
from tests.waiting import eventually

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
        await type_queries.declare_job_type(self.database, "brief", options.as_json())
        await worker_queries.register_worker(self.database, "w", ["brief"], "", 0, 1, self.app.settings.dead_after)
        self.executor = Executor(self.database, {"brief": worked}, self.app.settings, self.results.append, lambda *_: None)

    async def claim(self) -> list[ClaimedJob]:
        await self.app.enqueue_many("brief", [{}] * PLACES)
        return (await claim_queries.claim(self.database, "w", ["brief"], PLACES, {})).jobs


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
    assert await harness.executor.finished(None), "no task is left, and not all jobs are settled"
    assert sorted(result.id for result in harness.results) == sorted(job.id for job in claimed)
    if harness.kind == "thread":  # what is in a thread cannot be stopped
        await eventually(lambda: harness.executor.places[harness.kind] == (0, PLACES), "free places")
    else:
        assert harness.entered == 0
        assert {(result.outcome, result.detail) for result in harness.results} == {(outcome, None)}
    assert (harness.executor.places[harness.kind], harness.executor.in_flight) == ((0, PLACES), 0)


async def test_a_job_that_is_lost_before_its_first_step_frees_its_place(harness: Harness) -> None:
    claimed = await harness.claim()
    harness.executor.submit(claimed, asyncio.get_running_loop().time())
    ending = harness.executor.abandon([job.id for job in claimed])
    await asyncio.gather(*ending, return_exceptions=True)
    assert (harness.executor.places[harness.kind], harness.executor.in_flight, harness.results) == ((0, PLACES), 0, [])


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


SHAPES = ("async", "thread", "process", "batch", "once")


def in_process(job: Job[Any]) -> None:
    """Waits at the gate of its round, a file."""
    here = Path(job.data["folder"], str(job.id))
    here.touch()
    deadline = time.monotonic() + 60
    while not Path(job.data["folder"], f"open-{job.data['round']}").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    here.unlink()


class Gate(threading.Event):
    """A gate that opens for other processes too, which see a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def set(self) -> None:
        self._file.touch()
        super().set()


class Shaped:
    """An executor of jobs that wait at a gate, of one shape; counts how many are at the gate together.

    Attributes:
        owns: Whether the jobs are still its own.
        seen: The jobs that were handed to the handler, of the shapes on the loop and of batches.
    """

    def __init__(self, app: Penstock, shape: str, folder: Path) -> None:
        self.app = app
        self.shape = shape
        self.folder = folder
        self.batch = BatchOptions(PLACES // 2, timedelta(0), False)
        self.owns = True
        self.results: list[Settlement] = []
        self.seen: set[UUID] = set()
        self._at_gate: set[UUID] = set()
        # Jobs of each call of `submitted` have a gate of their own: a thread may begin with a job after that was lost.
        self.gates: list[Gate] = []

    @property
    def gate(self) -> Gate:
        """The gate of the jobs that were submitted last."""
        return self.gates[-1]

    @property
    def at_gate(self) -> set[UUID]:
        """The jobs that wait at a gate."""
        if self.shape == "process":
            return {UUID(file.name) for file in self.folder.iterdir() if not file.name.startswith("open-")}
        return self._at_gate

    async def open(self) -> None:
        async def on_loop(job: Job[Any]) -> None:
            await self._wait([job])

        async def together(jobs: Jobs[Any]) -> None:
            await self._wait(jobs)

        def in_thread(job: Job[Any]) -> None:
            self._at_gate.add(job.id)
            self.gates[job.data["round"]].wait(60)
            self._at_gate.discard(job.id)

        def together_in_thread(jobs: Jobs[Any]) -> None:
            ids = {job.id for job in jobs}
            self.seen |= ids
            self._at_gate.update(ids)
            self.gates[jobs[0].data["round"]].wait(60)
            self._at_gate.difference_update(ids)

        handlers = {"thread": in_thread, "process": in_process, "batch": together, "batch in threads": together_in_thread}
        handler: Any = handlers.get(self.shape, on_loop)
        batch = self.batch if self.shape.startswith("batch") else None
        kinds: dict[str, HandlerKind] = {"thread": "thread", "batch in threads": "thread", "process": "process"}
        kind = kinds.get(self.shape, "async")
        worked = WorkedType("brief", Options(), Codec(Any, "brief"), handler, kind, batch=batch)
        worked.once = self.shape == "once"
        self.database = await self.app.database()
        await type_queries.declare_job_type(self.database, "brief", Options().as_json())
        await worker_queries.register_worker(self.database, "w", ["brief"], "", 0, 1, self.app.settings.dead_after)
        self.executor = Executor(
            self.database, {"brief": worked}, self.app.settings, self.results.append, lambda *_: None, may_start=lambda: self.owns
        )

    async def submitted(self) -> list[ClaimedJob]:
        """As many jobs as there are places, claimed and with the executor."""
        number = len(self.gates)
        self.gates.append(Gate(self.folder / f"open-{number}"))
        await self.app.enqueue_many("brief", [{"round": number, "folder": str(self.folder)}] * PLACES)
        claimed = (await claim_queries.claim(self.database, "w", ["brief"], PLACES, {})).jobs
        self.executor.submit(claimed, asyncio.get_running_loop().time())
        return claimed

    async def _wait(self, waiting: Sequence[Job[Any]]) -> None:
        ids = {job.id for job in waiting}
        gate = self.gates[waiting[0].data["round"]]
        self.seen |= ids
        self._at_gate |= ids
        try:
            while not gate.is_set():
                await asyncio.sleep(0.001)
        finally:
            self._at_gate -= ids


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_job_that_is_stopped_or_lost_anywhere_frees_its_place(small: Penstock, shape: str, tmp_path: Path) -> None:
    """Between any two steps, also while its start is recorded or its batch gathers. It is settled once, unless it was lost."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    harness = Shaped(small, shape, tmp_path)
    await harness.open()
    try:
        for _ in range(40 if shape != "process" else 12):
            harness.results.clear()
            claimed = await harness.submitted()
            lost: set[UUID] = set()
            for job in dice.sample(claimed, PLACES):
                for _ in range(dice.randrange(6)):
                    await asyncio.sleep(0)
                if dice.random() < 0.3:
                    await harness.database.fetchval("select 1")
                for way in dice.choices(["cancelled", "moved", "shutdown", "time limit", "lost", "none"], k=dice.randint(1, 2)):
                    if way == "lost":
                        harness.executor.abandon([job.id])
                        lost.add(job.id)
                    elif way != "none":
                        harness.executor.cancel(job.id, way)
            harness.gate.set()
            await eventually(lambda: harness.executor.in_flight == 0, f"the end of all jobs, seed {seed}", 60)
            settled = [result.id for result in harness.results]
            assert len(settled) == len(set(settled)), f"seed {seed}"
            assert {job.id for job in claimed} - lost <= set(settled) <= {job.id for job in claimed}, f"seed {seed}"
        # Only when all places are free can these be at the gate together.
        there = {job.id for job in await harness.submitted()}
        await eventually(lambda: harness.at_gate >= there, f"{PLACES} free places, seed {seed}", 60)
    finally:
        harness.gate.set()
        harness.executor.close()


async def test_a_job_that_is_lost_while_its_start_is_recorded_does_not_start(small: Penstock, tmp_path: Path) -> None:
    harness = Shaped(small, "once", tmp_path)
    await harness.open()
    claimed = await harness.submitted()
    harness.executor.abandon([claimed[0].id])
    harness.executor.cancel(claimed[1].id)
    await eventually(lambda: len(harness.at_gate) == PLACES - 2, "the others to start", 60)
    assert harness.at_gate == {job.id for job in claimed[2:]}
    assert [(result.id, result.outcome) for result in harness.results] == [(claimed[1].id, Outcome.CANCELLED)]
    harness.gate.set()
    await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
    harness.executor.close()


async def test_jobs_whose_start_cannot_be_recorded_are_released(small: Penstock, sql: Any, tmp_path: Path) -> None:
    harness = Shaped(small, "once", tmp_path)
    await harness.open()
    await sql.execute("alter function penstock.begin_jobs(uuid[], bigint[]) rename to begin_jobs_away")
    with structlog.testing.capture_logs() as logs:
        await harness.submitted()
        await eventually(lambda: "jobs_not_begun" in [entry["event"] for entry in logs], "the refusal of the database", 60)
    assert [result.outcome for result in harness.results] == [Outcome.RELEASED] * PLACES
    assert harness.executor.in_flight == 0 and not harness.at_gate
    # The places are free.
    await sql.execute("alter function penstock.begin_jobs_away(uuid[], bigint[]) rename to begin_jobs")
    await harness.submitted()
    await eventually(lambda: len(harness.at_gate) == PLACES, "free places", 60)
    harness.gate.set()
    await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
    harness.executor.close()


async def test_a_job_that_is_lost_while_its_batch_gathers_is_not_in_it(small: Penstock, tmp_path: Path) -> None:
    harness = Shaped(small, "batch", tmp_path)
    # Not full with all of the jobs, so that it gathers until the linger has passed.
    harness.batch = BatchOptions(PLACES + 1, timedelta(seconds=2), False)
    await harness.open()
    claimed = await harness.submitted()
    await asyncio.sleep(0)  # each has asked for a place in the batch
    harness.executor.abandon([claimed[0].id])
    await eventually(lambda: len(harness.at_gate) >= PLACES - 1, "the others", 60)
    assert harness.at_gate == {job.id for job in claimed[1:]}
    harness.gate.set()
    await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
    assert {result.id for result in harness.results} == {job.id for job in claimed[1:]}
    harness.executor.close()


async def test_a_job_that_is_lost_when_its_batch_is_complete_is_not_handed_to_the_handler(
    small: Penstock, tmp_path: Path
) -> None:
    harness = Shaped(small, "batch", tmp_path)
    harness.batch = BatchOptions(PLACES, timedelta(seconds=60), False)
    await harness.open()
    claimed = await harness.submitted()
    await asyncio.sleep(0)  # the last of them has completed the batch, whose call takes its first step after this one
    harness.executor.abandon([claimed[0].id])
    await eventually(lambda: len(harness.at_gate) >= PLACES - 1, "the others", 60)
    assert harness.at_gate == {job.id for job in claimed[1:]}
    harness.gate.set()
    await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
    assert {(result.id, result.outcome) for result in harness.results} == {(job.id, Outcome.SUCCEEDED) for job in claimed[1:]}
    harness.executor.close()


async def test_a_job_that_is_lost_while_its_batch_waits_for_a_thread_is_not_handed_to_the_handler(
    url: str, tmp_path: Path
) -> None:
    async with Penstock(url, settings=Settings(concurrency=PLACES, threads=1)) as app:
        harness = Shaped(app, "batch in threads", tmp_path)
        harness.batch = BatchOptions(PLACES, timedelta(seconds=60), False)
        await harness.open()
        first = await harness.submitted()
        await eventually(lambda: harness.at_gate == {job.id for job in first}, "the batch that takes the thread", 60)
        second = await harness.submitted()
        for _ in range(5):  # its call is with the thread
            await asyncio.sleep(0)
        harness.executor.abandon([second[0].id])
        for gate in harness.gates:
            gate.set()
        await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
        wanted = {job.id for job in [*first, *second[1:]]}
        assert {(result.id, result.outcome) for result in harness.results} == {(id, Outcome.SUCCEEDED) for id in wanted}
        assert second[0].id not in harness.seen
        harness.executor.close()


async def test_jobs_that_the_worker_may_have_lost_while_their_batch_gathered_are_not_handed_to_the_handler(
    small: Penstock, tmp_path: Path
) -> None:
    harness = Shaped(small, "batch", tmp_path)
    harness.batch = BatchOptions(PLACES + 1, timedelta(milliseconds=100), False)
    await harness.open()
    claimed = await harness.submitted()
    await asyncio.sleep(0)  # each has asked for a place in the batch
    harness.owns = False  # as after a suspension of the process
    harness.gate.set()
    await eventually(lambda: harness.executor.in_flight == 0, "the end", 60)
    assert not harness.seen
    assert {(result.id, result.outcome, result.detail) for result in harness.results} == {
        (job.id, Outcome.RELEASED, None) for job in claimed
    }
    harness.executor.close()
