"""One typed function for each SQL function about the health of the database."""

from __future__ import annotations

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


async def clock_ahead_s(database: Database) -> float:
    """Seconds that the database's clock is ahead of this machine's, as exact as half a round trip."""
    before = time.time()
    theirs: float = await database.fetchval("select extract(epoch from clock_timestamp())::double precision")
    return theirs - (before + time.time()) / 2
