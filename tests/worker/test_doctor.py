"""`penstock doctor`: each finding is caused for real, and is not there otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from pydantic import SecretStr

from penstock import Event, Job, OnFailure, Penstock
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.testing import run_due_jobs
from penstock.worker import doctor
from penstock.worker.doctor import examine
from penstock.worker.findings import Finding, worst
from tests.command_line import penstock
from tests.http.http_server import TOKEN, serving
from tests.waiting import eventually
from tests.workers import Workers


@pytest.fixture
async def database(app: Penstock) -> AsyncIterator[Database]:
    yield await app.database()


async def found(database: Database, check: str) -> list[Finding]:
    """The findings of a check that are not ok, each of which says what to do."""
    findings = [one for one in await examine(database) if one.check == check and one.level != "ok"]
    assert all(finding.advice for finding in findings)
    return findings


async def test_a_database_with_workers_is_well(app: Penstock, database: Database, url: str) -> None:
    @app.job("mail")
    async def mail(to: str) -> None:
        pass

    async with Workers(app):
        await mail.enqueue(to="ada")

        async def archived() -> bool:
            return not [one for one in await examine(database) if one.level != "ok"]

        await eventually(archived, "a clean report", timeout=60)
        run = await asyncio.to_thread(penstock, url, "doctor", "--json")
    assert {one["level"] for one in json.loads(run.stdout)} == {"ok"}, run.stdout
    assert run.returncode == 0


async def test_jobs_that_no_worker_takes_are_a_problem_and_end_with_exit_code_1(app: Penstock, url: str) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail", {})
    run = await asyncio.to_thread(penstock, url, "doctor")
    assert run.returncode == 1
    assert "1 jobs of mail wait, and no worker works on this type" in run.stdout
    assert "penstock worker MODULE:APP" in run.stdout


async def test_of_many_types_that_no_worker_takes_the_fullest_are_named(database: Database, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.create_job_type('t-' || n) from generate_series(1, 30) as n")
    await sql.execute("select penstock.enqueue('t-' || n, '1') from generate_series(1, 30) as n")
    await sql.execute("select penstock.enqueue('t-25', '1')")
    findings = await found(database, "workers")
    assert [finding.level for finding in findings] == ["problem"] * 11
    assert findings[0].message.startswith("2 jobs of t-25 wait")
    assert findings[-1].message == "the same holds for 20 more job types"


async def test_a_type_without_worker_is_a_warning_while_nothing_waits(app: Penstock, database: Database) -> None:
    await app.create_job_type("mail")
    (finding,) = await found(database, "workers")
    assert (finding.level, finding.message) == ("warning", "no worker works on mail")


async def test_jobs_of_a_paused_type_wait_for_the_end_of_the_pause(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any]
) -> None:
    await app.create_job_type("mail")
    await app.create_job_type("print-labels", concurrency=0)
    await app.create_job_type("idle")
    await sql.execute("select penstock.register_worker('w', '{mail,print-labels,idle}')")
    for name in ("mail", "print-labels"):
        await app.enqueue(name, {})
    await app.pause("mail")
    await app.pause("idle")
    await sql.execute("update penstock.jobs set paused_at = '2026-01-11 18:26Z' where name = 'mail'")
    await sql.execute(
        "update penstock.queued_jobs set created_at = now() - interval '1 hour', run_after = now() - interval '1 hour'"
    )
    assert [(finding.level, finding.message, finding.advice) for finding in await found(database, "workers")] == [
        (
            "warning", "mail is paused since 2026-01-11 18:26 UTC, and 1 jobs wait",
            "When the reason is gone: penstock resume mail",
        ),
        (
            "warning", "print-labels is paused by a concurrency of 0, and 1 jobs wait",
            "Give it another concurrency: penstock types change",
        ),
    ]  # fmt: skip
    # Without a worker they wait for the same, and a worker would not help.
    await sql.execute("delete from penstock.workers")
    messages = [finding.message for finding in await found(database, "workers")]
    assert [message.split(",")[-1] for message in messages] == [" and 1 jobs wait"] * 2 + ["no worker works on idle"]


async def test_a_blocked_event_loop_is_a_problem(database: Database, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.register_worker('stuck', '{mail}')")
    await sql.execute("update penstock.workers set blocked_since = now(), blocked_by = 'mail job_1'")
    (finding,) = await found(database, "workers")
    assert "stuck makes no progress: mail job_1" in finding.message


async def test_an_old_transaction_is_found(
    database: Database, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "OLD_SNAPSHOT_S", 0.2)
    await sql.execute("begin isolation level repeatable read")
    await sql.execute("select * from penstock.jobs")

    async def old() -> list[Finding]:
        return await found(database, "transactions")

    (finding,) = await eventually(old, "the old transaction", timeout=60)
    assert "vacuum removes no rows" in finding.message
    await sql.execute("rollback")

    async def gone() -> bool:
        return not await old()

    await eventually(gone, "the end of the finding", timeout=60)


async def test_dead_rows_that_vacuum_does_not_remove_are_found(
    database: Database, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(doctor.MOST_DEAD_ROWS, "queued_jobs", 50)
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    await sql.execute("select penstock.create_job_type('mail')")
    await sql.execute("select penstock.enqueue('mail', '{}') from generate_series(1, 200)")
    await sql.execute("delete from penstock.queued_jobs")

    async def dead() -> list[Finding]:
        await sql.execute("select pg_stat_force_next_flush()")
        return await found(database, "vacuum")

    (finding,) = await eventually(dead, "the dead rows", timeout=60)
    assert "penstock.queued_jobs has 200 dead rows" in finding.message
    assert "vacuum penstock.queued_jobs" in str(finding.advice)


async def test_a_notification_that_does_not_arrive_is_a_problem(app: Penstock, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Notifications stay in their database: one that listens elsewhere gets none, as behind a pooler.
    monkeypatch.setattr(doctor, "NOTIFY_S", 0.5)
    elsewhere = urlsplit(url)._replace(path="/postgres").geturl()
    database = Database(url, app.settings.model_copy(update={"listen_url": SecretStr(elsewhere)}))
    await app.migrate()
    await database.open()
    try:
        (finding,) = await found(database, "notifications")
    finally:
        await database.close()
    assert (finding.level, "PENSTOCK_LISTEN_URL" in str(finding.advice)) == ("problem", True)


async def test_a_clock_that_is_off_is_found(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real = time.time
    monkeypatch.setattr("penstock.postgres.health.time.time", lambda: real() - 60)
    (finding,) = await found(database, "clock")
    assert "ahead of this machine's" in finding.message


async def test_a_day_that_the_archive_lacks_is_found(database: Database, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.ensure_archive(now()), penstock.ensure_archive(now() + interval '1 day')")
    assert await found(database, "archive") == []
    tomorrow = await sql.fetchval("select to_char(now() at time zone 'UTC' + interval '1 day', 'YYYYMMDD')")
    await sql.execute(f"drop table penstock.archived_jobs_p{tomorrow}")
    (finding,) = await found(database, "archive")
    assert "the archive has no partition for" in finding.message


async def test_a_workflow_that_does_not_move_is_a_problem(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    group = await app.job_group("import").open()
    await app.enqueue("step", {}, after=await app.enqueue("step", {}, after=group))
    assert await found(database, "workflows") == []
    await group.seal()
    await sql.execute("update penstock.workflow_ticks set noted_at = noted_at - interval '5 minutes'")
    (finding,) = await found(database, "workflows")
    assert (finding.level, "was not released for 30" in finding.message) == ("problem", True), finding
    amounts = {(one.gauge, one.label): one.amount for one in await health.gauges(database)}
    assert amounts["workflow_tick_seconds", ""] > 299
    assert (amounts["job_groups", "open"], amounts["job_groups", "running"]) == (0, 1)


async def test_a_job_whose_dependency_is_gone_is_a_problem(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first, running, group = await app.enqueue("step", {}), await app.enqueue("step", {}), await app.job_group("import").open()
    waiting = await app.enqueue("step", {}, after=[first, running, group])
    behind = await app.enqueue("step", {}, after=waiting)
    assert await found(database, "workflows") == []
    # As if an end had not been noted.
    await sql.execute("delete from penstock.queued_jobs where id = $1", first.id)
    (finding,) = await found(database, "workflows")
    assert finding.message == f"job {waiting.id} of step waits for {first.id}, which has ended or is gone"
    await sql.execute("update penstock.queued_jobs set awaited = null where id = $1", running.id)
    await sql.execute("update penstock.job_groups set finished_at = now() - interval '2 minutes'")
    await sql.execute("delete from penstock.waiting_jobs where id = $1", waiting.id)
    assert {finding.message.split()[6] for finding in await found(database, "workflows")} >= {f"{waiting.id},"}
    assert behind.outcome == "waiting"


async def test_a_group_that_is_never_sealed_is_a_warning(app: Penstock, database: Database, sql: asyncpg.Connection[Any]) -> None:
    for name in ("left", "sealed", "new"):
        await app.job_group(name).open()
    await sql.execute("select penstock.seal_group(id) from penstock.job_groups where name = 'sealed'")
    await sql.execute("update penstock.job_groups set changed_at = changed_at - interval '2 days' where name <> 'new'")
    (finding,) = await found(database, "workflows")
    assert (finding.level, finding.message) == (
        "warning", "job groups that are not sealed have not changed for a day: left",
    )  # fmt: skip


async def test_a_wait_for_a_signal_without_a_timeout_is_a_warning(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any]
) -> None:
    @app.job("order")
    async def order(job: Job[Any]) -> None:
        if job.data == "sleep":
            await job.sleep("paid", timedelta(days=9))
        await job.wait_for("paid", timeout=timedelta(days=30) if job.data == "wait" else None)

    endless, *_ = [(await app.enqueue("order", data)).id for data in ("endless", "wait", "sleep")]
    new = (await app.enqueue("order", "endless")).id
    await run_due_jobs(app)
    assert await found(database, "workflows") == []
    await sql.execute("update penstock.job_steps set at = at - interval '2 days' where job <> $1", new)
    (finding,) = await found(database, "workflows")
    assert (finding.level, finding.message) == (
        "warning", f"jobs have waited for more than a day for a signal, without a timeout: {endless} of order for paid",
    )  # fmt: skip
    await app.signal(endless, "paid")
    await run_due_jobs(app)
    assert await found(database, "workflows") == []


async def test_the_group_that_has_waited_longest_for_its_seal_is_named_beside_thousands_of_others(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any]
) -> None:
    await app.job_group("left").open()
    await sql.execute("update penstock.job_groups set changed_at = changed_at - interval '2 days'")
    await sql.execute("select penstock.open_group('group ' || n) from generate_series(1, 1200) as n")
    (finding,) = await found(database, "workflows")
    assert finding.message == "job groups that are not sealed have not changed for a day: left"


async def test_a_quarantined_partition_is_a_problem(app: Penstock, database: Database) -> None:
    orders = app.stream("orders", partitions=1)

    @orders.consumer(group="billing", on_failure=OnFailure(max_attempts=1))
    async def bill(event: Event[Any]) -> None:
        raise ValueError("no")

    async with Workers(app):
        await orders.append({})

        async def quarantined() -> list[Finding]:
            return await found(database, "streams")

        (finding,) = await eventually(quarantined, "the quarantine", timeout=60)
    assert "1 partitions of orders are quarantined for billing" in finding.message


async def test_a_group_that_is_behind_is_a_warning_with_the_reason(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LAG_LONG_S", 0.0)
    await app.create_stream("orders", 1)
    orders = await app.find_stream("orders")
    await database.fetch("select penstock.declare_consumer_group('orders', 'billing')")
    await orders.append({})
    (finding,) = await found(database, "streams")
    assert finding.level == "warning"
    assert "billing is 1 events behind in orders" in finding.message
    assert "no worker consumes the partitions 0" in finding.message
    await database.fetch("select penstock.pause_partitions('orders', 'billing')")
    (finding,) = await found(database, "streams")
    assert "partitions are paused: 0" in finding.message
    await database.fetch("select penstock.resume_partitions('orders', 'billing')")
    await sql.execute(
        "update penstock.group_offsets"
        " set failing_since = '2026-01-11 18:26Z', failing_offset = 0, failing_attempt = 4, failing_error = 'no'"
    )
    (finding,) = await found(database, "streams")
    assert "a handler fails at offset 0 of partition 0 since 2026-01-11 18:26 UTC" in finding.message
    await database.fetch("select penstock.seek_group('orders', 'billing', '{0}', '{1}')")
    assert await found(database, "streams") == []


async def test_growth_that_a_paused_partition_holds_back_is_a_problem(app: Penstock, database: Database) -> None:
    await app.create_stream("orders", 1)
    orders = await app.find_stream("orders")
    await database.fetch("select penstock.declare_consumer_group('orders', 'billing')")
    await orders.append({}, key="a")
    await database.fetch("select penstock.pause_partitions('orders', 'billing')")
    await orders.grow(2)
    (finding,) = await found(database, "streams")
    assert "holds back 1 new partitions" in finding.message


async def test_a_lake_that_is_behind_is_found(
    app: Penstock, database: Database, sql: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await sql.execute("select penstock.open_lake('lake', 'file:///lake')")
    assert await found(database, "lakes") == []
    # A quiet system finishes nothing for days, and its lake is behind with nothing.
    await sql.execute("update penstock.lakes set updated_at = now() - interval '2 days'")
    assert await found(database, "lakes") == []
    await app.create_job_type("mail")
    await app.cancel((await app.enqueue("mail", {})).id)
    assert await found(database, "lakes") == []
    monkeypatch.setattr(doctor, "LAKE_BEHIND_S", 0.0)
    (finding,) = await found(database, "lakes")
    assert "keeps the archive from being pruned" in finding.message


async def test_a_schema_of_another_version_is_the_only_finding(app: Penstock, database: Database, url: str) -> None:
    await database.fetch("update penstock.protocol set number = 1000, oldest = 1000")
    (finding,) = await examine(database)
    assert (finding.check, finding.level) == ("schema", "problem")
    assert await app.doctor() == [finding]
    # A command, too, says it as a finding, though it could not open the application.
    for place, check in ((url, "schema"), ("postgresql://127.0.0.1:1/none", "database")):
        run = await asyncio.to_thread(penstock, place, "doctor", "--json")
        assert [(one["check"], one["level"]) for one in json.loads(run.stdout)] == [(check, "problem")] and run.returncode == 1


async def test_a_server_says_what_it_finds_and_the_command_shows_it(app: Penstock, url: str) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail", {})

    def over_http() -> None:
        with serving(url) as served, served.client() as client:
            found = client.get("/v1/doctor").json()
            assert {one["check"] for one in found} >= {
                "schema",
                "workers",
                "vacuum",
                "notifications",
                "clock",
                "operations",
                "lakes",
            }
            (problem,) = [one for one in found if one["level"] == "problem"]
            assert "1 jobs of mail wait, and no worker works on this type" in problem["message"] and problem["advice"]
            run = penstock("", "--server", served.base_url, "doctor", PENSTOCK_SERVER_TOKEN=f"admin.{TOKEN}")
            assert run.returncode == 1 and problem["message"] in run.stdout, run.stderr

    await asyncio.to_thread(over_http)


def test_the_worst_finding_decides() -> None:
    findings = [Finding("a", "ok", ""), Finding("b", "warning", "", "do")]
    assert (worst(findings[:1]), worst(findings)) == ("ok", "warning")
    assert worst([*findings, Finding("c", "problem", "", "do")]) == "problem"
