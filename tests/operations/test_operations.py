"""Operations on all jobs that match a filter: previewed, done in batches, each job once, with counts at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from penstock import Conflict, Erasure, Fail, InvalidInput, Job, NewJob, NotFound, Penstock, Status
from penstock.operations import queries
from penstock.operations.models import JobFilter, OperationRecord
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
MINUTE = timedelta(minutes=1)
LEFT = "select count(*) from penstock.operations where state = $1"


async def advanced(app: Penstock, id: UUID, limit: int = 1_000) -> OperationRecord:
    """Do an operation to its end, as maintenance does."""
    database = await app.database()
    while await queries.advance(database, limit) is not None:
        pass
    return await app.operations.find(id)


async def counts(sql: Sql) -> dict[str, int]:
    """How many jobs there are, by status and reason."""
    rows = await sql.fetch(
        "select status::text || coalesce(': ' || reason, '') as what, count(*) as jobs from penstock.archived_jobs group by 1"
        " union all select status::text, count(*) from penstock.queued_jobs group by 1"
    )
    return {row["what"]: row["jobs"] for row in rows}


async def test_all_queued_jobs_that_match_are_cancelled(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.create_job_type("bill")
    await app.enqueue_many("mail", [NewJob(n, key=f"k{n % 2}", unique=f"u{n}") for n in range(25)])
    await app.enqueue_many("mail", [NewJob(n, run_after=timedelta(hours=1)) for n in range(5)])
    await app.enqueue_many("bill", [NewJob(n) for n in range(10)])
    preview = await app.operations.preview("cancel", JobFilter(name="mail"))
    assert (preview.jobs, preview.whole, len(preview.sample)) == (30, True, 10)
    assert await counts(sql) == {"queued": 40}
    started = await app.operations.start("cancel", JobFilter(name="mail"))
    assert (started.state, started.done, started.filter) == ("running", 0, {"name": "mail"})
    late = await app.enqueue("mail", "late")
    record = await advanced(app, started.id, limit=7)
    assert (record.state, record.done, record.skipped, record.failed, record.postponed) == ("finished", 30, 0, 0, 0)
    assert record.finished_at is not None and record.ended
    assert await counts(sql) == {"cancelled": 30, "queued": 11}
    assert (await app.find(late.id)).status is Status.QUEUED
    # The unique keys are free again.
    assert (await app.enqueue("mail", unique="u1")).outcome == "queued"


@pytest.mark.parametrize(
    ("wanted", "cancelled"),
    [
        (JobFilter(key="a"), 3),
        (JobFilter(name="mail", key="a"), 2),
        (JobFilter(name="mail", status="queued"), 4),
        (JobFilter(name="mail", status=Status.IN_PROGRESS), 0),
        (JobFilter(until=datetime.now(UTC) - timedelta(days=1)), 0),
        (JobFilter(since=datetime.now(UTC) - timedelta(days=1)), 6),
    ],
)
async def test_a_filter_has_several_conditions(app: Penstock, sql: Sql, wanted: JobFilter, cancelled: int) -> None:
    await app.create_job_type("mail")
    await app.create_job_type("bill")
    await app.enqueue_many("mail", [NewJob(key="a"), NewJob(key="a"), NewJob(key="b"), NewJob()])
    await app.enqueue_many("bill", [NewJob(key="a"), NewJob()])
    assert (await app.operations.preview("cancel", wanted)).jobs == cancelled
    started = await app.operations.start("cancel", wanted)
    assert (await advanced(app, started.id)).done == cancelled
    assert (await counts(sql)).get("cancelled", 0) == cancelled


@pytest.mark.parametrize(
    ("kind", "wanted", "problem"),
    [
        ("cancel", JobFilter(), "a filter without a condition"),
        ("cancel", JobFilter(status="failed"), "cancel does not apply to jobs with the status failed"),
        ("cancel", JobFilter(name="mail", reason="purged"), "invalid condition of a filter for cancel: reason"),
        ("replay", JobFilter(status="queued"), "replay does not apply to jobs with the status queued"),
        ("purge", JobFilter(status="in-progress"), "purge does not apply"),
        ("drop", JobFilter(name="mail"), "unknown operation: drop"),
    ],
)
async def test_a_filter_that_does_not_fit_is_refused(app: Penstock, kind: Any, wanted: JobFilter, problem: str) -> None:
    await app.create_job_type("mail")
    with pytest.raises(InvalidInput, match=problem):
        await app.operations.start(kind, wanted)
    with pytest.raises(InvalidInput, match=problem):
        await app.operations.preview(kind, wanted)
    assert await app.operations.list() == []


async def test_a_type_or_an_operation_that_does_not_exist_is_refused(app: Penstock) -> None:
    with pytest.raises(NotFound, match="no such job type"):
        await app.operations.start("cancel", JobFilter(name="mial"))
    with pytest.raises(NotFound, match="no such operation"):
        await app.operations.find(uuid4())
    with pytest.raises(NotFound, match="no such operation"):
        await app.operations.cancel(uuid4())
    with pytest.raises(InvalidInput, match="invalid id of an operation"):
        await app.operations.find("seven")


async def test_the_same_id_is_the_same_operation(app: Penstock) -> None:
    await app.create_job_type("mail")
    id = uuid4()
    first = await app.operations.start("cancel", JobFilter(name="mail"), id=id)
    assert await app.operations.start("cancel", JobFilter(name="mail"), id=id) == first
    with pytest.raises(Conflict, match="is another one"):
        await app.operations.start("purge", JobFilter(name="mail"), id=id)
    assert [each.id for each in await app.operations.list()] == [id]


async def test_a_replay_makes_one_copy_of_each_failed_job(app: Penstock, sql: Sql) -> None:
    @app.job("mail", max_attempts=1)
    async def mail(job: Job[int]) -> None:
        if job.data % 2:
            raise Fail("odd")

    receipts = await app.enqueue_many("mail", [NewJob(n, key=f"k{n}", priority=3) for n in range(21)])
    await run_due_jobs(app)
    assert await counts(sql) == {"failed": 10, "succeeded": 11}
    replayed = await app.replay(receipts[1].id)
    preview = await app.operations.preview("replay", JobFilter(name="mail"))
    assert preview.jobs == 10
    started = await app.operations.start("replay", JobFilter(name="mail", error="Fail"))
    again = await app.operations.start("replay", JobFilter(name="mail", error="Fail"))
    record, other = await advanced(app, started.id, limit=3), await app.operations.find(again.id)
    assert (record.state, other.state) == ("finished", "finished")
    assert (record.done + other.done, record.skipped + other.skipped) == (9, 11)
    copies = await sql.fetch("select replay_of, key, priority from penstock.queued_jobs")
    assert len(copies) == len({copy["replay_of"] for copy in copies}) == 10
    assert {copy["key"] for copy in copies} == {f"k{n}" for n in range(1, 21, 2)}
    assert {copy["priority"] for copy in copies} == {3}
    assert (await app.find(replayed.id)).replay_of == receipts[1].id


async def test_a_replay_says_what_it_could_not_do(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    receipt = await app.enqueue("mail")
    await sql.execute("select penstock.quarantine(array[$1::uuid], 'odd')", receipt.id)
    await sql.execute("insert into penstock.quarantined_payloads values ($1, '1', now())", receipt.id)
    started = await app.operations.start("replay", JobFilter(reason="quarantined"))
    record = await advanced(app, started.id)
    assert (record.state, record.done, record.failed) == ("finished", 0, 1)
    assert record.error is not None and str(receipt.id) in record.error


async def test_a_purge_archives_what_waits_with_the_reason(url: str, sql: Sql) -> None:
    app = Penstock(url)
    pool = app.pool("ledger", payload=int)
    async with app:
        for n in range(12):
            await pool.enqueue(f"k{n % 3}", n)
        # One of them runs.
        await sql.execute("update penstock.queued_jobs set status = 'in-progress' where data = '0'")
        started = await app.operations.start("purge", JobFilter(name="ledger"))
        record = await advanced(app, started.id)
        assert (record.state, record.done) == ("finished", 11)
        assert await counts(sql) == {"cancelled: purged": 11, "in-progress": 1}
        back = await app.operations.start("replay", JobFilter(name="ledger", status="cancelled", reason="purged"))
        assert (await advanced(app, back.id)).done == 11


async def test_the_handlers_of_running_jobs_are_told(app: Penstock, sql: Sql) -> None:
    running: set[int] = set()

    @app.job("mail")
    async def mail(job: Job[int]) -> None:
        running.add(job.data)
        await asyncio.Event().wait()

    await app.enqueue_many("mail", [NewJob(n) for n in range(5)])
    async with running_worker(app, at_once=True):
        await eventually(lambda: len(running) == 5, "the start of all jobs", timeout=60)
        started = await app.operations.start("cancel", JobFilter(name="mail"))
        # The maintenance of the worker does it.
        record = await app.operations.wait(started.id, timeout=MINUTE)
        assert (record.state, record.done) == ("finished", 5)
        await eventually(lambda: _are(sql, {"cancelled": 5}), "the end of all jobs", timeout=60)


async def _are(sql: Sql, wanted: dict[str, int]) -> bool:
    return await counts(sql) == wanted


async def test_a_job_that_another_transaction_holds_is_left_for_the_next_pass(app: Penstock, sql: Sql, url: str) -> None:
    await app.create_job_type("mail")
    receipts = await app.enqueue_many("mail", [NewJob(n) for n in range(5)])
    database = await app.database()
    async with sql.transaction():
        await sql.execute("select from penstock.queued_jobs where id = $1 for update", receipts[2].id)
        started = await app.operations.start("cancel", JobFilter(name="mail"))
        await queries.advance(database)
        record = await app.operations.find(started.id)
        assert (record.state, record.done, record.postponed) == ("running", 4, 1)

    async def ended() -> bool:
        await queries.advance(database)
        return (await app.operations.find(started.id)).ended

    await eventually(ended, "the next pass", timeout=60)
    record = await app.operations.find(started.id)
    assert (record.state, record.done, record.postponed) == ("finished", 5, 0)


async def test_an_operation_can_be_cancelled(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue_many("mail", [NewJob(n) for n in range(20)])
    started = await app.operations.start("cancel", JobFilter(name="mail"))
    await queries.advance(await app.database(), 5)
    cancelled = await app.operations.cancel(started.id)
    assert (cancelled.state, cancelled.done) == ("cancelled", 5)
    assert await advanced(app, started.id) == cancelled == await app.operations.cancel(started.id)
    assert await counts(sql) == {"cancelled": 5, "queued": 15}
    assert await app.operations.list(running=True) == []


async def test_several_operations_take_turns(app: Penstock) -> None:
    await app.create_job_type("mail")
    await app.enqueue_many("mail", [NewJob(n, key=f"k{n % 2}") for n in range(20)])
    first = await app.operations.start("cancel", JobFilter(key="k0"))
    second = await app.operations.start("cancel", JobFilter(key="k1"))
    database = await app.database()
    for _ in range(2):
        await queries.advance(database, 6)
    assert [(await app.operations.find(each.id)).done > 0 for each in (first, second)] == [True, True]


@pytest.fixture
def plain(url: str) -> Iterator[Penstock]:
    """An app that is used without a loop."""
    app = Penstock(url)
    yield app
    app.sync.close()


def test_a_thread_without_a_loop_starts_an_operation(plain: Penstock) -> None:
    plain.sync.create_job_type("mail")
    plain.sync.enqueue_many("mail", [NewJob(n) for n in range(3)])
    operations = plain.operations.sync
    assert operations.preview("cancel", JobFilter(name="mail")).jobs == 3
    started = operations.start("cancel", JobFilter(name="mail"))
    assert operations.find(started.id).state == "running"
    assert operations.cancel(started.id).state == "cancelled"
    assert [each.id for each in operations.list()] == [started.id]


async def test_prune_deletes_operations_that_have_ended_for_as_long_as_jobs_are_kept(app: Penstock, sql: Sql) -> None:
    """Those that cancelled the children of job groups, those that people started, and no erasures."""
    await app.create_job_type("mail")
    group = await app.job_group("import").open()
    await app.enqueue("mail", 1, group=group)
    await app.cancel_group("import")
    first = await app.operations.start("cancel", JobFilter(name="mail"))
    erasure = await app.operations.erase(Erasure(key="acme"))

    async def is_last() -> bool:
        await advanced(app, first.id)
        return (await app.operations.find(erasure.id)).phase == "vacuum"

    await eventually(is_last, "the last phase of the erasure")
    await sql.execute("select penstock.finish_erasure($1)", erasure.id)
    assert [await sql.fetchval(LEFT, "running"), await sql.fetchval(LEFT, "finished")] == [0, 3]
    stopped = await app.operations.start("purge", JobFilter(name="mail"))
    await app.operations.cancel(stopped.id)
    await sql.execute(
        "update penstock.operations"
        " set started_at = started_at - interval '2 days', finished_at = finished_at - interval '2 days'"
    )
    running = await app.operations.start("cancel", JobFilter(name="mail"))
    await sql.execute("update penstock.operations set started_at = now() - interval '2 days' where id = $1", running.id)
    recent = await app.operations.start("replay", JobFilter(name="mail"))
    await app.operations.cancel(recent.id)
    await app.prune(timedelta(days=3))
    assert await sql.fetchval("select count(*) from penstock.operations") == 6
    await app.prune(timedelta(days=1))
    assert {row["id"] for row in await sql.fetch("select id from penstock.operations")} == {erasure.id, running.id, recent.id}


async def test_an_operation_whose_batch_fails_says_so_and_holds_up_no_other(app: Penstock, sql: Sql) -> None:
    await app.create_job_type("mail")
    await app.enqueue_many("mail", [NewJob(n) for n in range(25)])
    failing = await app.operations.start("replay", JobFilter(name="mail"))
    await sql.execute('update penstock.operations set filter = filter || \'{"until": "never"}\' where id = $1', failing.id)
    other = await app.operations.start("cancel", JobFilter(name="mail"))
    record = await advanced(app, other.id, limit=7)
    assert (record.state, record.done) == ("finished", 25)
    record = await app.operations.find(failing.id)
    assert (record.state, record.error) == (
        "running",
        'the batch fails: invalid input syntax for type timestamp with time zone: "never" (SQLSTATE 22007)',
    )
    for _ in range(10):
        await app.operations.start("replay", JobFilter(name="mail"))
    (problem,) = [finding for finding in await app.doctor() if finding.check == "operations"]
    assert problem.level == "problem" and f"{failing.id} (replay) does not go on: the batch fails: invalid" in problem.message
    await sql.execute("update penstock.operations set filter = filter - 'until' where id = $1", failing.id)
    record = await advanced(app, failing.id)
    assert (record.state, record.error) == ("finished", None)
    assert [finding.level for finding in await app.doctor() if finding.check == "operations"] == ["ok"]
