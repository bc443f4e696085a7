"""The app of the chaos of `Job.finish`: each handler writes one effect, and ends its job in the same transaction.

The payload says where the first attempt kills its process, fails, overruns its lease, or is late: it waits there until the second
attempt has begun.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from penstock import Backoff, Job, Jobs, Penstock, Settings

app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2, concurrency=10, threads=6))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
LEASE = timedelta(seconds=3)


def note(job: Job[Any], what: str) -> Path:
    """A file that says how far an attempt of a job has come."""
    return Path(os.environ["KILLER_HISTORY"]).parent / f"{job.id}.{what}"


def until(ready: Callable[[], bool]) -> None:
    """Wait, for a limited time: the other attempt may be lost."""
    end = time.monotonic() + 60
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)


def reach(job: Job[dict[str, Any]], place: str) -> None:
    """Do what the payload says at this place, in the first attempt."""
    if job.data.get("does") == "late" and job.attempt == 2 and place == "before":
        note(job, "begun").touch()
        until(note(job, "tried").exists)
    if job.attempt > 1 or job.data.get("at") != place:
        return
    match job.data["does"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fail":
            raise ValueError(place)
        case "overrun":
            # Longer than the lease: the job has been recovered, and perhaps claimed again, unless its row is held.
            time.sleep(LEASE.total_seconds() + 1.5)
        case "late":
            until(note(job, "begun").exists)


def book(job: Job[dict[str, Any]]) -> None:
    """One effect, in the transaction that finishes the job."""
    reach(job, "start")
    try:
        with psycopg.connect(os.environ["PENSTOCK_DATABASE_URL"]) as connection:
            connection.execute("insert into effects (job, attempt) values (%s, %s)", (job.id, job.attempt))
            reach(job, "before")
            job.finish_blocking(connection)
            reach(job, "between")
    finally:
        note(job, "tried").touch()
    reach(job, "after")


app.job("plain", max_attempts=10, backoff=QUICK, visibility_timeout=LEASE)(book)
app.pool("keyed", slots=4, max_attempts=10, backoff=QUICK, visibility_timeout=LEASE).job(book)


@app.job("batch", max_attempts=10, backoff=QUICK, visibility_timeout=LEASE, max_batch_size=5, linger=timedelta(milliseconds=50))
def batch(jobs: Jobs[dict[str, Any]]) -> list[BaseException | None]:
    """Each job of a batch in a transaction of its own."""
    outcomes: list[BaseException | None] = []
    for job in jobs:
        try:
            book(job)
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)
    return outcomes
