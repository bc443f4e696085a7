"""Timers and cron schedules in workers: once across all of them, or in each, as jobs or in place."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, Penstock, Tick
from penstock.schedules.schedule import ScheduleRecord
from penstock.settings import Settings
from penstock.testing import running_worker
from penstock.worker.doctor import examine
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def records(url: str) -> list[ScheduleRecord]:
    async with Penstock(url) as app:
        return await app.list_schedules()


async def run_all(apps: list[Penstock], until: Any, what: str) -> None:
    workers = [await app.worker() for app in apps]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        await eventually(until, what)
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        for app in apps:
            await app.close()


@pytest.mark.parametrize("as_job", [True, False])
async def test_a_timer_runs_once_for_all_workers_and_never_twice_at_once(url: str, sql: Sql, as_job: bool) -> None:
    apps = [Penstock(url) for _ in range(3)]
    ticks: list[tuple[int, datetime]] = []
    running = 0

    for number, app in enumerate(apps):

        @app.timer(every=timedelta(milliseconds=100), name="sweep", missed="all", as_job=as_job)
        async def sweep(tick: Tick, number: int = number) -> None:
            nonlocal running
            running += 1
            assert running == 1
            await asyncio.sleep(0.01)
            ticks.append((number, tick.at))
            running -= 1

    await run_all(apps, lambda: len(ticks) >= 20, "twenty ticks")
    times = [at for _, at in ticks]
    assert times == sorted(times)
    assert max(Counter(times).values()) == 1
    assert all(later - earlier == timedelta(milliseconds=100) for earlier, later in itertools.pairwise(times))


async def test_each_worker_runs_its_own_timer_when_asked(url: str) -> None:
    apps = [Penstock(url) for _ in range(2)]
    ticks: Counter[int] = Counter()
    for number, app in enumerate(apps):

        def beat(number: int = number) -> None:
            ticks[number] += 1

        app.timer(every=timedelta(milliseconds=50), name="beat", per_worker=True)(beat)
    await run_all(apps, lambda: min(ticks[0], ticks[1]) >= 3, "three ticks of each")


@pytest.mark.parametrize("as_job", [True, False])
@pytest.mark.parametrize(("missed", "runs"), [("skip", []), ("once", [0]), ("all", [3, 2, 1, 0])])
async def test_times_that_passed_without_a_worker(url: str, sql: Sql, missed: Any, runs: list[int], as_job: bool) -> None:
    app = Penstock(url)
    ticks: list[Tick] = []
    app.cron("0 4 * * *", name="report", missed=missed, as_job=as_job)(lambda tick: ticks.append(tick))
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, next_at, updated_at) values"
        " ('report', 'cron', '0 4 * * * UTC', date_trunc('day', now() at time zone 'UTC' - interval '4 hours')"
        "  at time zone 'UTC' + interval '4 hours' - interval '3 days', now())"
    )
    latest = await sql.fetchval("select next_at + interval '3 days' from penstock.schedules")

    async def caught_up() -> bool:
        ended = "select next_at > now() and running_by is null and not exists (select from penstock.queued_jobs)"
        return bool(await sql.fetchval(f"{ended} from penstock.schedules"))

    await run_all([app], caught_up, "the schedule to be in the future")
    assert [latest - tick.at for tick in ticks] == [timedelta(days=days) for days in runs]


async def test_another_worker_takes_over_what_a_dead_one_ran(url: str, sql: Sql) -> None:
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, next_at, running_by, running_until, updated_at) values"
        " ('sweep', 'every', '3600', now(), 'dead', now() + interval '1 second', now())"
    )
    app = Penstock(url, settings=Settings(poll_interval=timedelta(milliseconds=100)))
    ticks: list[Tick] = []
    app.timer(every=timedelta(hours=1), name="sweep", as_job=False)(lambda tick: ticks.append(tick))
    await run_all([app], lambda: ticks, "the run to be taken over")
    assert len(ticks) == 1
    [schedule] = await records(url)
    assert (schedule.last_outcome, schedule.last_error) == ("succeeded", "worker dead fell silent in the middle of a run")


@pytest.mark.parametrize("as_job", [True, False])
async def test_a_failing_handler_does_not_stop_its_schedule(url: str, as_job: bool) -> None:
    app = Penstock(url)
    calls: list[None] = []

    @app.timer(every=timedelta(milliseconds=20), as_job=as_job, **({"max_attempts": 1} if as_job else {}))
    async def sweep() -> None:
        calls.append(None)
        raise ValueError("always")

    await run_all([app], lambda: len(calls) >= 3, "three runs")


@pytest.mark.parametrize("as_job", [True, False])
async def test_a_run_under_way_is_finished_when_the_worker_stops(url: str, sql: Sql, as_job: bool) -> None:
    app = Penstock(url)
    began, may_end = asyncio.Event(), asyncio.Event()
    ended: list[str] = []

    @app.timer(every=timedelta(hours=1), name="for-all", as_job=as_job)
    async def once() -> None:
        began.set()
        await may_end.wait()
        ended.append("for-all")

    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, next_at, updated_at) values ('for-all', 'every', '3600', now(), now())"
    )
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await began.wait()
    worker.stop()
    await eventually(lambda: sql.fetchval("select exists (select from penstock.workers where state = 'draining')"))
    assert not running.done()
    may_end.set()
    await running
    await app.close()
    assert ended == ["for-all"]
    assert await sql.fetchval("select running_by is null and next_at > now() from penstock.schedules")
    [schedule] = await records(url)
    assert schedule.last_outcome == "succeeded"


async def test_a_run_that_does_not_end_in_time_is_left_to_another_worker_at_once(url: str, sql: Sql) -> None:
    app = Penstock(url, settings=Settings(shutdown_grace=timedelta(milliseconds=100)))
    began = asyncio.Event()

    @app.timer(every=timedelta(hours=1), name="endless", as_job=False)
    async def endless() -> None:
        began.set()
        await asyncio.Event().wait()

    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, next_at, updated_at) values ('endless', 'every', '3600', now(), now())"
    )
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await began.wait()
    worker.stop()
    await running
    await app.close()
    assert await sql.fetchval("select running_by is null and next_at <= now() from penstock.schedules")


@pytest.mark.parametrize("as_job", [True, False])
async def test_a_schedule_that_was_deleted_is_declared_again(url: str, sql: Sql, as_job: bool) -> None:
    app = Penstock(url)
    app.timer(every=timedelta(milliseconds=100), name="sweep", as_job=as_job)(lambda: None)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    there = "select count(*) from penstock.schedules where last_at is not null"
    await eventually(lambda: sql.fetchval(there))
    await sql.execute("delete from penstock.schedules")
    await eventually(lambda: sql.fetchval(there), "the schedule to run again")
    worker.stop()
    await running
    await app.close()


def test_names_are_unique() -> None:
    app = Penstock("postgresql://nowhere")
    app.timer(every=timedelta(seconds=1), name="a")(print)
    with pytest.raises(InvalidInput, match="twice"):
        app.cron("* * * * *", name="a")(print)


async def test_a_schedule_runs_only_by_the_times_that_are_stored(url: str, sql: Sql) -> None:
    old, new = Penstock(url), Penstock(url)
    ran: Counter[tuple[str, bool]] = Counter()
    for app, name, span in ((old, "old", 0.05), (new, "new", 0.06)):
        for as_job in (True, False):

            def beat(name: str = name, as_job: bool = as_job) -> None:
                ran[name, as_job] += 1

            app.timer(every=timedelta(seconds=span), name=f"beat-{as_job}", as_job=as_job)(beat)
    async with old, new, running_worker(old):
        await eventually(lambda: ran["old", True] >= 2 and ran["old", False] >= 2, "runs by the first times")
        async with running_worker(new):
            await eventually(lambda: ran["new", False] >= 2, "runs by the new times")
            for row in await sql.fetch("select name, spec, next_at from penstock.schedules"):
                assert row["spec"] == "0.06"
                enqueue = "select penstock.enqueue_run($1, '0.05', $2, $2, $2::timestamptz + interval '1 s')"
                assert await sql.fetchval(enqueue, row["name"], row["next_at"]) is None
            differing = await doctor_says(url)
            assert len(differing) == 2 and all("runs by 0.06" in one and "declare it as 0.05" in one for one in differing)
            # A run in place is one of the application that takes it; the job of a run may go to either.
            before = ran["old", False]
            await eventually(lambda: ran["new", False] >= 20, "more runs by the new times")
            assert ran["old", False] <= before + 1


async def test_every_accepted_expression_can_be_declared(url: str) -> None:
    for number, expression in enumerate(("@Daily", " 0  4 * * *", "0 0 4 * * MON-FRI", "0 4 L * 1#2")):
        app = Penstock(url)
        app.cron(expression, name=f"report-{number}", tz="America/Argentina/Buenos_Aires")(lambda: None)
        async with app:
            await app.declare()
            assert len((await app.list_schedules())[-1].upcoming()) == 3


async def test_a_call_that_brings_a_cron_schedule_forward_changes_nothing(sql: Sql) -> None:
    await sql.execute("select penstock.declare_schedule('report', 'cron', '0 4 * * * UTC', now() + interval '1 day', 'job')")
    due = await sql.fetchval("select next_at from penstock.schedules")
    for spec in ("0 4 * * * UTC", "1 day", None):
        await sql.execute("select penstock.bring_forward('report', $1, $2)", spec, due)
    assert await sql.fetchval("select next_at from penstock.schedules") == due


async def doctor_says(url: str) -> list[str]:
    async with Penstock(url) as app:
        found = await examine(await app.database())
    return [one.message for one in found if one.check == "schedules" and one.level != "ok"]


async def test_doctor_names_machines_whose_time_zones_differ(url: str, sql: Sql) -> None:
    assert await doctor_says(url) == []
    for worker, rules in (("a", "1"), ("b", "2"), ("c", "1")):
        told = json.dumps({"time_zones": {"Europe/Berlin": rules, "UTC": "3"}, "schedule_specs": {"none": "1"}})
        await sql.execute("select penstock.register_worker($1, '{}', p_metadata => $2::jsonb)", worker, told)
    assert await doctor_says(url) == [
        "the rules of the time zone Europe/Berlin differ between machines: a, c have 1",
        "the rules of the time zone Europe/Berlin differ between machines: b have 2",
    ]


@pytest.mark.parametrize("as_job", [True, False])
async def test_a_timer_goes_on_from_now_after_the_clock_has_stepped_back(app: Penstock, sql: Sql, as_job: bool) -> None:
    ticks: list[datetime] = []

    @app.timer(every=timedelta(milliseconds=100), name="sweep", as_job=as_job)
    async def sweep(tick: Tick) -> None:
        ticks.append(tick.at)

    async with running_worker(app):
        await eventually(lambda: len(ticks) >= 2, "two ticks")
        # As it looks once the clock has been put back by a year.
        moved = "update penstock.schedules set next_at = next_at + interval '1 year' where running_by is null returning 1"
        await eventually(lambda: sql.fetchval(moved), "a moment between two runs")
        before = len(ticks)
        await eventually(lambda: len(ticks) >= before + 5, "further ticks")
    assert len(set(ticks)) == len(ticks)
