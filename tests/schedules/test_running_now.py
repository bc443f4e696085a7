"""A schedule can be run on request, beside its times; its runs and its failures can be listed."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Conflict, NotFound, Penstock, Tick
from penstock.schedules.schedule import ScheduleRecord
from penstock.settings import Settings
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SOON = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))
LATER = (
    "insert into penstock.schedules (name, kind, spec, runs_as, next_at, updated_at)"
    " values ($1, 'every', '3600', $2, now() + interval '1 hour', now())"
    " on conflict (name) do update set next_at = excluded.next_at"
)


async def record_of(app: Penstock, name: str) -> ScheduleRecord:
    [found] = [record for record in await app.list_schedules() if record.name == name]
    return found


async def test_a_run_that_is_a_job_runs_now_and_the_next_time_stays(app: Penstock, sql: Sql) -> None:
    ticks: list[Tick] = []
    app.cron("0 4 * * *", name="report")(lambda tick: ticks.append(tick))
    await app.declare()
    await sql.execute(LATER, "report", "job")
    before = await record_of(app, "report")
    id = await app.run_schedule("report")
    assert id is not None
    with pytest.raises(Conflict, match="a run of schedule report has not ended"):
        await app.run_schedule("report")
    waiting = await record_of(app, "report")
    assert (waiting.job_id, waiting.last_outcome, waiting.next_at) == (id, "queued", before.next_at)
    [ran] = await run_due_jobs(app)
    assert (ran.id, ran.status) == (id, "succeeded")
    assert ticks[0].at == waiting.last_at
    assert (await record_of(app, "report")).last_outcome == "succeeded"
    again = await app.run_schedule("report")
    assert again not in (None, id)


async def test_a_run_in_place_is_made_by_one_worker_and_the_next_time_stays(app: Penstock, url: str, sql: Sql) -> None:
    ticks: list[Tick] = []
    apps = [Penstock(url) for _ in range(2)]
    for each in apps:
        each.timer(every=timedelta(hours=1), name="sweep", as_job=False)(lambda tick: ticks.append(tick))
    await sql.execute(LATER, "sweep", "in-place")
    before = await record_of(app, "sweep")
    async with running_worker(apps[0]), running_worker(apps[1]):
        assert await app.run_schedule("sweep") is None
        await eventually(lambda: ticks, "the run")

        async def ended() -> bool:
            return (await record_of(app, "sweep")).requested_at is None

        await eventually(ended, "the end of the run")
    after = await record_of(app, "sweep")
    assert (after.last_outcome, after.last_at, after.next_at) == ("succeeded", ticks[0].at, before.next_at)
    assert len(ticks) == 1
    for each in apps:
        await each.close()


async def test_a_request_outlives_the_worker_that_took_it(app: Penstock, url: str, sql: Sql) -> None:
    await sql.execute(LATER, "sweep", "in-place")
    await app.run_schedule("sweep")
    with pytest.raises(Conflict):
        await app.run_schedule("sweep")
    taken = await sql.fetchrow("select * from penstock.take_schedule('sweep', '3600', 'dead', '100 milliseconds')")
    assert (taken["taken"], taken["requested"]) == (True, True)
    ticks: list[Tick] = []
    other = Penstock(url, settings=Settings(poll_interval=timedelta(milliseconds=50)))
    other.timer(every=timedelta(hours=1), name="sweep", as_job=False)(lambda tick: ticks.append(tick))
    async with running_worker(other):
        await eventually(lambda: ticks, "the run to be taken over")
    record = await record_of(app, "sweep")
    assert (record.last_outcome, record.requested_at) == ("succeeded", None)
    await other.close()


async def test_a_schedule_of_each_worker_cannot_be_run_on_request(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.declare_schedule('beat', 'every', '60', null, 'per-worker')")
    with pytest.raises(Conflict, match="each worker runs the schedule beat by itself"):
        await app.run_schedule("beat")
    with pytest.raises(NotFound, match="no such schedule"):
        await app.run_schedule("nightly")
    with pytest.raises(NotFound, match="no such schedule"):
        await app.schedule_runs("nightly")


async def test_failures_are_counted_and_runs_listed(app: Penstock, sql: Sql) -> None:
    fails = True

    @app.cron("0 4 * * *", name="report", max_attempts=2, backoff=SOON)
    async def report() -> None:
        if fails:
            raise ValueError("no takings")

    await app.declare()
    await sql.execute(LATER, "report", "job")
    ids = []
    for expected in (1, 2):
        ids.append(await app.run_schedule("report"))
        while (await record_of(app, "report")).last_outcome != "failed":
            await asyncio.sleep(0.03)
            await run_due_jobs(app)
        assert (await record_of(app, "report")).failures == expected
    fails = False
    ids.append(await app.run_schedule("report"))
    assert (await record_of(app, "report")).failures == 2
    await run_due_jobs(app)
    assert (await record_of(app, "report")).failures == 0
    runs = await app.schedule_runs("report")
    assert [run.id for run in runs] == ids[::-1]
    assert [(run.status, run.attempt, run.error) for run in runs] == [
        ("succeeded", 1, None),
        ("failed", 2, "ValueError: no takings"),
        ("failed", 2, "ValueError: no takings"),
    ]
    assert [run.id for run in await app.schedule_runs("report", status="failed", limit=1)] == [ids[1]]


@pytest.mark.parametrize(
    ("outcomes", "failures"),
    [(["x"], 1), (["x", "x"], 2), (["x", None], 0), ([None, "x"], 1)],
)
async def test_failures_of_runs_in_place_are_counted(app: Penstock, sql: Sql, outcomes: list[Any], failures: int) -> None:
    await sql.execute(LATER, "sweep", "in-place")
    for outcome in outcomes:
        await app.run_schedule("sweep")
        due = await sql.fetchval("select due_at from penstock.take_schedule('sweep', '3600', 'w', '10 seconds')")
        error = None if outcome is None else '{"type": "E"}'
        ended = "select penstock.end_schedule('sweep', 'w', $1, $1, now(), now(), $2::jsonb)"
        assert await sql.fetchval(ended, due, error)
    assert (await record_of(app, "sweep")).failures == failures


def test_a_record_names_the_next_times() -> None:
    at = datetime(2026, 1, 11, 3, tzinfo=UTC)
    record = ScheduleRecord(
        "report", "job", "cron", "0 4 * * * Europe/Berlin", at, *[None] * 8, declared=True, declared_at=None,  # type: ignore[arg-type]
    )  # fmt: skip
    assert record.upcoming() == [at + timedelta(days=days) for days in range(3)]
    assert record.upcoming(1) == [at]
