"""The start of a worker waits for the database at each of its steps."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Event, Job, Penstock, Status
from penstock.postgres.embedded import EmbeddedServer
from tests.waiting import eventually

# A table that the step needs, in the order of the steps.
STEPS = {
    "declare the type": "jobs",
    "declare the pool": "pools",
    "promise to record starts": "holders",
    "join the pool": "members",
    "register": "workers",
    "declare the consumer group": "stream_groups",
}


@pytest.mark.embedded
@pytest.mark.soak
@pytest.mark.timeout(200)
async def test_a_worker_starts_though_the_server_stops_at_each_step_of_its_start(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    url = await asyncio.to_thread(server.start)
    try:
        setup = Penstock(url)
        await setup.migrate()
        await setup.close()
        for step, table in STEPS.items():
            await _start_through_a_stop(url, tmp_path / "server/postgres/postmaster.pid", step, table)
    finally:
        await asyncio.to_thread(server.stop)


async def _start_through_a_stop(url: str, postmaster: Path, step: str, table: str) -> None:
    """Start a worker, stop the server while the worker is at this step, and let the worker work when it runs again."""
    app = Penstock(url)
    read: list[Any] = []

    @app.job
    async def ship(job: Job[int]) -> None: ...

    pool = app.pool("work", slots=4)
    events = app.stream("events", partitions=1)

    @pool.job
    async def work(job: Job[int]) -> None: ...

    @events.consumer(group="readers")
    async def reads(event: Event[Any]) -> None:
        read.append(event.data)

    async with app:
        worker = await app.worker()
        lock = await asyncpg.connect(url)
        await lock.execute(f"begin; lock table penstock.{table} in access exclusive mode")
        running = asyncio.create_task(worker.run())
        waits = "select exists (select from pg_locks where relation = to_regclass($1) and not granted)"
        await eventually(lambda: lock.fetchval(waits, f"penstock.{table}"), f"that the worker is about to {step}")
        # Its supervisor starts it again. The lock ends with it.
        os.kill(int(postmaster.read_text().split()[0]), signal.SIGKILL)
        started = asyncio.create_task(worker.started())
        await asyncio.wait([started, running], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert not running.done(), f"the worker ended when the server stopped while it was about to {step}: {running}"
        assert started.done(), f"the worker did not start after the server had stopped while it was about to {step}"
        receipts = [await app.enqueue("ship", 1), await pool.enqueue("a", 1)]
        for receipt in receipts:
            assert (await app.wait(receipt.id)).status is Status.SUCCEEDED
        await events.append(step)
        await eventually(lambda: step in read, "the event")
        worker.stop()
        await running
