"""The app of the chaos of `Job.finish`: each handler writes one effect, and ends its job in the same transaction.

The payload says where the first attempt kills its process, fails, or overruns its lease.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import psycopg

from penstock import Backoff, Job, Jobs, Penstock, Settings

app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2, concurrency=10, threads=6))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
LEASE = timedelta(seconds=3)


def reach(job: Job[dict[str, Any]], place: str) -> None:
    """Do what the payload says at this place, in the first attempt."""
    if job.attempt == 2 and job.data.get("slow") and place == "before":
        # Time for a first attempt that overran its lease to come in between.
        time.sleep(2)
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


def book(job: Job[dict[str, Any]]) -> None:
    """One effect, in the transaction that finishes the job."""
    reach(job, "start")
    with psycopg.connect(os.environ["PENSTOCK_DATABASE_URL"]) as connection:
        connection.execute("insert into effects (job, attempt) values (%s, %s)", (job.id, job.attempt))
        reach(job, "before")
        job.finish_blocking(connection)
        reach(job, "between")
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
