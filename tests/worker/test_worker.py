"""The worker against a real database: what a handler does is what becomes of its job."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from penstock import Backoff, Fail, Job, JobFailed, Options, Penstock, Retry, Settings, Status
from penstock.jobs import claim_queries
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))


class Shipment(BaseModel):
    id: str
    weight_kg: float = 1.0


async def test_a_typed_payload_reaches_an_async_handler(app: Penstock) -> None:
    seen: list[Shipment] = []

    @app.job("ship")
    async def ship(job: Job[Shipment]) -> None:
        seen.append(job.data)

    async with running_worker(app, at_once=True):
        receipt = await ship.enqueue(Shipment(id="shp_123"))
        record = await app.wait(receipt.id)
    assert seen == [Shipment(id="shp_123")]
    assert (record.status, record.attempt, record.max_attempts) == (Status.SUCCEEDED, 1, 5)
    assert record.worker is not None


async def test_a_plain_handler_runs_in_a_thread_and_its_result_is_kept(app: Penstock) -> None:
    threads: list[str] = []

    @app.job("square", keep_result=True)
    def square(job: Job[int]) -> int:
        threads.append(threading.current_thread().name)
        return job.data**2

    async with running_worker(app, at_once=True):
        record = await app.wait((await square.enqueue(12)).id)
    assert record.result == 144
    assert threads[0].startswith("penstock-handler")


async def test_a_failure_is_retried_and_every_error_is_kept(app: Penstock) -> None:
    @app.job("flaky", max_attempts=3, backoff=QUICK)
    async def flaky(job: Job[Any]) -> None:
        if job.attempt < 3:
            raise ValueError(f"attempt {job.attempt}")

    async with running_worker(app, at_once=True):
        record = await app.wait((await flaky.enqueue()).id)
    assert [error["message"] for error in record.errors] == ["attempt 1", "attempt 2"]
    assert all("Traceback" in error["traceback"] and error["worker"] for error in record.errors)
    assert (record.attempt, record.max_attempts) == (3, 3)


async def test_handlers_of_each_kind_get_jobs_that_came_back_below_their_watermarks(
    app: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a retry without a delay. A claim without watermarks looks at the jobs of one kind alone."""
    scans: list[str] = []
    claim = claim_queries.claim

    async def noted(database: Any, holder: str, names: Any, limit: int, watermarks: Any, *others: Any, **more: Any) -> Any:
        scans.extend(names if not watermarks else ())
        return await claim(database, holder, names, limit, watermarks, *others, **more)

    @app.job("first")
    async def first(job: Job[Any]) -> None:
        pass

    @app.job("plain")
    def plain(job: Job[Any]) -> None:
        pass

    monkeypatch.setattr(claim_queries, "claim", noted)
    async with running_worker(app):
        for name in ("first", "plain"):
            await app.wait((await app.enqueue(name, 0)).id)
        scans.clear()
        await eventually(lambda: {"first", "plain"} <= set(scans), "claims without watermarks for both")


@pytest.mark.parametrize(
    ("raised", "attempt"), [(Fail("never"), 1), (ValueError("again"), 2), (Retry("soon", after=timedelta(0)), 2)]
)
async def test_a_job_fails_when_its_attempts_are_used_or_it_says_so(app: Penstock, raised: Exception, attempt: int) -> None:
    @app.job("hopeless", max_attempts=2, backoff=QUICK)
    async def hopeless(job: Job[Any]) -> None:
        raise raised

    async with running_worker(app, at_once=True):
        receipt = await hopeless.enqueue()
        with pytest.raises(JobFailed, match="never|again|soon"):
            await app.wait(receipt.id)
    assert len((await app.find(receipt.id)).errors) == attempt


async def test_an_at_most_once_job_is_not_retried(app: Penstock) -> None:
    starts = 0

    @app.job("charge", delivery="at_most_once")
    async def charge(job: Job[Any]) -> None:
        nonlocal starts
        starts += 1
        raise ValueError("card declined")

    async with running_worker(app, at_once=True):
        receipt = await charge.enqueue()
        with pytest.raises(JobFailed, match="card declined"):
            await app.wait(receipt.id)
    assert starts == 1


