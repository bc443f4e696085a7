"""The app of the chaos test of schedules. Its workers kill themselves at moments between a slot and its run."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from penstock import Backoff, Job, Penstock, Settings, Tick
from penstock.postgres.database import Database
from penstock.schedules import queries as schedules

if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
app = Penstock(settings=Settings(dead_after=2.0, heartbeat_interval=0.4, maintenance_interval=0.2, poll_interval=0.2))
enqueue_run = schedules.enqueue_run
chance = random.Random(os.environ.get("SCHEDULE_SEED"))


def perhaps_die(share: float) -> None:
    """Kill this process, as the kernel would."""
    if chance.random() < share:
        os.kill(os.getpid(), signal.SIGKILL)


async def enqueue_and_die(
    database: Database,
    name: str,
    spec: str,
    due_at: datetime,
    run_at: datetime | None,
    next_at: datetime,
    key: str | None = None,
) -> UUID | None:
    """Die before, during or after the call that takes a slot."""
    perhaps_die(0.04)
    call = asyncio.create_task(enqueue_run(database, name, spec, due_at, run_at, next_at, key))
    await asyncio.wait([call], timeout=chance.uniform(0, 0.01))
    perhaps_die(0.06)
    run = await call
    perhaps_die(0.06)
    return run


schedules.enqueue_run = enqueue_and_die


# A run that is lost with its worker may be retried as often as workers die.
@app.timer(
    every=timedelta(milliseconds=100),
    name="sweep",
    missed="all",
    max_attempts=20,
    backoff=Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=50)),
)
async def sweep(job: Job[Tick]) -> None:
    """Record the run, and sometimes die during it."""
    database: Any = await app.database()
    await database.fetch("insert into public.ran (slot, id) values ($1, $2)", job.data.at, job.id)
    perhaps_die(0.03)
