"""Background jobs of tenants: a poller for each, on some worker, and a controller that keeps them equal to a table.

    python -m examples.pools.tenants

Two workers share the tenants; one leaves, and its pollers go on elsewhere with the state that they had. The controller is a
standing job itself, so there is one of it while any worker is alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from penstock import Penstock, Standing
from penstock.worker import Worker

app = Penstock()
pollers = app.pool("tenant-pollers", slots=32)
controllers = app.pool("tenant-controller", slots=1)
polls: dict[str, int] = {}

CREATE = "create table if not exists tenants (id text primary key, every_s double precision not null)"


@pollers.standing
async def poll(job: Standing[dict[str, Any]]) -> AsyncIterator[None]:
    """The start side, the stop side, and between them a task that polls."""
    job.state = job.state or {"polls": 0}

    async def loop() -> None:
        while True:
            job.state["polls"] += 1
            polls[job.key] = job.state["polls"]
            await asyncio.sleep(job.data["every_s"])

    polling = asyncio.create_task(loop())
    try:
        yield
    finally:
        polling.cancel()


@controllers.standing
async def control(job: Standing[Any]) -> None:
    """Make the pollers equal to the table, again and again."""
    database = await app.database()
    while True:
        rows = await database.fetch("select id, every_s from tenants")
        await pollers.reconcile({row["id"]: {"every_s": row["every_s"]} for row in rows})
        await asyncio.sleep(0.2)


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    """A worker in this process; usually it is `penstock worker examples.pools.tenants:app`, many times."""
    worker = await app.worker()
    task = asyncio.create_task(worker.run())
    await worker.started()
    try:
        yield worker
    finally:
        worker.stop()
        await task


async def polled(tenants: set[str], more_than: int) -> None:
    """Wait until exactly these tenants are polled, each so often."""
    database = await app.database()
    while True:
        running = await database.fetch(
            "select key from penstock.standing_jobs where name = 'tenant-pollers' and running_by is not null"
        )
        if {row["key"] for row in running} == tenants and all(polls.get(tenant, 0) > more_than for tenant in tenants):
            return
        await asyncio.sleep(0.05)


async def main() -> None:
    """Tenants come and go, and so do workers."""
    async with app:
        database = await app.database()
        await database.fetch(CREATE)
        await database.fetch(
            "insert into tenants select 'tenant-' || n, 0.02 from generate_series(1, 6) as n on conflict do nothing"
        )
        await controllers.start("controller")
        async with working():
            async with working():
                await polled({f"tenant-{n}" for n in range(1, 7)}, 5)
                print("six tenants, two workers:", dict(sorted(polls.items())))
            await database.fetch("delete from tenants where id in ('tenant-1', 'tenant-2')")
            await polled({f"tenant-{n}" for n in range(3, 7)}, max(polls.values()))
            print("four tenants, one worker:", {key: polls[key] for key in sorted(polls) if key > "tenant-2"})
            await controllers.stop("controller")
            await pollers.reconcile({})
            await polled(set(), 0)
        await database.fetch("drop table tenants")


if __name__ == "__main__":
    asyncio.run(main())
