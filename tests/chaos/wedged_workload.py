"""The app of the wedged worker: a pool whose handlers block the event loop of their worker when the payload says so."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from typing import Any

from penstock import Job, Penstock
from tests.chaos.workload import QUICK, record

app = Penstock()
VISIBLE = timedelta(seconds=6)
pool = app.pool("keyed", slots=16, max_attempts=8, backoff=QUICK, visibility_timeout=VISIBLE)


@pool.job
async def run(job: Job[dict[str, Any]]) -> None:
    """Sleep, or block the loop on the first attempt. The name of the event is the key and the place in the key."""
    name = f"{job.key}/{job.data['n']}"
    record("started", job.id, name, job.attempt, value=job.data)
    try:
        await asyncio.sleep(job.data["sleep_s"])
        if job.attempt == 1:
            time.sleep(job.data["blocks_s"])
    except BaseException:
        record("ended", job.id, name, job.attempt, "interrupted")
        raise
    record("ended", job.id, name, job.attempt, "succeeded")


if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
