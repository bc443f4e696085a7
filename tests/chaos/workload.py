"""The app of the chaos test. Its handlers record what they do, and misbehave as the payload says."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from datetime import timedelta
from typing import Any

from penstock import Backoff, Job, Penstock

app = Penstock()
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
WORKER = str(os.getpid())


def record(kind: str, id: Any, name: str, attempt: int = 0, outcome: str = "", value: Any = None) -> None:
    """Append one event; a line of this size is written whole or, by a killed process, torn at the end."""
    event = {"kind": kind, "id": str(id), "name": name, "at": time.monotonic(), "attempt": attempt}
    event |= {"worker": WORKER, "outcome": outcome, "value": "" if value is None else json.dumps(value, sort_keys=True)}
    line = json.dumps(event) + "\n"
    file = os.open(os.environ["CHAOS_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def watch() -> None:
    """Record when this process was not scheduled, which happens on a busy machine and has the effect of a suspension."""
    last = time.monotonic()
    while True:
        time.sleep(0.05)
        now = time.monotonic()
        if now - last > 0.2:
            record("stalled", "", "", value=round(now - last, 3))
        last = now


async def run(job: Job[dict[str, Any]]) -> None:
    """Run for as long as the payload says, extending the lease if it says so, then succeed or fail."""
    record("started", job.id, job.name, job.attempt, value=job.data)
    try:
        # In steps, so that a process that was suspended still has the rest of the time to run.
        for step in range(int(job.data["sleep_s"] / 0.1)):
            await asyncio.sleep(0.1)
            if job.data.get("extends") and step % 3 == 2:
                # A refusal means that another worker has the job; the handler then stops, as the error asks for.
                await job.extend()
        await asyncio.sleep(job.data["sleep_s"] % 0.1)
        # A blocking call in a coroutine, which handlers must not make: it suspends all other work of this loop.
        time.sleep(job.data.get("blocks_s", 0))
        if job.attempt <= job.data["failures"]:
            raise ValueError("as planned")
    except BaseException as error:
        outcome = "interrupted" if isinstance(error, asyncio.CancelledError) else "failed"
        record("ended", job.id, job.name, job.attempt, outcome)
        raise
    record("ended", job.id, job.name, job.attempt, "succeeded")


def declare() -> None:
    """The types of the workload."""
    app.job("plain", max_attempts=6, backoff=QUICK)(run)
    app.job("unhurried")(run)  # with the default backoff
    app.job("once", delivery="at_most_once")(run)
    app.job("limited", max_attempts=6, concurrency=3, backoff=QUICK)(run)
    app.job("brief", max_attempts=3, backoff=QUICK)(run)


declare()
if "CHAOS_HISTORY" in os.environ:  # this process is a worker of a run; tests import this module too
    threading.Thread(target=watch, name="watch", daemon=True).start()
if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
