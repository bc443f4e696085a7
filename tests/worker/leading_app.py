"""An application whose leader writes a row for each step, for tests that kill and suspend its processes."""

import asyncio
import os
from datetime import timedelta

import asyncpg

from penstock import Conflict, Leader, Penstock, Settings

SPAN = timedelta(seconds=float(os.environ.get("DEAD_AFTER_S", "3")))
app = Penstock(settings=Settings.read(dead_after=SPAN, heartbeat_interval=SPAN / 3))


@app.on_startup
async def begun() -> None:
    """Called before the worker claims."""


@app.on_leader(owner="tests")
async def step(leader: Leader) -> None:
    """Write who leads, in a transaction that is bound to the leadership."""
    connection = await asyncpg.connect(await app.start_server())
    try:
        while True:
            try:
                async with connection.transaction():
                    await leader.check(connection)
                    await connection.execute(
                        "insert into public.steps (pid, epoch, at) values ($1, $2, clock_timestamp())", os.getpid(), leader.epoch
                    )
            except Conflict:
                await connection.execute("insert into public.refusals (pid, epoch) values ($1, $2)", os.getpid(), leader.epoch)
            await asyncio.sleep(0.02)
    finally:
        connection.terminate()


if os.environ.get("CHAOS_SABOTAGE"):
    from tests.chaos import broken_worker

    broken_worker.sabotage(os.environ["CHAOS_SABOTAGE"])
