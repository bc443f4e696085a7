"""A run of a schedule is a job: retried, archived, replayed, and shown at its schedule."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Backoff, Conflict, InvalidInput, Job, NotFound, Penstock, Tick
from penstock.jobs import type_queries
from penstock.schedules.schedule import ScheduleRecord
from penstock.testing import run_due_jobs, running_worker
from tests.command_line import penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
SOON = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))
DUE = (
    "insert into penstock.schedules (name, kind, spec, runs_as, next_at, updated_at)"
    " values ($1, 'every', '3600', $2, now(), now())"
    " on conflict (name) do update set next_at = excluded.next_at"
)


async def record_of(app: Penstock, name: str) -> ScheduleRecord:
    [found] = [record for record in await app.list_schedules() if record.name == name]
    return found


async def is_declared(app: Penstock, name: str) -> bool:
    return (await record_of(app, name)).declared


async def noted(app: Penstock, name: str, outcome: str) -> ScheduleRecord:
    async def there() -> ScheduleRecord | None:
        found = [one for one in await app.list_schedules() if one.name == name]
        return found[0] if found and found[0].last_outcome == outcome else None

    record: ScheduleRecord = await eventually(there, f"the outcome {outcome} of {name}")
    return record


async def test_a_failed_run_is_retried_archived_shown_and_replayed(app: Penstock, sql: Sql) -> None:
    attempts: list[int] = []

    @app.cron("0 4 * * *", name="report", max_attempts=2, backoff=SOON)
    async def report(job: Job[Tick]) -> None:
        attempts.append(job.attempt)
        assert (job.data.name, job.data.late < timedelta(hours=1)) == ("report", True)
        if len(attempts) <= 2:
            raise ValueError("no takings")

    await sql.execute(DUE, "report", "job")
    due = await sql.fetchval("update penstock.schedules set kind = 'cron', spec = '0 4 * * * UTC' returning next_at")
    async with running_worker(app):
        # A run that was due already does not wait for the declaration.
        await eventually(lambda: is_declared(app, "report"), "the declaration")
        [declared] = [each for each in await app.job_types() if each.name == "report"]
        assert declared.max_attempts == 2
        ended = "select count(*) from penstock.archived_jobs where name = 'report'"
        await eventually(lambda: sql.fetchval(ended), "the end of the run")
        record = await record_of(app, "report")
        assert (record.runs_as, record.last_at, record.last_outcome, record.last_error) == (
            "job", due, "failed", "ValueError: no takings",
        )  # fmt: skip
        assert record.last_started_at is not None and record.last_finished_at is not None and record.last_worker is not None
        assert record.next_at is not None and record.next_at > due
        assert record.job_id is not None
        run = await app.find(record.job_id)
        assert (run.name, run.status, [error["attempt"] for error in run.errors]) == ("report", "failed", [1, 2])
        again = await app.replay(record.job_id)
        assert (await app.wait(again.id)).replay_of == run.id
    assert attempts == [1, 2, 1]


async def test_a_run_can_be_enqueued_by_hand(app: Penstock) -> None:
    ticks: list[Tick] = []
    app.cron("0 4 * * *", name="report")(lambda tick: ticks.append(tick))
    by_hand = await app.enqueue("report")
    [ran] = await run_due_jobs(app)
    assert (ran.id, ran.status) == (by_hand.id, "succeeded")
    assert [(tick.name, tick.at.tzinfo is not None, tick.at) for tick in ticks] == [("report", True, ran.created_at)]


@pytest.mark.parametrize("per_worker", [True, False])
async def test_a_run_in_place_shows_its_outcome_too(app: Penstock, sql: Sql, per_worker: bool) -> None:
    fails = True

    def beat() -> None:
        if fails:
            raise ValueError("no pulse")

    app.timer(every=timedelta(milliseconds=50), name="beat", per_worker=per_worker, as_job=None if per_worker else False)(beat)

    async def ended() -> str | None:
        found = [one for one in await app.list_schedules() if one.name == "beat"]
        return found[0].last_outcome if found and found[0].last_outcome != "in-progress" else None

    async with running_worker(app):
        assert await eventually(ended, "an outcome") == "failed"
        record = await record_of(app, "beat")
        assert (record.runs_as, record.job_id) == ("per-worker" if per_worker else "in-place", None)
        assert record.last_error == "ValueError: no pulse"
        fails = False
        record = await noted(app, "beat", "succeeded")
        # What failed last stays to be seen.
        assert (record.last_error, record.last_worker is not None) == ("ValueError: no pulse", True)
    assert await sql.fetchval("select count(*) from penstock.archived_jobs") == 0


async def test_a_failure_is_noted_that_was_not_the_latest_run_when_runs_were_noted(app: Penstock) -> None:
    ran = 0

    def beat() -> None:
        nonlocal ran
        ran += 1
        if ran == 5:
            raise ValueError("no pulse")

    app.timer(every=timedelta(milliseconds=50), name="beat", per_worker=True)(beat)

    async def error_beside_a_success() -> str | None:
        found = [one for one in await app.list_schedules() if one.last_outcome == "succeeded"]
        return found[0].last_error if found else None

    async with running_worker(app):
        assert await eventually(error_beside_a_success, "the failure beside the later success") == "ValueError: no pulse"


async def test_no_run_is_enqueued_while_the_one_before_has_not_ended(app: Penstock, sql: Sql) -> None:
    ticks: list[Tick] = []
    app.timer(every=timedelta(milliseconds=50), name="sweep", missed="once")(lambda tick: ticks.append(tick))
    await app.declare()
    await app.pause("sweep")
    async with running_worker(app):
        held = "select last_at from penstock.schedules where next_at < now() - interval '0.2 seconds' and job_id is not null"
        waiting = await eventually(lambda: sql.fetchval(held), "slots that pass while the run waits")
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 1
        assert (await record_of(app, "sweep")).last_outcome == "queued"
        # Not by another client of the protocol either.
        take = "select penstock.enqueue_run(name, spec, next_at, next_at, next_at + interval '1 second') from penstock.schedules"
        assert await sql.fetchval(take) is None
        await app.resume("sweep")
        await eventually(lambda: len(ticks) >= 2, "the run that waited, and the one for the slots that passed")
    first, second = ticks[:2]
    assert first.at == waiting
    # Once for all that passed: the latest.
    assert second.at - first.at >= timedelta(milliseconds=200)


async def test_a_slot_has_one_run_whatever_happens_to_its_row_and_the_clock(app: Penstock, sql: Sql) -> None:
    app.timer(every=timedelta(hours=1), name="sweep")(lambda: None)
    await app.types["sweep"].declare()
    slot = await sql.fetchval("select date_trunc('hour', now()) - interval '2 hours'")
    first = "select penstock.declare_schedule('sweep', 'every', '3600', $1, 'job')"
    run = "select penstock.enqueue_run('sweep', '3600', $1, $1, $1::timestamptz + interval '1 hour')"
    await sql.execute(first, slot)
    id = await sql.fetchval(run, slot)
    # Another worker saw the same slot.
    assert await sql.fetchval(run, slot) is None
    [done] = await run_due_jobs(app)
    assert done.id == id
    # The clock steps back over the slot, and the schedule begins again there.
    await sql.execute("delete from penstock.schedules")
    await sql.execute(first, slot)
    assert await sql.fetchval(run, slot) == id
    assert await run_due_jobs(app) == []
    assert await sql.fetchval("select count(*) from penstock.archived_jobs") == 1
    assert (await record_of(app, "sweep")).last_outcome == "succeeded"
    # A slot that lies ahead of the clock does not run.
    ahead = slot + timedelta(hours=5)
    await sql.execute("update penstock.schedules set next_at = $1", ahead)
    assert await sql.fetchval(run, ahead) is None


async def test_what_became_of_a_run_outlives_the_archive(app: Penstock, sql: Sql) -> None:
    @app.timer(every=timedelta(hours=1), name="sweep", max_attempts=1)
    async def sweep() -> None:
        raise ValueError("dust")

    await app.declare()
    await sql.execute(DUE, "sweep", "job")
    due = await sql.fetchval("select next_at from penstock.schedules")
    await sql.execute("select penstock.enqueue_run('sweep', '3600', $1, $1, $1::timestamptz + interval '1 hour')", due)
    await run_due_jobs(app)
    # Seen in the archive at once, and noted by the next worker.
    assert (await record_of(app, "sweep")).last_error == "ValueError: dust"
    await sql.execute("select penstock.note_schedules('{sweep}')")
    await sql.execute("delete from penstock.archived_jobs")
    record = await record_of(app, "sweep")
    assert (record.last_outcome, record.last_error, record.last_finished_at is not None) == ("failed", "ValueError: dust", True)


async def test_a_schedule_that_left_the_code_is_marked_and_can_be_dropped(app: Penstock, sql: Sql) -> None:
    app.timer(every=timedelta(hours=1), name="sweep")(lambda: None)
    async with running_worker(app):
        await eventually(lambda: app.list_schedules(), "the schedule")
        assert (await record_of(app, "sweep")).declared
        with pytest.raises(Conflict, match="sweep is declared by a running worker"):
            await app.drop_schedule("sweep")
    await sql.execute("update penstock.schedules set declared_at = now() - interval '2 minutes'")
    assert not (await record_of(app, "sweep")).declared
    await app.drop_schedule("sweep")
    assert await app.list_schedules() == []
    # What its runs were stays.
    assert "sweep" in [found.name for found in await app.job_types()]
    with pytest.raises(NotFound, match="no such schedule: sweep"):
        await app.drop_schedule("sweep")


async def test_a_running_worker_goes_on_saying_what_it_declares(app: Penstock, sql: Sql) -> None:
    app.timer(every=timedelta(hours=1), name="sweep")(lambda: None)
    await sql.execute(DUE, "sweep", "job")
    await sql.execute("update penstock.schedules set next_at = now() + interval '1 hour', declared_at = now() - interval '1 day'")
    async with running_worker(app):
        await eventually(lambda: sql.fetchval("select declared from penstock.schedule_list()"), "the declaration")


async def test_a_worker_of_some_types_runs_the_schedules_that_are_named(app: Penstock, sql: Sql) -> None:
    ran: list[str] = []
    for name, as_job in [("a", True), ("b", False), ("c", True)]:
        app.timer(every=timedelta(milliseconds=50), name=name, as_job=as_job)(lambda name=name: ran.append(name))
    async with running_worker(app, "a", "b"):
        await eventually(lambda: {*ran} == {"a", "b"}, "runs of both")
    assert await sql.fetchval("select array_agg(name order by name) from penstock.schedules") == ["a", "b"]


def test_what_cannot_be_a_schedule_is_refused() -> None:
    app = Penstock("postgresql://nowhere")
    app.job("mail")(lambda job: None)
    with pytest.raises(InvalidInput, match="job type mail is declared twice"):
        app.cron("* * * * *", name="mail")(lambda: None)
    with pytest.raises(InvalidInput, match="cannot have both as_job and per_worker"):
        app.cron("* * * * *", name="a", as_job=True, per_worker=True)(lambda: None)
    with pytest.raises(InvalidInput, match="runs in place and cannot have options of jobs"):
        app.cron("* * * * *", name="a", as_job=False, max_attempts=3)(lambda: None)
    with pytest.raises(InvalidInput, match="cannot take other besides tick"):
        app.cron("* * * * *", name="a")(lambda tick, other: None)

    async def wants_job(job: Job[Tick]) -> None: ...

    with pytest.raises(InvalidInput, match="takes a Job, but its runs are not jobs"):
        app.timer(every=timedelta(seconds=1), name="a", as_job=False)(wants_job)
    assert "a" not in app.schedules


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("declare_schedule('a/b', 'every', '1', now())", "invalid name of a schedule: 'a/b'"),
        ("declare_schedule('a', 'every', '1', now(), 'often')", "unknown way to run a schedule: 'often'"),
        ("declare_schedule('a', 'every', '1', null, 'job')", "schedule a has no first time"),
        ("enqueue_run('due', due.spec, due.next_at, due.next_at, due.next_at)", "schedule due cannot be due at"),
        ("enqueue_run('due', due.spec, due.next_at, now() + interval '1 day', now())", "schedule due cannot run for"),
        ("enqueue_run('due', due.spec, due.next_at, due.next_at, 'infinity')", "schedule due cannot be due at infinity"),
        ("enqueue_run('due', due.spec, due.next_at, due.next_at - interval '1 s', now() + interval '1 day')", "cannot run for"),
        ("end_schedule('due', 'w', due.next_at, due.next_at, due.next_at)", "schedule due cannot be due at"),
        ("end_schedule('due', 'w', due.next_at, due.next_at - interval '1 s')", "schedule due cannot be due at"),
        ("end_schedule('due', 'w', due.next_at, null)", "schedule due cannot be due at no time"),
        ("declare_schedule('a', 'every', '1', 'infinity', 'job')", "schedule a cannot begin at infinity"),
        ("declare_schedule('a', 'every', '1 hour', now(), 'job')", "invalid times of schedule a: 'every' '1 hour'"),
        ("declare_schedule('a', 'every', '1e3', now(), 'job')", "invalid times of schedule a"),
        ("declare_schedule('a', 'every', '0', now(), 'job')", "invalid times of schedule a"),
        ("declare_schedule('a', 'every', '99999999999', now(), 'job')", "invalid times of schedule a"),
        ("declare_schedule('a', 'every', null, now(), 'job')", "invalid times of schedule a: 'every' null"),
        ("declare_schedule('a', 'cron', '0 4 * * *', now(), 'job')", "invalid times of schedule a"),
        ("declare_schedule('a', 'cron', '@daily', now(), 'job')", "invalid times of schedule a"),
        ("declare_schedule('a', 'weekly', '1', now(), 'job')", "invalid times of schedule a"),
        ("drop_schedule('none')", "no such schedule: none"),
    ],
)
async def test_sql_says_what_is_wrong(sql: Sql, call: str, message: str) -> None:
    await sql.execute(DUE, "due", "job")
    with pytest.raises(asyncpg.PostgresError, match=message) as error:
        await sql.execute(f"select penstock.{call} from penstock.schedules as due")
    assert error.value.sqlstate.startswith("PS4") and error.value.hint  # type: ignore[attr-defined]


async def test_the_command_line_shows_schedules_and_drops_them(app: Penstock, url: str, sql: Sql) -> None:
    await type_queries.create_job_type(await app.database(), "report", {})
    await sql.execute(
        "insert into penstock.schedules (name, kind, spec, runs_as, next_at, last_at, last_outcome, last_error, updated_at)"
        " values ('report', 'cron', '0 4 * * * UTC', 'job', now(), now(), 'failed', 'ValueError: no takings', now())"
    )
    listed = penstock(url, "schedules").stdout
    assert all(word in listed for word in ("report", "0 4 * * * UTC", "failed", "ValueError: no takings", "not since -"))
    assert json.loads(penstock(url, "schedules", "list", "--json").stdout)[0]["last_outcome"] == "failed"
    assert "ValueError: no takings" in penstock(url, "schedules", "show", "report").stdout
    assert penstock(url, "schedules", "show", "none").returncode == 1
    assert "dropped: report" in penstock(url, "schedules", "drop", "report").stdout
    assert "no such schedule: report" in penstock(url, "schedules", "drop", "report").stderr
    assert "no schedules yet" in penstock(url, "schedules").stdout
