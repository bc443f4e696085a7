"""Encrypted schedules: the payload of a run is its time, which stays readable; what the run leaves is encrypted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, Penstock, Status, Tick
from penstock.core.encryption import new_key
from penstock.errors import InvalidInput
from penstock.testing import run_due_jobs, running_worker
from penstock.worker.fleets import workers
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
WORD = "quokka"


@pytest.fixture
def keys() -> list[str]:
    return [new_key()]


def declared(url: str, keys: list[str], *, every: timedelta = timedelta(days=1), encrypted: bool = True) -> Penstock:
    """An application with a schedule whose first attempt fails."""
    app = Penstock(url, keys=keys)

    @app.timer(every=every, name="report", encrypted=encrypted, keep_result=True, max_attempts=1)
    async def report(job: Job[Tick]) -> str:
        job.log(f"reporting {WORD}")
        if job.data.late > timedelta(days=30):
            raise ValueError(f"too late for {WORD}")
        return WORD

    return app


async def stored(sql: Sql) -> str:
    """All that the tables of the schema have, as text."""
    found = []
    for (name,) in await sql.fetch("select table_name from information_schema.tables where table_schema = 'penstock'"):
        found += [row[0] for row in await sql.fetch(f'select t::text from penstock."{name}" as t')]
    return "\n".join(found)


async def test_results_and_logs_of_runs_lie_encrypted(url: str, sql: Sql, keys: list[str]) -> None:
    app = declared(url, keys, every=timedelta(milliseconds=200))
    async with app:
        async with running_worker(app):
            await eventually(lambda: sql.fetchval("select count(*) > 1 from penstock.archived_jobs"), "two runs")
        for record in await app.find_many(name="report", status="succeeded"):
            assert (record.encrypted, record.result) == (True, WORD)
            assert record.data.keys() == {"at"}, "the time of a run is readable"
            assert [line.line for line in (await app.find(record.id)).log] == [f"reporting {WORD}"]
        assert WORD not in await stored(sql)


async def test_a_run_on_request_and_one_by_hand_carry_a_time_and_nothing_else(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        async with running_worker(app):
            await eventually(lambda: sql.fetchval("select count(*) from penstock.schedules"), "the schedule")
            await sql.fetchval("select penstock.run_schedule('report')")
            await eventually(lambda: sql.fetchval("select count(*) from penstock.archived_jobs"), "the run")
        await sql.execute("select penstock.enqueue('report')")
        await sql.execute("select penstock.enqueue('report', '{\"at\": \"2026-01-31T12:00:00Z\"}')")
        for smuggled in (
            '{"at": "quokka"}',
            '{"at": "2026-01-31T12:00:00Z", "word": 1}',
            '["quokka"]',
            '"quokka"',
            '{"at": {"a": 1}}',
        ):
            with pytest.raises(asyncpg.PostgresError, match="job type report is encrypted"):
                await sql.execute("select penstock.enqueue('report', $1)", smuggled)
        statuses = [record.status for record in await run_due_jobs(app, "report")]
        assert sorted(statuses) == [Status.FAILED, Status.SUCCEEDED]
        assert WORD not in await stored(sql)
        failed = (await app.find_many(name="report", status="failed"))[0]
        assert failed.errors[0]["message"] == f"too late for {WORD}"


async def test_the_last_error_of_a_schedule_shows_its_class(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app:
        async with running_worker(app):
            await eventually(lambda: sql.fetchval("select count(*) from penstock.schedules"), "the schedule")
            await sql.fetchval("select penstock.run_schedule('report')")
            await eventually(lambda: sql.fetchval("select count(*) from penstock.archived_jobs"), "the run")
        sealed = await sql.fetchval("select result from penstock.archived_jobs")
        text = await sql.fetchval(
            "select penstock.error_text(jsonb_build_object('type', 'ValueError', 'attempt', 1) || $1::jsonb)", sealed
        )
        assert text == "ValueError: encrypted"


async def test_a_worker_without_a_key_does_not_claim_runs_and_says_so(url: str, sql: Sql, keys: list[str]) -> None:
    async with declared(url, keys) as app, running_worker(app):
        await eventually(lambda: sql.fetchval("select count(*) from penstock.schedules"), "the schedule")
    async with declared(url, []) as keyless, running_worker(keyless):
        run = await sql.fetchval("select penstock.run_schedule('report')")
        await eventually(lambda: sql.fetchval("select no_key ? 'report' from penstock.workers"), "that it says so")
        assert [one.no_key for one in await workers(await keyless.database())] == [{"report": None}]
        assert await sql.fetchval("select status from penstock.queued_jobs where id = $1", run) == "queued"


async def test_a_run_in_place_cannot_be_encrypted(url: str, keys: list[str]) -> None:
    app = Penstock(url, keys=keys)
    with pytest.raises(InvalidInput, match="runs in place and cannot have options of jobs, such as encrypted"):

        @app.cron("0 4 * * *", as_job=False, encrypted=True)
        async def report() -> None: ...
