"""Lines that a handler logs stay with its job: while it runs, when it waits for a retry, and in the archive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, Fail, InvalidInput, Job, JobFailed, JobRecord, Jobs, Penstock, Snooze
from penstock.jobs import claim_queries
from penstock.jobs.models import Settlement
from penstock.postgres.database import Database
from penstock.testing import run_due_jobs, running_worker
from penstock.worker.reports import Reports
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
QUICK = Backoff(base=timedelta(milliseconds=10), cap=timedelta(milliseconds=20))


def lines(record: JobRecord) -> list[str]:
    return [line.line for line in record.log]


async def test_the_lines_of_a_finished_job_are_in_the_archive(app: Penstock) -> None:
    @app.job("load")
    async def load(job: Job[Any]) -> None:
        for n in range(3):
            job.log(f"row {n}")

    began = datetime.now(UTC)
    async with running_worker(app, at_once=True):
        record = await app.wait((await app.enqueue("load")).id)
    found = await app.find(record.id)
    assert lines(found) == ["row 0", "row 1", "row 2"]
    assert all(line.attempt == 1 for line in found.log)
    times = [line.at for line in found.log]
    assert times == sorted(times) and all(began - timedelta(seconds=1) < time < datetime.now(UTC) for time in times)
    # Lists are short.
    (listed,) = await app.find_many(name="load")
    assert listed.log == ()


async def test_the_lines_of_a_running_job_are_seen_within_seconds(app: Penstock) -> None:
    release = asyncio.Event()

    @app.job("load")
    async def load(job: Job[Any]) -> None:
        job.log("begun")
        await release.wait()
        job.log("done")

    async with running_worker(app):
        id = (await app.enqueue("load")).id
        await eventually(lambda: _has(app, id, ["begun"]), "the first line")
        release.set()
        await app.wait(id)
        assert await _has(app, id, ["begun", "done"])


async def test_a_job_that_ends_while_its_lines_are_written_keeps_them(
    app: Penstock, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, ended = claim_queries.append_log, Reports.ended
    writing, ends = asyncio.Event(), asyncio.Event()

    async def slow(database: Database, lines: Sequence[claim_queries.Line], *, wait: bool) -> list[UUID]:
        writing.set()
        await ends.wait()
        # What the end of the job does without the lines gets as far as it can.
        for _ in range(100):
            if not await sql.fetchval("select count(*) from penstock.queued_jobs"):
                break
        return await append(database, lines, wait=wait)

    async def ending(self: Reports, results: Sequence[Settlement]) -> None:
        ends.set()
        await ended(self, results)

    monkeypatch.setattr(claim_queries, "append_log", slow)
    monkeypatch.setattr(Reports, "ended", ending)

    @app.job("load")
    async def load(job: Job[Any]) -> None:
        job.log("begun")
        await writing.wait()

    async with running_worker(app, at_once=True):
        id = (await app.enqueue("load")).id
        await app.wait(id)
    assert await _has(app, id, ["begun"])


async def _has(app: Penstock, id: UUID, wanted: list[str]) -> bool:
    return lines(await app.find(id)) == wanted


@pytest.mark.parametrize("ends", ["succeeded", "failed", "retried", "snoozed"])
async def test_the_lines_of_every_attempt_are_kept(app: Penstock, ends: str) -> None:
    @app.job("load", max_attempts=2, backoff=QUICK)
    def load(job: Job[Any]) -> None:
        job.log(f"attempt {job.attempt}, snooze {job.snoozes}")
        if ends == "failed":
            raise Fail("no")
        if ends == "retried":
            raise ValueError("again")
        if ends == "snoozed" and job.snoozes == 0:
            raise Snooze(timedelta(milliseconds=10))

    async with running_worker(app, at_once=True):
        id = (await app.enqueue("load")).id
        try:
            await app.wait(id)
        except JobFailed:
            assert ends in ("failed", "retried")
    expected = {
        "succeeded": [(1, "attempt 1, snooze 0")],
        "failed": [(1, "attempt 1, snooze 0")],
        "retried": [(1, "attempt 1, snooze 0"), (2, "attempt 2, snooze 0")],
        "snoozed": [(1, "attempt 1, snooze 0"), (1, "attempt 1, snooze 1")],
    }
    assert [(line.attempt, line.line) for line in (await app.find(id)).log] == expected[ends]


async def test_a_plain_handler_and_its_own_threads_log(app: Penstock) -> None:
    @app.job("load")
    def load(job: Job[Any]) -> None:
        threads = [threading.Thread(target=job.log, args=[f"thread {n}"]) for n in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        job.log("last")

    async with running_worker(app, at_once=True):
        id = (await app.enqueue("load")).id
        await app.wait(id)
    found = lines(await app.find(id))
    assert sorted(found[:-1]) == sorted(f"thread {n}" for n in range(20))
    assert found[-1] == "last"


async def test_the_newest_lines_are_kept_and_long_ones_cut(app: Penstock, sql: Sql) -> None:
    @app.job("load", max_attempts=2, backoff=QUICK)
    async def load(job: Job[Any]) -> None:
        for n in range(70):
            job.log(f"{job.attempt}/{n} " + "ä" * 5_000)
        if job.attempt == 1:
            raise ValueError("again")
        for n in range(250):
            job.log(f"{n} after a while\x00")

    async with running_worker(app, at_once=True):
        id = (await app.enqueue("load")).id
        await eventually(lambda: _finished(app, id), "the end")
    found = lines(await app.find(id))
    assert len(found) == 100
    assert found[0] == "150 after a while\ufffd" and found[-1] == "249 after a while\ufffd"
    await app.change_job_type("load", max_attempts=1)
    async with running_worker(app, at_once=True):
        id = (await app.enqueue("load")).id
        await eventually(lambda: _finished(app, id), "the end")
    found = lines(await app.find(id))
    assert [(len(found), {len(line) for line in found})] == [(70, {1_000})]
    assert await sql.fetchval("select pg_column_size(log) < 200000 from penstock.archived_jobs where id = $1", id)


async def _finished(app: Penstock, id: UUID) -> bool:
    return (await app.find(id)).status.finished


async def test_the_jobs_of_a_pool_of_a_batch_and_of_a_program_log(url: str) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=int)
    pulled = app.pool("pulled", payload=int)

    @pool.job
    async def work(job: Job[int]) -> None:
        job.log(f"in the pool: {job.data}")

    @app.job("index", max_batch_size=10)
    async def index(jobs: Jobs[int]) -> None:
        for job in jobs:
            job.log(f"in the batch: {job.data}")

    async with app:
        ids = [(await pool.enqueue("acme", 1)).id, (await app.enqueue("index", 2)).id]
        async with running_worker(app, at_once=True):
            for id in ids:
                await app.wait(id)
        ids.append((await pulled.enqueue("acme", 3)).id)
        async with pulled.worker() as worker:
            async for job in worker.jobs():
                job.log(f"pulled: {job.data}")
                await job.ack()
                break
        found = [lines(await app.find(id)) for id in ids]
    assert found == [["in the pool: 1"], ["in the batch: 2"], ["pulled: 3"]]


async def test_a_test_sees_the_lines(app: Penstock) -> None:
    @app.job("load")
    async def load(job: Job[Any]) -> None:
        job.log("here")
        with pytest.raises(InvalidInput, match="a line of a log must be text, not 5"):
            job.log(5)  # type: ignore[arg-type]

    await app.enqueue("load")
    (record,) = await run_due_jobs(app)
    assert lines(record) == ["here"]


async def test_a_worker_in_sql_logs_under_its_lease(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue("mail")
    job = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{mail}', 1)")
    append = "select penstock.append_log(array[$1::uuid], array[$2::bigint], array[$3::text])"
    assert await sql.fetch(append, job["id"], job["lease"], "mine") == []
    assert await sql.fetch(append, job["id"], job["lease"] + 1, "of another lease") == []
    extend = "select lease from penstock.extend(array[$1::uuid], array[1::smallint], array[$2::bigint])"
    lease = await sql.fetchval(extend, job["id"], job["lease"])
    # The answer to the extend may be under way.
    await sql.fetch(append, job["id"], job["lease"], "under the lease before")
    await sql.fetch(append, job["id"], lease, "under the new one")
    for wrong in ("array[null::bigint], array['x']", "null, array['x']", "array[1::bigint], array[null::text]"):
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.fetch(f"select penstock.append_log(array[$1::uuid], {wrong})", job["id"])
        assert refused.value.sqlstate == "PS400"
    await sql.fetch("select penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint])", job["id"], lease)
    assert lines(await app.find(job["id"])) == ["mine", "under the lease before", "under the new one"]


async def test_a_call_does_not_wait_for_a_job_that_another_transaction_holds(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    await app.enqueue_many("mail", [1, 2])
    jobs = await sql.fetch("select id, lease from penstock.claim('psql', '{mail}', 2) order by id")
    ids, leases = [job["id"] for job in jobs], [job["lease"] for job in jobs]
    holder = await asyncpg.connect(url)
    try:
        async with holder.transaction():
            await holder.execute("select from penstock.queued_jobs where id = $1 for update", ids[0])
            append = "select penstock.append_log($1, $2::bigint[], array['a', 'b'], p_wait => false)"
            assert [row[0] for row in await sql.fetch(append, ids, leases)] == [ids[0]]
            report = "select penstock.report_progress($1, $2::bigint[], array['1', '2']::jsonb[])"
            assert [row[0] for row in await sql.fetch(report, ids, leases)] == [ids[0]]
        rows = await sql.fetch("select log -> 0 ->> 'line' as line, progress::text from penstock.queued_jobs order by id")
        assert [tuple(row) for row in rows] == [(None, None), ("b", "2")]
    finally:
        await holder.close()
