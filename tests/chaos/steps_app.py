"""The app of the chaos of durable steps: a handler with steps, a sleep, a wait and children, which notes what it does.

It kills its process once where the payload says: within a step, behind it, behind the sleep, the wait or the children.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock import Backoff, Job, Penstock, Settings
from tests.chaos import shifted_clock

shifted_clock.shift()
app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
HISTORY = Path(os.environ["KILLER_HISTORY"])


def write(**event: Any) -> None:
    with HISTORY.open("a") as history:
        history.write(json.dumps(event) + "\n")


def die(job: Job[dict[str, Any]], place: str) -> None:
    """Kill this process, once for each job, where its payload says so."""
    if job.data.get("dies") == place:
        with suppress(FileExistsError):
            os.close(os.open(HISTORY.parent / f"died-{job.id}", os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGKILL)


@app.job("part", max_attempts=20, backoff=QUICK, keep_result=True)
async def part(job: Job[int]) -> int:
    return job.data


async def work(job: Job[dict[str, Any]]) -> None:
    """An order with each kind of step."""
    run, lease = uuid.uuid4().hex, job.control.lease  # type: ignore[union-attr]
    of: dict[str, Any] = {"job": str(job.id), "run": run}
    write(kind="began", **of)

    async def do(step: str) -> dict[str, Any]:
        write(kind="did", step=step, **of)
        die(job, f"in {step}")
        await asyncio.sleep(random.uniform(0, 0.03))
        return {"run": run, "lease": lease}

    async def step(name: str) -> None:
        value = await job.step(name, do, name)
        write(kind="kept", step=name, value=value["run"], **of)
        die(job, f"behind {name}")

    await step("first")
    await step("second")
    await job.sleep("nap", timedelta(milliseconds=job.data["nap_ms"]))
    die(job, "behind the nap")
    timeout_ms = job.data["timeout_ms"]
    value = None
    with suppress(TimeoutError):
        value = await job.wait_for("go", str, timeout=None if timeout_ms is None else timedelta(milliseconds=timeout_ms))
    write(kind="received", step="go", value=value, **of)
    die(job, "behind the wait")
    parts = job.data["parts"]
    assert await job.gather("parts", [part.child(number) for number in range(parts)]) == list(range(parts))
    die(job, "behind the parts")
    await step("last")


app.job("order", max_attempts=50, backoff=QUICK)(work)
app.pool("keyed", slots=8, max_attempts=50, backoff=QUICK, on_retry="skip").job(work)
