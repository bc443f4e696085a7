"""What a worker leaves behind for the garbage collector."""

from __future__ import annotations

import asyncio
import gc

from penstock import Job, Penstock
from penstock.worker.running import Running
from tests.waiting import eventually


async def test_finished_jobs_leave_no_circles_of_references(app: Penstock) -> None:
    """Otherwise the collector has to find each job, for a third of the processor time of a worker with short jobs."""
    seen: list[int] = []

    @app.job("leaves-nothing")
    async def note(job: Job[int]) -> None:
        seen.append(job.data)

    worker = await app.worker()
    working = asyncio.create_task(worker.run())
    await worker.started()
    gc.collect()
    gc.disable()
    try:
        await note.enqueue_many(range(200))
        await eventually(lambda: len(seen) == 200, "the jobs")
        worker.stop()
        await working
        left = [each for each in gc.get_objects() if type(each) is Running and each.claimed.name == note.name]
    finally:
        gc.enable()
    assert not left, f"{len(left)} finished jobs wait for the garbage collector"
