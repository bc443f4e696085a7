"""The app of the tests of jobs that crash their worker. Handlers record their start and end, and do what the payload says."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

from penstock import Backoff, Job, Penstock, Settings

app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2, concurrency=20, threads=4))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
LEASE = timedelta(seconds=4)


def record(kind: str, job: Job[Any]) -> None:
    """Append one event; a line of this size is written whole."""
    event = {"kind": kind, "id": str(job.id), "name": job.name, "key": job.key, "n": job.data.get("n")}
    event |= {"attempt": job.attempt, "pid": os.getpid(), "at": time.monotonic()}
    file = os.open(os.environ["KILLER_HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, json.dumps(event).encode() + b"\n")
    finally:
        os.close(file)


async def work(job: Job[dict[str, Any]]) -> None:
    """Sleep, end the process, or block the loop."""
    record("started", job)
    await asyncio.sleep(job.data.get("sleep_s", 0.0))
    match job.data.get("does"):
        case "exit":
            os._exit(9)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "block":
            time.sleep(3600)
    record("ended", job)


app.job("plain", max_attempts=3, backoff=QUICK)(work)
app.job("single", max_attempts=1, backoff=QUICK)(work)
app.job("wedged", max_attempts=3, backoff=QUICK, visibility_timeout=LEASE)(work)
app.job("once", delivery="at_most_once")(work)
app.pool("keyed", slots=8, max_attempts=3, backoff=QUICK).job(work)


def exits(job: Job[dict[str, Any]]) -> None:
    """Sleep, and end the child process in which it runs."""
    record("started", job)
    time.sleep(job.data.get("sleep_s", 0.0))
    if job.data.get("does") == "exit":
        os._exit(9)
    record("ended", job)


exits = app.job("child", max_attempts=2, executor="process", backoff=QUICK)(exits)  # type: ignore[assignment]
if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
