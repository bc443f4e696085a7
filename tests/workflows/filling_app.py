"""An application whose plain handlers fill a job group: in processes, which die in the block, or raise there, and in threads."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

from penstock import Backoff, Job, Penstock, Settings

app = Penstock(settings=Settings(processes_for_handlers=1, dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2))
AT_ONCE = Backoff(base=timedelta(0), cap=timedelta(0), jitter=0)


@app.job("part", keep_result=True)
async def part(job: Job[str]) -> str:
    """A child."""
    return job.data


@app.job("report", keep_result=True)
async def report(job: Job[Any]) -> list[Any]:
    """What follows."""
    group = await job.group()
    assert group is not None
    return [group.name, group.succeeded, group.added]


def fill(job: Job[dict[str, str]]) -> None:
    """Add two children; the first attempt ends between them as the payload says."""
    with app.job_group(job.data["group"], then="report").sync as group:
        app.sync.enqueue("part", "a", group=group)
        if job.attempt == 1 and job.data["ends"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.attempt == 1:
            raise RuntimeError("interrupted")
        app.sync.enqueue("part", "b", group=group)


@app.job("in-process", backoff=AT_ONCE, executor="process")
def in_process(job: Job[dict[str, str]]) -> None:
    """In a process."""
    fill(job)


@app.job("in-thread", backoff=AT_ONCE)
def in_thread(job: Job[dict[str, str]]) -> None:
    """In a thread."""
    fill(job)


if __name__ == "__main__":
    app.run_worker()
