"""The app of the chaos test. Its handlers record what they do, and misbehave as the payload says."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import timedelta
from typing import Any

from penstock import Backoff, Job, Penstock

app = Penstock()
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
WORKER = str(os.getpid())


def record(kind: str, id: Any, name: str, attempts: int = 0, outcome: str = "") -> None:
    """Append one event; a line of this size is written whole or, by a killed process, torn at the end."""
    event = {"kind": kind, "id": str(id), "name": name, "at": time.monotonic(), "attempts": attempts}
    event |= {"worker": WORKER, "outcome": outcome}
    line = json.dumps(event) + "\n"
    file = os.open(os.environ["CHAOS_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


async def run(job: Job[dict[str, Any]]) -> None:
    """Run for as long as the payload says, then fail or not."""
    record("started", job.id, job.name, job.attempts)
    try:
        await asyncio.sleep(job.data["sleep_s"])
        if job.attempt <= job.data["failures"]:
            raise ValueError("as planned")
    except BaseException:
        record("ended", job.id, job.name, job.attempts, "failed")
        raise
    record("ended", job.id, job.name, job.attempts, "succeeded")


def declare() -> None:
    """The types of the workload."""
    app.job("plain", attempts=6, backoff=QUICK)(run)
    app.job("unhurried")(run)  # with the default backoff
    app.job("once", delivery="at_most_once")(run)
    app.job("limited", attempts=6, concurrency=3, backoff=QUICK)(run)
    app.job("brief", attempts=3, backoff=QUICK)(run)


declare()
