"""The app of the chaos of batch handlers.

The payload of a job says what happens when a batch comes to it: its first attempt kills the process in the midst of the batch
(`kill`), or its first attempt that comes that far ends with an error of its own (`fail`), or with a final one (`final`).
"""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock import Backoff, Fail, Job, Jobs, Penstock, Settings

app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2, threads=4))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
LINGER = timedelta(milliseconds=50)
HISTORY = Path(os.environ["KILLER_HISTORY"])


def work(jobs: Jobs[dict[str, Any]]) -> list[Any]:
    """Note the attempts that begin, and return an outcome for each job: which job it is, and its attempt."""
    note("started", *jobs)
    return [outcome(job) for job in jobs]


def note(kind: str, *jobs: Job[dict[str, Any]]) -> None:
    with HISTORY.open("a") as history:
        history.write("".join(json.dumps({"kind": kind, "id": str(job.id), "attempt": job.attempt}) + "\n" for job in jobs))


def outcome(job: Job[dict[str, Any]]) -> Any:
    match job.data["does"]:
        case "kill" if job.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail" if f'"failed", "id": "{job.id}"' not in HISTORY.read_text():
            note("failed", job)
            return ValueError(f"job {job.data['n']}")
        case "final":
            return Fail(f"job {job.data['n']}")
    return {"n": job.data["n"], "attempt": job.attempt}


@app.job("plain", max_attempts=2, backoff=QUICK, keep_result=True, max_batch_size=10, linger=LINGER)
def plain(jobs: Jobs[dict[str, Any]]) -> list[Any]:
    return work(jobs)


@app.job("loop", max_attempts=2, backoff=QUICK, keep_result=True, max_batch_size=10, linger=LINGER)
async def loop(jobs: Jobs[dict[str, Any]]) -> list[Any]:
    return work(jobs)
