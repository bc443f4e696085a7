"""The app that is measured: handlers that do nothing but note the time."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from typing import Any

import uvloop

from penstock import Job, Penstock

app = Penstock()
ran = 0
first = 0.0
waits: list[float] = []


@app.job("noop")
async def noop(job: Job[Any]) -> None:
    """Count."""
    global ran, first
    if ran == 0:
        first = time.perf_counter()
    ran += 1


@app.job("stamped")
async def stamped(job: Job[int]) -> None:
    """Note how long the job waited: its payload is when it was enqueued, in nanoseconds."""
    global ran
    waits.append((time.time_ns() - job.data) / 1e6)
    ran += 1


async def work(expected: int) -> None:
    """Work until `expected` jobs have run, and print what was seen as one line of JSON."""
    async with app:
        worker = await app.worker()
        task = asyncio.create_task(worker.run())
        await worker.started()
        print("ready", flush=True)
        while ran < expected and not task.done():
            await asyncio.sleep(0.005)
        worker.stop()
        await task
        # With the results of the last jobs in the database.
        seconds = time.perf_counter() - first
    print(json.dumps({"ran": ran, "seconds": seconds, "waits_ms": sorted(waits), "rss_mb": _rss_mb()}))


def _rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    uvloop.run(work(int(sys.argv[1])))
