"""The app of the chaos of workflows: handlers note the attempts that begin, and end as the payload says.

The first attempt kills its process before it ends (`kill`), fails (`stumble`), fails for good (`fail`), ends its job in a
transaction of its own (`finish`), waits at a gate (`hold`), or returns.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from penstock import Backoff, Fail, Job, Penstock, Settings
from tests.chaos import shifted_clock

shifted_clock.shift()
app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2))
QUICK = Backoff(base=timedelta(milliseconds=50), cap=timedelta(milliseconds=200))
HISTORY = Path(os.environ["KILLER_HISTORY"])


async def work(job: Job[dict[str, Any]]) -> None:
    """One step of a workflow."""
    with HISTORY.open("a") as history:
        history.write(json.dumps({"kind": "started", "id": str(job.id), "attempt": job.attempt}) + "\n")
    for child in job.data.get("children", ()):
        # Again with the same id when an attempt before died.
        group = UUID(job.data["group"])
        await app.enqueue("plain", {"does": "work"}, id=child, group=group)
    match job.data["does"]:
        case "kill" if job.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case "stumble" if job.attempt == 1:
            raise RuntimeError("the next attempt succeeds")
        case "fail":
            raise Fail("as told")
        case "hold":
            # The gate is a file, which the test makes.
            while not Path(job.data["gate"]).exists():
                await asyncio.sleep(0.01)
        case "finish":
            connection = await asyncpg.connect(os.environ["PENSTOCK_DATABASE_URL"])
            try:
                async with connection.transaction():
                    await job.finish(connection)
            finally:
                await connection.close()


app.job("plain", max_attempts=20, backoff=QUICK)(work)
app.pool("keyed", slots=8, max_attempts=20, backoff=QUICK).job(work)
