"""A worker writes what it counted into the rates of its database, and gives each failure its signature."""

from __future__ import annotations

from penstock import Job, Penstock, Settings
from penstock.core.signatures import signature_of
from penstock.jobs import rates
from penstock.testing import running_worker
from penstock.worker.rates import write_rates
from tests.waiting import eventually


async def test_a_worker_writes_what_it_counted_when_it_stops(app: Penstock) -> None:
    @app.job("square", max_attempts=1)
    async def square(job: Job[int]) -> None:
        if job.data == 3:
            raise ValueError("three")

    async with running_worker(app):
        await app.enqueue_many("square", range(10))
        await eventually(_archived(app, 10))
        assert await rates.rates_of(await app.database()) == []
    database = await app.database()
    for names in (None, ["square"]):
        for wide in (False, True):
            whole = (await rates.read_period(database, names, wide=wide)).whole
            assert (whole.succeeded, whole.failed, sum(whole.runs), sum(whole.waits)) == (9, 1, 10.0, 10.0)
    (one,) = await rates.type_rates(database)
    assert one.name == "square" and (one.rate.run(0.5) or 0.0) < 1.0
    # What was written is not written again.
    await write_rates(database)
    assert (await rates.read_period(database)).whole.finished == 10


async def test_without_rates_nothing_is_written(url: str) -> None:
    async with Penstock(url, settings=Settings(rates=False)) as app:

        @app.job("square")
        async def square(job: Job[int]) -> None:
            pass

        async with running_worker(app):
            await app.enqueue("square", 1)
            await eventually(_archived(app, 1))
        assert await rates.rates_of(await app.database()) == []


async def test_a_failure_has_the_signature_of_its_cause_and_the_version_of_the_code(url: str) -> None:
    async with Penstock(url, settings=Settings(code_version="1.7")) as app:

        @app.job("find", max_attempts=1)
        async def find(job: Job[int]) -> None:
            raise ValueError(f"no order {job.data}")

        async with running_worker(app):
            await app.enqueue_many("find", [17, 18])
            await eventually(_archived(app, 2))
        database = await app.database()
        rows = await database.fetch("select signature, errors -> 0 ->> 'version' as version from penstock.archived_jobs")
        assert [tuple(row) for row in rows] == [(signature_of("ValueError", "no order 1"), "1.7")] * 2


def _archived(app: Penstock, number: int):  # type: ignore[no-untyped-def]
    async def archived() -> bool:
        database = await app.database()
        return bool(await database.fetchval("select count(*) = $1 from penstock.archived_jobs", number))

    return archived
