"""Where the chaos of workflows happens: a server, workers that start again, whose clocks are an hour apart, and a client."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from penstock import Penstock
from penstock.postgres.embedded import EmbeddedServer
from tests.chaos.restarted import Fleet
from tests.chaos.sabotage import Sabotage
from tests.waiting import eventually

_AHEAD_S = (-1800.0, 1800.0)


@dataclass(frozen=True)
class Site:
    """A server and what works with it.

    Attributes:
        url: The database.
        app: A client of it.
        fleet: The workers.
        chance: From the seed of the run.
    """

    url: str
    app: Penstock
    fleet: Fleet
    chance: random.Random
    _folder: Path

    def crash_server(self) -> None:
        """Kill PostgreSQL, which its supervisor starts again."""
        os.kill(int((self._folder / "postgres" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)


@asynccontextmanager
async def working_site(
    folder: Path, application: str, *types: str, only: bool = False, sabotage: Sabotage | None = None, sql: str = ""
) -> AsyncIterator[Site]:
    """Two workers of an application, which have declared these job types. All of it ends with the block.

    Args:
        folder: Where the server has its data, and the workers their history.
        application: Module of the application.
        types: The job types.
        only: Whether the workers work on no other ones.
        sabotage: What is taken out before they start.
        sql: What is run before they start.
    """
    seed = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32)))
    print(f"PENSTOCK_TEST_SEED={seed}")
    server = EmbeddedServer(folder / "server")
    url = await asyncio.to_thread(server.start)
    fleet = Fleet(url, folder / "history.jsonl", application, _AHEAD_S)
    app = Penstock(url)
    try:
        await app.migrate()
        if sql:
            connection = await asyncpg.connect(url)
            await connection.execute(sql)
            await connection.close()
        if sabotage is not None:
            await sabotage.prepare(app)
        fleet.start(2, *(types if only else ()))

        async def all_declared() -> bool:
            return set(types) <= {record.name for record in await app.job_types()}

        await eventually(all_declared, "the declarations", timeout=120)
        yield Site(url, app, fleet, random.Random(seed), folder / "server")
    finally:
        fleet.stop()
        await app.close()
        await asyncio.to_thread(server.stop)