async def test_a_payload_that_does_not_fit_fails_for_good(app: Penstock) -> None:
    @app.job("ship")
    async def ship(job: Job[Shipment]) -> None:
        raise AssertionError("must not run")

    async with running_worker(app, at_once=True):
        database = await app.database()
        id = await database.fetchval("select penstock.enqueue('ship', '{\"weight_kg\": 1}')")
        with pytest.raises(JobFailed, match="invalid payload for ship: id: Field required"):
            await app.wait(id)


@pytest.mark.parametrize("raised", [ValueError("nul \x00, \ud800 and \\u0000"), SystemExit(3)])
async def test_no_error_is_too_odd_to_be_kept(app: Penstock, raised: BaseException) -> None:
    @app.job("odd", max_attempts=1)
    async def odd(job: Job[Any]) -> None:
        raise raised

    async with running_worker(app, at_once=True):
        receipt = await odd.enqueue()
        with pytest.raises(JobFailed):
            await app.wait(receipt.id)
        other = await odd.enqueue()
        with pytest.raises(JobFailed):
            await app.wait(other.id)


async def test_a_result_that_cannot_be_stored_fails_its_own_job_alone(app: Penstock) -> None:
    @app.job("result", max_attempts=1, keep_result=True)
    async def result(job: Job[Any]) -> Any:
        return {"function": result} if job.data else "fine"

    async with running_worker(app, at_once=True):
        bad, good = await result.enqueue_many([True, False])
        with pytest.raises(JobFailed, match="not JSON"):
            await app.wait(bad.id)
        assert (await app.wait(good.id)).result == "fine"


async def test_a_running_job_can_be_cancelled(app: Penstock) -> None:
    started = asyncio.Event()
    cancelled = asyncio.Event()

    @app.job("long")
    async def long(job: Job[Any]) -> None:
        started.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with running_worker(app, at_once=True):
        receipt = await long.enqueue()
        await asyncio.wait_for(started.wait(), 30)
        assert await app.cancel(receipt.id) == "cancelling"
        await asyncio.wait_for(cancelled.wait(), 30)
        with pytest.raises(JobFailed, match="cancelled"):
            await app.wait(receipt.id)


async def test_a_handler_over_its_time_limit_is_stopped(app: Penstock) -> None:
    @app.job("stuck", max_attempts=1, time_limit=timedelta(milliseconds=200))
    async def stuck(job: Job[Any]) -> None:
        await asyncio.sleep(600)

    async with running_worker(app, at_once=True):
        receipt = await stuck.enqueue()
        with pytest.raises(JobFailed, match="time limit"):
            await app.wait(receipt.id)


async def test_progress_and_extend_reach_the_database(app: Penstock) -> None:
    go_on = asyncio.Event()

    @app.job("import", visibility_timeout=timedelta(minutes=1))
    async def import_rows(job: Job[Any]) -> None:
        await job.extend(timedelta(hours=2))
        job.progress({"rows": 10})
        await go_on.wait()

    async with running_worker(app, at_once=True):
        receipt = await import_rows.enqueue()

        async def progress() -> Any:
            return (await app.find(receipt.id)).progress

        assert await eventually(progress, "progress") == {"rows": 10}
        database = await app.database()
        left = await database.fetchval("select extract(epoch from max(expires_at) - now()) from penstock.leases")
        assert left > 3600
        go_on.set()
        await app.wait(receipt.id)
        assert await database.fetchval("select count(*) from penstock.leases") == 0


async def test_the_last_progress_is_noted_although_another_transaction_had_the_job(
    app: Penstock, sql: asyncpg.Connection[Any], url: str
) -> None:
    begin, release = asyncio.Event(), asyncio.Event()

    @app.job("long")
    async def long(job: Job[Any]) -> None:
        await begin.wait()
        job.progress("half")
        await release.wait()

    async def progress() -> Any:
        return (await app.find(receipt.id)).progress

    async def asked() -> bool:
        calls = "select count(*) from pg_stat_activity where query like '%penstock.report_progress(%' and pid <> pg_backend_pid()"
        return bool(await sql.fetchval(calls))

    async with running_worker(app):
        receipt = await app.enqueue("long")
        await eventually(lambda: _runs(sql), "a start")
        holder = await asyncpg.connect(url)
        try:
            async with holder.transaction():
                await holder.execute("select from penstock.queued_jobs where id = $1 for update", receipt.id)
                begin.set()
                await eventually(asked, "a call that passes over the job")
                assert await progress() is None
            assert await eventually(progress, "the progress") == "half"
        finally:
            await holder.close()
            release.set()


