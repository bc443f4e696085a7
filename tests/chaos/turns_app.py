"""The app of the chaos test of turns: a pool with a limit, whose handler records what it runs."""

from __future__ import annotations

import asyncio

from penstock import Job, Penstock
from tests.chaos.workload import record

app = Penstock()
pool = app.pool("turns", slots=32, concurrency=4, max_attempts=9)


@pool.job
async def run(job: Job[int]) -> None:
    """Run for a moment. The name of the event is the key and the place in the key."""
    name = f"{job.key}/{job.data}"
    record("started", job.id, name, job.attempt)
    await asyncio.sleep(0.02)
    record("ended", job.id, name, job.attempt, "succeeded")
