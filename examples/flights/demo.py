"""Live work of every kind, to look at in the dashboard: `make demo`.

    penstock up examples.flights.demo:app --http

Two timers make the work, from the flights of a year: departures that sometimes fail, checks of aircraft in a pool in which one
carrier is noisy, a stream with a consumer group that falls behind and one that stands before a poison event, delays on a topic,
and every minute a job group with a report at its end. `one_round` does the same once, at the end of `make run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import cycle, islice

from examples.flights.data import Flight, flights
from penstock import Backoff, Event, Fail, Job, JobFilter, NewJob, OnFailure, Penstock, Settings, Standing, Tick

app = Penstock(settings=Settings(concurrency=40))
_AT_ONCE = 20
_NOISY = "UA"
_CHILDREN = 30
_KEPT = timedelta(days=1)


@app.job("gate", max_attempts=3, backoff=Backoff(base=timedelta(seconds=2)), max_waiting=5_000)
async def gate(job: Job[Flight]) -> str:
    """Send a departure off. A cancelled flight fails at each attempt, and a late one once."""
    flight = job.data
    job.log(f"{flight.carrier} {flight.flight} to {flight.dest}")
    job.progress({"boarded": "all"})
    await asyncio.sleep(0.05 + flight.distance / 10_000)
    if flight.dep_delay is None:
        raise ValueError(f"{flight.carrier} {flight.flight} of {flight.day} has no departure time: it was cancelled")
    if flight.dep_delay > 60 and job.attempt == 1:
        raise TimeoutError(f"the crew of {flight.carrier} {flight.flight} is not there after {flight.dep_delay:.0f} minutes")
    return f"off, {flight.dep_delay:.0f} minutes late"


lost_luggage = app.job_type("lost-luggage", Flight)
"""No worker of this application works on it: `one_round` leaves jobs of it, and the overview says that they wait."""

checks = app.pool("checks", Flight, slots=64)


@checks.job
async def check(job: Job[Flight]) -> None:
    """Check an aircraft of a carrier: one at a time for each."""
    await asyncio.sleep(0.1)


@checks.standing
async def follow(job: Standing[None]) -> AsyncIterator[None]:
    """Follow a carrier for as long as it is wanted."""
    yield


movements = app.stream("movements", Flight, partitions=4, key="carrier", keep=_KEPT)


@movements.consumer(group="departures-board")
async def show(event: Event[Flight]) -> None:
    """Keeps up."""


@movements.consumer(group="billing", max_batch_size=1)
async def bill(event: Event[Flight]) -> None:
    """Falls behind: it takes longer for an event than the next one takes to come."""
    await asyncio.sleep(1)


@movements.consumer(group="weather", on_failure=OnFailure(max_attempts=2, then="dead-letter"))
async def note_weather(event: Event[Flight]) -> None:
    """Leaves what it cannot read to the dead letters."""
    if event.data.arr_delay is None:
        raise ValueError(f"no arrival of {event.data.carrier} {event.data.flight}")


@movements.consumer(group="customs", on_failure="quarantine")
async def clear(event: Event[Flight]) -> None:
    """Stands before the first event that it cannot handle, until it is skipped."""
    if event.data.dep_delay is None:
        raise Fail(f"{event.data.carrier} {event.data.flight} never left")


long_delays = app.topic("long-delays", Flight)


@long_delays.subscriber("passengers")
async def tell(job: Job[Flight]) -> None:
    """Tell the passengers."""


@app.job("import-row")
async def import_row(job: Job[int]) -> None:
    """One row of an import. Every tenth one fails."""
    await asyncio.sleep(0.1)
    if job.data % 10 == 7:
        raise Fail(f"row {job.data} has no tail number")


@app.job("import-report")
async def import_report() -> None:
    """What runs when all rows of an import have ended."""


@app.timer(every=timedelta(seconds=2), as_job=False)
async def depart() -> None:
    """Some departures, in each shape of work."""
    some = list(islice(_departures(), _AT_ONCE))
    waiting = {counts.name: counts.ready + counts.deferred for counts in await app.counts()}
    if waiting.get("gate", 0) < 1_000:
        await gate.enqueue_many(some)
    if waiting.get("checks", 0) < 1_000:
        # One carrier is noisy: the others take turns with it.
        noisy = [flight for flight in some if flight.carrier == _NOISY] * 5
        await checks.enqueue_many([(flight.carrier, flight) for flight in [*some, *noisy]])
    await movements.append_many(some)
    for flight in some:
        if flight.arr_delay is not None and flight.arr_delay > 60:
            await long_delays.publish(flight)


@app.cron("* * * * *", missed="skip")
async def import_flights(tick: Tick) -> None:
    """Every minute an import: a job group with a report at its end."""
    await _import(f"import-{tick.at:%Y-%m-%d-%H-%M}")


async def _import(name: str) -> None:
    async with app.job_group(name, then="import-report", on_failure="continue") as group:
        await import_row.enqueue_many([NewJob(row, group=group) for row in range(_CHILDREN)])


async def one_round(longest: timedelta = timedelta(seconds=60)) -> None:
    """One round of everything, worked on until its import has ended: something to see on each page."""
    async with app:
        await app.declare()
        name = f"import-{datetime.now(UTC):%Y-%m-%d-%H-%M-%S}"
        await lost_luggage.enqueue_many(list(islice(_departures(), 3)))
        await checks.start(_NOISY)
        await _import(name)
        for _ in range(3):
            await depart()
        await app.operations.start("set-priority", JobFilter(name="gate"), priority=10)
        worker = await app.worker()
        working = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(longest.total_seconds()):
                while not (working.done() or await _has_ended(name)):
                    await asyncio.wait([working], timeout=0.2)
        finally:
            worker.stop()
            await working


async def _has_ended(name: str) -> bool:
    """Whether an import has ended, and the weather has left something to the dead letters."""
    streams = [stream.name for stream in await app.list_streams()]
    return (await app.find_group(name)).finished_at is not None and f"{movements.name}.dead" in streams


@cache
def _departures() -> Iterator[Flight]:
    """The flights of a week of February, with its storms, again and again."""
    return cycle([flight for flight in islice(flights(), 34_000, 40_000) if flight.day >= "2013-02-07"])