async def _runs(sql: asyncpg.Connection[Any]) -> bool:
    return bool(await sql.fetchval("select exists (select from penstock.queued_jobs where status = 'in-progress')"))


async def test_shutdown_hands_back_what_did_not_finish(url: str) -> None:
    started = asyncio.Event()
    settings = Settings(shutdown_grace=timedelta(milliseconds=50), concurrency=1)
    async with Penstock(url, settings=settings) as app:

        @app.job("slow")
        async def slow(job: Job[Any]) -> None:
            started.set()
            await asyncio.sleep(600)

        receipts = await slow.enqueue_many([{}, {}])
        worker = await app.worker()
        task = asyncio.create_task(worker.run())
        await asyncio.wait_for(started.wait(), 30)
        worker.stop()
        await asyncio.wait_for(task, 30)
        for receipt in receipts:
            record = await app.find(receipt.id)
            assert (record.status, record.attempt) == (Status.QUEUED, 1)
        assert await (await app.database()).fetchval("select count(*) from penstock.workers") == 0


async def test_jobs_that_a_worker_claims_after_it_was_declared_dead_are_released(url: str) -> None:
    ran_by: list[str] = []
    attempts: list[int] = []
    go_on = asyncio.Event()
    # Long enough that the job is claimed before the worker learns that it was declared dead.
    async with Penstock(url, settings=Settings(heartbeat_interval=3, poll_interval=0.1)) as app:

        @app.job("long")
        async def long(job: Job[Any]) -> None:
            ran_by.append(worker.id)
            attempts.append(job.attempt)
            await go_on.wait()

        database = await app.database()
        async with running_worker(app, at_once=True) as worker:
            dead = worker.id
            await database.fetch("delete from penstock.workers where id = $1", dead)
            receipt = await long.enqueue()
            held = "select count(*) from penstock.leases as lease join penstock.workers as holder on holder.id = lease.worker"
            await eventually(lambda: database.fetchval(held), "a lease of a worker that lives")
            await eventually(lambda: worker.id in ran_by, "a start under the new name")
            assert worker.id != dead
            # The attempt that was stopped is used up: its number fences whatever comes late of it.
            assert len(set(attempts)) == len(attempts) == 2
            go_on.set()
            assert (await app.wait(receipt.id)).worker == worker.id
            assert await database.fetchval("select count(*) from penstock.leases") == 0


async def test_context_variables_do_not_leak_from_job_to_job(app: Penstock) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    seen: list[str] = []

    @app.job("tenant")
    async def note(job: Job[str]) -> None:
        seen.append(tenant.get())
        tenant.set(job.data)

    async with running_worker(app, at_once=True):
        for name in ("acme", "globex"):
            await app.wait((await note.enqueue(name)).id)
    assert seen == ["nobody", "nobody"]


async def test_a_deferred_job_starts_in_time_and_a_paused_type_waits(app: Penstock) -> None:
    @app.job("later")
    async def later(job: Job[Any]) -> None: ...

    async with running_worker(app, at_once=True):
        receipt = await later.options(run_after=timedelta(milliseconds=300)).enqueue()
        record = await app.wait(receipt.id)
        assert record.started_at is not None and record.started_at >= record.run_after
        await app.pause("later")
        waiting = await later.enqueue()
        await app.resume("later")
        await app.wait(waiting.id)


async def test_lost_database_connections_come_back_by_themselves(app: Penstock, url: str) -> None:
    @app.job("steady")
    async def steady(job: Job[Any]) -> None: ...

    database = await app.database()
    async with running_worker(app, at_once=True):
        await app.wait((await steady.enqueue()).id)
        for _ in range(3):
            await database.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            receipts = await eventually(lambda: _enqueue_again(app, steady), "an enqueue")
            await app.wait(receipts.id)


async def _enqueue_again(app: Penstock, type_: Any) -> Any:
    from penstock import DatabaseUnavailable

    try:
        return await type_.enqueue()
    except DatabaseUnavailable:
        return None


