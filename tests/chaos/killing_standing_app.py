"""The app of the tests of standing jobs and events that crash their worker."""

from __future__ import annotations

import ctypes
import os
from collections.abc import AsyncIterator
from typing import Any

from penstock import Event, Penstock, Settings, Standing

dead_after_s = float(os.environ.get("KILLING_DEAD_AFTER", "2"))
app = Penstock(settings=Settings(dead_after=dead_after_s, heartbeat_interval=dead_after_s / 5, maintenance_interval=0.2))
pool = app.pool("tenants", slots=16)


def end_the_process(how: str | None) -> None:
    """End the process without any clean-up."""
    match how:
        case "exit":
            os._exit(9)
        case "segfault":
            ctypes.string_at(0)


@pool.standing
async def stand(job: Standing[dict[str, Any]]) -> AsyncIterator[None]:
    """Run for ever, or end the process at the start."""
    end_the_process(job.data.get("does"))
    await job.save({"pid": os.getpid()})
    yield


@app.stream("events", partitions=4).consumer(group="readers")
async def read(event: Event[dict[str, Any]]) -> None:
    """Record the event, or end the process."""
    end_the_process(event.data.get("does"))
    database = await app.database()
    await database.fetch("insert into public.seen values ($1, $2)", event.partition, event.data["n"])
