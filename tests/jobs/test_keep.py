"""`keep`: how long finished jobs are kept, declared for job types, pools and subscribers, and by the settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Fail, InvalidInput, Job, Keep, Penstock
from penstock.settings import Settings, longest_kept
from penstock.testing import run_due, running_worker
from penstock.worker import maintenance
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
DAY = timedelta(days=1)


async def classes(sql: Sql) -> dict[str, int]:
    """The retention class of each finished job, by type and status."""
    return {
        f"{name} {status}": keep
        for name, status, keep in await sql.fetch("select name, status, keep from penstock.archived_jobs")
    }


async def test_jobs_are_kept_by_their_outcome_and_found_whatever_it_was(app: Penstock, sql: Sql) -> None:
    @app.job("bill", keep=Keep(succeeded=3 * DAY, failed=365 * DAY))
    async def bill(good: bool) -> None:
        if not good:
            raise Fail("no")

    sent = [await bill.enqueue(good) for good in (True, False)]
    await run_due(app)
    assert await classes(sql) == {"bill succeeded": 3, "bill failed": 365}
    assert {job.id for job in await app.find_many(name="bill")} == {one.id for one in sent}
    again = [await bill.options(id=one.id).enqueue(True) for one in sent]
    assert [one.id for one in again] == [one.id for one in sent] and await classes(sql) == {
        "bill succeeded": 3,
        "bill failed": 365,
    }
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    assert await app.replay(sent[1].id) != sent[1].id


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(3 * DAY, (3, 3)), (Keep(succeeded=2 * DAY), (3, 0)), (Keep(failed=40 * DAY), (0, 90)), (None, (0, 0))],
)
async def test_a_span_is_for_every_outcome_and_what_is_left_out_is_by_default(
    app: Penstock, sql: Sql, keep: Any, expected: tuple[int, int]
) -> None:
    @app.job("bill", keep=keep)
    async def bill(good: bool) -> None:
        if not good:
            raise Fail("no")

    await bill.enqueue_many([{"good": True}, {"good": False}])
    await run_due(app)
    assert await classes(sql) == {"bill succeeded": expected[0], "bill failed": expected[1]}


async def test_pools_and_subscribers_say_it_too(app: Penstock, sql: Sql) -> None:
    tenants = app.pool("tenants", keep=7 * DAY)
    memos = app.topic("memos")

    @tenants.job
    async def work(job: Job[int]) -> None: ...

    @memos.subscriber("desk", keep=30 * DAY)
    async def read(job: Job[int]) -> None: ...

    await app.declare()
    await tenants.enqueue("acme", 1)
    await memos.publish(1)
    await run_due(app)
    assert await classes(sql) == {"tenants succeeded": 7, "memos_desk succeeded": 30}


async def test_the_settings_say_it_for_the_types_of_an_application_that_do_not(url: str, sql: Sql) -> None:
    async with Penstock(url, settings=Settings(keep=Keep(succeeded=DAY, failed=90 * DAY))) as app:

        @app.job("bill", max_attempts=1)
        async def bill() -> None: ...

        @app.job("ship", keep=7 * DAY)
        async def ship() -> None: ...

        await bill.enqueue()
        await ship.enqueue()
        await run_due(app)
    assert await classes(sql) == {"bill succeeded": 1, "ship succeeded": 7}
    kept = "select keep_failed from penstock.jobs where name = 'bill'"
    assert await sql.fetchval(kept) == 90 * DAY


def test_the_environment_can_say_it_by_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KEEP", '{"succeeded": "P3D", "failed": "P90D"}')
    assert Settings.read().keep == Keep(3 * DAY, 90 * DAY)
    monkeypatch.setenv("PENSTOCK_KEEP", "86400")
    assert Settings.read().keep == DAY


@pytest.mark.parametrize("value", ['{"succeeded": "P3D"}', '{"succeeded": "P3D", "failed": "P900D"}', '{"failed', '{"other": 1}'])
def test_a_wrong_document_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PENSTOCK_KEEP", value)
    with pytest.raises(InvalidInput, match="the environment variable PENSTOCK_KEEP"):
        Settings.read()


@pytest.mark.parametrize(
    ("keep", "longest"), [(None, None), (DAY, DAY), (Keep(DAY, 90 * DAY), 90 * DAY), (Keep(90 * DAY, DAY), 90 * DAY)]
)
def test_types_of_no_application_are_kept_for_the_longer_span(keep: Any, longest: timedelta | None) -> None:
    assert longest_kept(keep) == longest


async def test_a_record_shows_it_as_it_is_declared(app: Penstock) -> None:
    keep = Keep(succeeded=2 * DAY, failed=40 * DAY)
    app.job_type("bill", keep=keep)
    await app.declare()
    (record,) = [record for record in await app.job_types() if record.name == "bill"]
    assert record.options.keep == keep


async def test_prune_keeps_for_ever_what_says_nothing_unless_it_is_told(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("select penstock.create_job_type('bill', '{\"keep_succeeded\": \"1 day\"}')")
    await sql.execute("select set_config('penstock.clock', '2025-01-01T12:00:00Z', false)")
    for name in ("ship", "bill"):
        await sql.execute("select penstock.enqueue($1, p_id => gen_random_uuid())", name)
        (job,) = await sql.fetch("select * from penstock.claim('w', array[$1], 1)", name)
        await sql.fetch(
            "select * from penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", job["id"], job["lease"]
        )
    assert {name: jobs for name, jobs in (await app.prune()).items() if jobs} == {"archived_jobs_k1_p20250101": 1}
    assert {name: jobs for name, jobs in (await app.prune(DAY)).items() if jobs} == {"archived_jobs_p20250101": 1}


async def test_a_worker_prunes_what_says_how_long_it_is_kept_also_when_the_settings_keep_for_ever(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_EVERY_S", 0.0)
    await sql.execute("select penstock.create_job_type('bill', '{\"keep_succeeded\": \"1 day\"}')")
    await sql.execute("select penstock.ensure_archive('2025-01-01T12:00:00Z')")
    old = "select count(*) from penstock.archive_leaves() where keep = 1 and day = '2025-01-01'"
    assert await sql.fetchval(old) == 1
    async with Penstock(url, settings=Settings(keep=None, maintenance_interval=timedelta(milliseconds=50))) as app:

        @app.job
        async def nothing() -> None: ...

        async with running_worker(app):
            await eventually(lambda: sql.fetchval(f"select ({old}) = 0"))