@pytest.mark.parametrize("plain", [False, True])
async def test_run_due_jobs_ends_a_handler_at_its_time_limit_as_a_worker_does(app: Penstock, plain: bool) -> None:
    never = threading.Event()

    async def endless(job: Job[Any]) -> None:
        await asyncio.Event().wait()

    def endless_in_a_thread(job: Job[Any]) -> None:
        never.wait(60)

    handler = endless_in_a_thread if plain else endless
    slow = app.job("slow", max_attempts=1, time_limit=timedelta(milliseconds=200))(handler)
    await slow.enqueue({})
    try:
        (record,) = await run_due_jobs(app)
    finally:
        never.set()
    assert (record.status, record.errors[-1]["type"]) == (Status.FAILED, "TimeLimit")


async def test_run_due_jobs_runs_also_what_jobs_enqueue(app: Penstock) -> None:
    ran: list[int] = []

    @app.job("chain")
    async def chain(job: Job[int]) -> None:
        ran.append(job.data)
        if job.data:
            await chain.enqueue(job.data - 1)

    await chain.enqueue(3)
    await chain.options(run_after=timedelta(hours=1)).enqueue(9)
    records = await run_due_jobs(app)
    assert ran == [3, 2, 1, 0]
    assert {record.status for record in records} == {Status.SUCCEEDED}


async def test_concurrency_and_rate_limits_hold_over_workers(url: str) -> None:
    running = highest = 0
    starts: list[float] = []
    done = asyncio.Event()
    apps = [Penstock(url) for _ in range(3)]

    async def limited(job: Job[Any]) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0.005)
        running -= 1
        starts.append(time.monotonic())
        if len(starts) == 60:
            done.set()

    for app in apps:
        app.job("limited", concurrency=3)(limited)
    workers = []
    tasks = []
    await apps[0].enqueue_many(apps[0].types["limited"], [{}] * 60)
    for app in apps:
        workers.append(await app.worker())
        tasks.append(asyncio.create_task(workers[-1].run()))
    await asyncio.wait_for(done.wait(), 60)
    for worker in workers:
        worker.stop()
    await asyncio.gather(*tasks)
    for app in apps:
        await app.close()
    assert 1 <= highest <= 3


def test_options_name_what_the_database_has() -> None:
    assert Options().as_json()["max_attempts"] == 5
    assert Options(delivery="at_most_once").as_json()["max_attempts"] == 1  # type: ignore[arg-type]


PROCESS_APP = """
import os, time
from datetime import timedelta
from penstock import Job, Penstock
app = Penstock()

@app.job("crunch", keep_result=True, executor="process", max_attempts=1)
def crunch(job: Job[int]) -> list[int]:
    return [job.data ** 2, os.getpid()]

@app.job("spin", executor="process", max_attempts=1, time_limit=timedelta(seconds=1))
def spin(job: Job[int]) -> None:
    while True:
        time.sleep(0.1)
"""


async def test_process_handlers_run_in_processes_and_are_ended_at_their_time_limit(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crunching.py").write_text(PROCESS_APP)
    # Spawned processes find the module the way this one does.
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    crunching = importlib.import_module("crunching")
    async with crunching.app as app, running_worker(app, at_once=True):
        record = await app.wait((await crunching.crunch.enqueue(12)).id)
        assert record.result[0] == 144
        assert record.result[1] != os.getpid()
        with pytest.raises(JobFailed, match="time limit"):
            await app.wait((await crunching.spin.enqueue(1)).id)
        assert (await app.wait((await crunching.crunch.enqueue(3)).id)).result[0] == 9


@pytest.mark.parametrize("keyed", [False, True])
async def test_what_a_handler_sets_in_its_context_does_not_reach_the_handlers_after_it(url: str, keyed: bool) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")
    seen: list[str] = []

    async def work(job: Job[int]) -> None:
        seen.append(tenant.get())
        tenant.set(f"of job {job.data}")

    async with Penstock(url, settings=Settings(concurrency=1)) as app:
        if keyed:
            pool = app.pool("tenants", payload=int)
            pool.job(work)
            await pool.enqueue_many([("acme", number) for number in range(200)])
        else:
            await app.job("work")(work).enqueue_many(range(200))
        async with running_worker(app):
            await eventually(lambda: len(seen) == 200)
    assert set(seen) == {"none"}
