"""One typed function for each SQL function about the health of the database."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass

from penstock.postgres.database import Database


@dataclass(frozen=True, slots=True)
class DatabaseGauge:
    """A gauge of the database. `label` is the name of a table, empty for the database."""

    gauge: str
    label: str
    amount: float


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a consumer group is behind, over all partitions. `lag_s`: how long the oldest event before it has waited."""

    stream: str
    group: str
    lag: int
    lag_s: float
    quarantined: int


async def gauges(database: Database) -> list[DatabaseGauge]:
    """Gauges of the database: oldest snapshot, dead rows, sizes."""
    return [DatabaseGauge(*row) for row in await database.fetch("select * from penstock.database_gauges()")]


async def stream_lags(database: Database) -> list[GroupLag]:
    """The lag of each consumer group."""
    return [GroupLag(*row) for row in await database.fetch("select * from penstock.stream_lags()")]


async def lake_lags(database: Database) -> dict[str, float]:
    """For how many seconds the first finished job that a lake does not have has waited for it."""
    return {row["lake"]: row["behind_s"] for row in await database.fetch("select * from penstock.lake_lags()")}


async def notifications_arrive(database: Database, within_s: float) -> bool:
    """Whether a notification that goes through the pool arrives where workers listen, within so many seconds."""
    channel = f"penstock_doctor_{secrets.token_hex(8)}"
    arrived = asyncio.Event()

    def heard(*_: object) -> None:
        arrived.set()

    listening = await database.connect()
    try:
        await listening.add_listener(channel, heard)
        await database.fetch("select pg_notify($1, '')", channel)
        async with asyncio.timeout(within_s):
            await arrived.wait()
    except TimeoutError:
        return False
    finally:
        listening.terminate()
    return True


async def clock_ahead_s(database: Database) -> float:
    """Seconds that the database's clock is ahead of this machine's, as exact as half a round trip."""
    before = time.time()
    theirs: float = await database.fetchval("select extract(epoch from clock_timestamp())::double precision")
    return theirs - (before + time.time()) / 2
