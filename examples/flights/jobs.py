"""The jobs: one for each departure, and one for each carrier and day that departures coalesce into; and a topic.

Many departures are worked at once; they hand their facts to one `Facts`, which writes what has gathered in one transaction,
together with the summary jobs that have become necessary. A departure succeeds when its facts are committed.

Long delays are published to the topic `delays`, in the same transaction. Destination airports subscribe to their own.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

import asyncpg

from examples.flights.data import Flight
from penstock import Backoff, Job, NewJob, Penstock, Settings

app = Penstock(settings=Settings(concurrency=1000))
AIRPORTS = ("ATL", "BOS", "LAX", "MCO", "ORD")
LONG_MIN = 120
DEPARTURES = uuid.UUID("0d2a4f8e-57c3-5e6b-9a11-7a0c6e2f4b90")


@dataclass(frozen=True, slots=True)
class Delay:
    """Who arrives late, where, by how many minutes."""

    dest: str
    day: str
    carrier: str
    flight: int
    minutes: float


delays = app.topic("delays", Delay)


@dataclass(frozen=True, slots=True)
class CarrierDay:
    """Whose day to sum up."""

    carrier: str
    day: str


class Facts:
    """Writes facts in batches: facts that arrive while a batch is being written are in the next one."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection
        self._waiting: list[tuple[Flight, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, flight: Flight) -> None:
        """Write a flight's facts; returns when they are committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((flight, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        await done

    async def _write(self) -> None:
        await asyncio.sleep(0)
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._write_batch([flight for flight, _ in batch])
            except Exception as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
            else:
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)
        self._writing = None

    async def _write_batch(self, flights: list[Flight]) -> None:
        async with self._connection.transaction():
            await self._connection.executemany(
                "insert into flights.facts values ($1, $2, $3, $4, $5, $6, $7, $8, $7::float8 - $8::float8)"
                " on conflict do nothing",
                [
                    (date.fromisoformat(f.day), f.carrier, f.flight, f.origin, f.scheduled, f.dest, f.dep_delay, f.arr_delay)
                    for f in flights
                ],
            )
            touched = sorted({(f.carrier, f.day) for f in flights})
            # A little later, so that a day is summed up a few times and not a few hundred times.
            soon = datetime.now().astimezone() + timedelta(seconds=1)
            await summarise.enqueue_many(
                [
                    NewJob(CarrierDay(carrier, day), key=carrier, unique=f"{carrier} {day}", run_after=soon)
                    for carrier, day in touched
                ],
                connection=self._connection,
            )
            # Last, since the topic is held until the transaction ends.
            for f in flights:
                if f.arr_delay is not None and f.arr_delay > LONG_MIN:
                    await delays.publish(
                        Delay(f.dest, f.day, f.carrier, f.flight, f.arr_delay),
                        # The same for a departure that is worked again: one delay, one message.
                        id=uuid.uuid5(DEPARTURES, f"{f.day} {f.carrier} {f.flight} {f.origin} {f.scheduled}"),
                        connection=self._connection,
                    )


facts: Facts | None = None


@app.job("departure", max_attempts=2, backoff=Backoff(base=timedelta(seconds=1)))
async def departure(job: Job[Flight]) -> None:
    """Work out what a departure's delay was. A cancelled flight has no times: that is an error, twice, and then a failure."""
    flight = job.data
    if flight.dep_delay is None:
        raise ValueError(f"{flight.carrier} {flight.flight} of {flight.day} has no departure time: it was cancelled")
    if flight.arr_delay is None:
        raise ValueError(f"{flight.carrier} {flight.flight} of {flight.day} has no arrival delay: it was diverted")
    assert facts is not None
    await facts.add(flight)


@app.job("carrier-day")
async def summarise(job: Job[CarrierDay]) -> None:
    """Sum up a carrier's day from the facts so far. Runs again when more facts come later."""
    database = await app.database()
    await database.fetch(
        """
        insert into flights.carrier_days
        select day, carrier, count(*), avg(arr_delay), avg((arr_delay > 15)::integer)
        from flights.facts
        where carrier = $1 and day = $2
        group by day, carrier
        on conflict (day, carrier) do update
        set departures = excluded.departures, mean_delay = excluded.mean_delay, late_share = excluded.late_share
        """,
        job.data.carrier,
        date.fromisoformat(job.data.day),
    )


async def note_delay(job: Job[Delay]) -> None:
    """What an airport does with a delay: note it. The job's id makes a second attempt harmless."""
    database = await app.database()
    await database.fetch(
        "insert into flights.long_delays values ($1, $2, $3, $4, $5, $6) on conflict do nothing",
        job.id,
        job.data.dest,
        date.fromisoformat(job.data.day),
        job.data.carrier,
        job.data.flight,
        job.data.minutes,
    )


for airport in AIRPORTS:
    delays.subscriber(airport, filter={"dest": airport})(note_delay)
