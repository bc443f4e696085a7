"""The stream: departures by aircraft, in order, and a group of consumers that follows each aircraft's day.

An aircraft that arrives late leaves late for its next leg. The group passes the delay of each leg on to the next one of the same
day, and notes how much of a departure's delay came with the aircraft. Consumers join and leave while it runs; each leg counts
once all the same, since the offset is committed in the transaction that writes what was found.

    python -m examples.flights.stream
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import asyncpg
import uvloop
from rich.console import Console
from rich.table import Table

from examples.flights.data import TOTAL, Leg, legs
from penstock import Batch, Penstock, Stream

COUNT = 100_000
MEMBERS = 3
console = Console()
TABLES = Path(__file__).with_name("stream.sql")


def departures(app: Penstock) -> Stream[Leg]:
    """The stream, in an app."""
    return app.stream("departures", Leg, partitions=16, key="tail")


class Follower:
    """Follows the days of the aircraft in the partitions that this member has."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection
        self._writing = asyncio.Lock()

    async def follow(self, batch: Batch[Leg]) -> None:
        """Pass delays on, leg by leg, and commit the offset together with what was found."""
        async with self._writing, self._connection.transaction():
            tails = list({leg.tail for leg in batch.records()})
            rows = await self._connection.fetch("select * from flights.aircraft where tail = any ($1) for update", tails)
            latest = {row["tail"]: (row["day"], row["leg"], row["arr_delay"]) for row in rows}
            found = []
            for leg in batch.records():
                day = date.fromisoformat(leg.day)
                before, number, delay = latest.get(leg.tail, (None, 0, 0.0))
                if before != day:
                    number, delay = 0, 0.0
                passed_on = max(0.0, min(delay, leg.dep_delay or 0.0))
                found.append((leg.tail, day, number + 1, leg.dest, leg.dep_delay, passed_on))
                latest[leg.tail] = (day, number + 1, leg.arr_delay if leg.arr_delay is not None else delay)
            await self._connection.executemany("insert into flights.legs values ($1, $2, $3, $4, $5, $6)", found)
            await self._connection.executemany(
                "insert into flights.aircraft values ($1, $2, $3, $4) on conflict (tail) do update"
                " set day = excluded.day, leg = excluded.leg, arr_delay = excluded.arr_delay",
                [(tail, *latest[tail]) for tail in tails],
            )
            await batch.commit(self._connection)


async def member(url: str | None, stop: asyncio.Event) -> None:
    """One consumer of the group, until `stop`."""
    async with Penstock(url) as app:
        stream = departures(app)
        connection = await (await app.database()).connect()
        follower = Follower(connection)
        stream.consumer(group="aircraft-days", max_batch_size=500)(follower.follow)
        worker = await app.worker("departures/aircraft-days")
        working = asyncio.create_task(worker.run())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        worker.stop()
        await working
        await connection.close()


async def main(count: int) -> None:
    """Append `count` legs while members of the group join and leave."""
    async with Penstock() as app:
        database = await app.database()
        connection = await database.connect()
        await connection.execute(TABLES.read_text("utf-8"))
        stream = departures(app)
        await stream.declare()
        before = sum(bounds.next for bounds in (await stream.bounds()).values())
        started = time.perf_counter()
        stops = [asyncio.Event() for _ in range(MEMBERS)]
        members: list[asyncio.Task[None]] = []
        source = islice(legs(), count)
        appended = 0
        while batch := list(islice(source, 5_000)):
            if len(members) < MEMBERS:
                members.append(asyncio.create_task(member(database.url, stops[len(members)])))
            appended += len(await stream.append_many(batch))
        # Few flights are appended before all members have joined.
        while len(members) < MEMBERS:
            members.append(asyncio.create_task(member(database.url, stops[len(members)])))
        stops[0].set()
        await members[0]
        while any(lag.lag for lag in await stream.lag("aircraft-days")):
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(members[-1]), 0.2)
        took = time.perf_counter() - started
        for stop in stops:
            stop.set()
        await asyncio.gather(*members)
        counted = await connection.fetchval("select count(*) from flights.legs")
        console.print(
            f"{appended:,} departures appended (there were {before:,}) and followed in {took:.1f} s,"
            f" {appended / took:,.0f} a second; {counted:,} legs, each once"
        )
        table = Table("leg of the day", "departures", "mean delay, min", "came with the aircraft, min", box=None, pad_edge=False)
        for row in await connection.fetch(
            "select leg, count(*) as legs, avg(dep_delay) as delay, avg(passed_on) as passed_on"
            " from flights.legs group by leg order by leg limit 6"
        ):
            table.add_row(str(row["leg"]), f"{row['legs']:,}", f"{row['delay']:.1f}", f"{row['passed_on']:.1f}")
        console.print(table)
        await connection.close()


if __name__ == "__main__":
    full = os.environ.get("FULL", "") not in ("", "0")
    uvloop.run(main(TOTAL if full else COUNT))
