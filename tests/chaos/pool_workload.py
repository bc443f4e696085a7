"""The app of the chaos test of pools: a pool whose handler and standing jobs record what they do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

from penstock import Backoff, Job, Penstock, Standing
from tests.chaos.workload import record

app = Penstock()
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))

pool = app.pool("keyed", slots=16, max_attempts=8, backoff=QUICK)


@pool.job
async def run(job: Job[dict[str, Any]]) -> None:
    """Run for as long as the payload says, then succeed or fail. The name of the event is the key and the place in the key."""
    name = f"{job.key}/{job.data['n']}"
    record("started", job.id, name, job.attempt, value=job.data)
    try:
        # In steps, so that a process that was suspended still has the rest of the time to run.
        for _ in range(int(job.data["sleep_s"] / 0.1)):
            await asyncio.sleep(0.1)
        await asyncio.sleep(job.data["sleep_s"] % 0.1)
        if job.attempt <= job.data["failures"]:
            raise ValueError("as planned")
    except BaseException as error:
        outcome = "interrupted" if isinstance(error, asyncio.CancelledError) else "failed"
        record("ended", job.id, name, job.attempt, outcome)
        raise
    record("ended", job.id, name, job.attempt, "succeeded")


standing = app.pool("standing", slots=16)


@standing.standing
async def stand(job: Standing[Any]) -> AsyncIterator[None]:
    """Run until stopped; the state counts the runs."""
    id = uuid4()
    job.state = {"runs": (job.state or {"runs": 0})["runs"] + 1}
    record("began", id, job.key, job.state["runs"])
    try:
        yield
    finally:
        try:
            if os.environ.get("CHAOS_LONG"):
                # Who takes over has to wait for this, unless the slot is lost meanwhile.
                await asyncio.sleep(0.5)
        finally:
            record("stopped", id, job.key, job.state["runs"])


if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
