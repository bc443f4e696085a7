"""Jobs that run after others: in workers, from every way to enqueue, and whatever ends the jobs for which they wait."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, Fail, InvalidInput, Job, JobRecord, NewJob, Penstock, Retry, Status
from penstock.jobs.models import Enqueued, EnqueueOutcome, make_id
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually
from tests.workflows.statuses import status

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOUR = timedelta(hours=1)


def declare(app: Penstock, ran: list[str] | None = None) -> None:
    """A job type `step`, whose payload says how it ends: "fail" or otherwise. `ran` gets the payloads in order."""

    @app.job("step", max_attempts=1)
    async def step(job: Job[str]) -> None:
        if ran is not None:
            ran.append(job.data)
        if job.data == "fail":
            raise Fail("as told")


async def resolve(sql: Sql) -> None:
    """Do what the maintenance of a worker does."""
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass


async def finish(sql: Sql, id: UUID, outcome: str = "succeeded") -> None:
    """End a queued job as a worker in SQL does."""
    while (claimed := await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)"))["id"] != id:
        pass
    await sql.fetch(
        "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint], array[$4])",
        id, claimed["attempt"], claimed["lease"], outcome,
    )  # fmt: skip


async def test_a_job_runs_after_the_jobs_for_which_it_waits(app: Penstock) -> None:
    ran: list[str] = []
    declare(app, ran)
    first, second = await app.enqueue("step", "first"), await app.enqueue("step", "second")
    both = await app.enqueue("step", "both", after=[first, second.id])
    last = await app.enqueue("step", "last", after=both)
    assert (both.outcome, await status(app, both), await status(app, last)) == (EnqueueOutcome.WAITING, "waiting", "waiting")
    await run_due_jobs(app)
    assert (sorted(ran[:2]), ran[2:]) == (["first", "second"], ["both", "last"])
    record = await app.find(both.id)
    assert (record.status, set(record.after), record.when) == (Status.SUCCEEDED, {first.id, second.id}, "succeeded")


async def test_what_waits_for_a_failed_job_is_cancelled_with_the_reason_and_so_is_what_waits_for_that(app: Penstock) -> None:
    ran: list[str] = []
    declare(app, ran)
    bad, good = await app.enqueue("step", "fail"), await app.enqueue("step", "good")
    waits = await app.enqueue("step", "never", after=[good, bad])
    further = await app.enqueue("step", "never", after=waits)
    anyway = await app.enqueue("step", "anyway", after=[bad, further], when="finished")
    await run_due_jobs(app)
    assert sorted(ran) == ["anyway", "fail", "good"]
    for job, cause, how in ((waits, bad, "failed"), (further, waits, "was cancelled")):
        record = await app.find(job.id)
        assert (record.status, record.reason, record.attempt, record.started_at) == (Status.CANCELLED, "dependency", 0, None)
        assert record.errors[-1]["message"] == f"it was to run after job {cause.id} of step, which {how}"
    assert (await app.find(anyway.id)).status is Status.SUCCEEDED


async def test_a_retry_of_the_other_job_is_no_end_of_it(app: Penstock) -> None:
    tries: list[int] = []

    @app.job("flaky", max_attempts=3, backoff=Backoff(base=timedelta(0)))
    async def flaky(job: Job[Any]) -> None:
        tries.append(job.attempt)
        if job.attempt < 3:
            raise Retry("again")

    declare(app)
    after = await app.enqueue("step", "after", after=await app.enqueue("flaky"))
    await run_due_jobs(app)
    assert (tries, await status(app, after)) == ([1, 2, 3], "succeeded")


@pytest.mark.parametrize(
    ("payload", "when", "ended"),
    [("good", None, "succeeded"), ("fail", None, "cancelled"), ("fail", "finished", "succeeded")],
)
async def test_a_job_that_has_ended_already_counts(app: Penstock, payload: str, when: Any, ended: str) -> None:
    declare(app)
    first = await app.enqueue("step", payload)
    await run_due_jobs(app)
    later = await app.enqueue("step", "later", after=first, when=when)
    await run_due_jobs(app)
    assert await status(app, later) == ended


async def test_a_worker_releases_a_job_at_once(app: Penstock) -> None:
    release = asyncio.Event()

    @app.job("slow")
    async def slow(job: Job[Any]) -> None:
        await release.wait()

    declare(app)
    async with running_worker(app):
        first = await app.enqueue("slow")

        async def runs() -> bool:
            return await status(app, first) == "in-progress"

        await eventually(runs)
        # The other job runs, so that only the worker can link the two.
        later = await app.enqueue("step", "later", after=first)
        release.set()
        assert (await app.wait(later.id)).status is Status.SUCCEEDED


async def test_every_end_of_a_job_counts(app: Penstock, sql: Sql) -> None:
    """Whatever archives a job tells those that wait for it."""
    await sql.execute("select penstock.create_job_type('step', '{\"max_attempts\": 1}')")
    await sql.execute("select penstock.create_job_type('gone')")
    await sql.execute("select penstock.create_job_type('purged')")

    async def job(name: str = "step", **options: Any) -> UUID:
        return (await app.enqueue(name, "x", **options)).id

    async def ends(first: UUID) -> str:
        later = await job(after=first)
        return str(later)

    expected: dict[str, str] = {}

    cancelled = await job()
    expected[await ends(cancelled)] = "cancelled"
    await app.cancel(cancelled)

    expired = await job(expires_at=timedelta(microseconds=1))
    expected[await ends(expired)] = "cancelled"
    await sql.execute("select penstock.expire()")

    waiting = await job(after=await job(run_after=HOUR), expires_at=timedelta(microseconds=1))
    expected[await ends(waiting)] = "cancelled"
    await sql.execute("select penstock.expire()")

    dropped = await job("gone")
    expected[await ends(dropped)] = "cancelled"
    await sql.execute("select penstock.drop_job_type('gone', true)")

    purged = await job("purged")
    expected[await ends(purged)] = "cancelled"
    await sql.execute("select penstock.start_operation('purge', '{\"name\": \"purged\"}')")
    await sql.execute("select penstock.advance_operation()")

    erased, held = await job(key="erased"), await job(after=dropped, when="finished", key="erased")
    expected[await ends(erased)] = "cancelled"
    expected[await ends(held)] = "cancelled"
    await sql.execute('select penstock.start_erasure(\'{"key": "erased"}\')')
    await sql.execute("select penstock.advance_operation()")

    for outcome, status_of_later in (
        ("succeeded", "queued"), ("failed", "cancelled"), ("failed-for-good", "cancelled"), ("quarantined", "cancelled"),
        ("cancelled", "cancelled"),
    ):  # fmt: skip
        settled = await job(priority=-50)
        expected[await ends(settled)] = status_of_later
        await finish(sql, settled, outcome)

    finished = await job(priority=-50)
    expected[await ends(finished)] = "queued"
    claimed = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    assert claimed["id"] == finished
    await sql.execute("select penstock.finish($1, $2, $3)", claimed["id"], claimed["attempt"], claimed["lease"])

    callback = await job()
    expected[await ends(callback)] = "queued"
    await sql.execute("select penstock.settle_attempts('{step}', array[$1::uuid], '{1}', '{succeeded}')", callback)

    lost = await job(priority=-50)
    expected[await ends(lost)] = "cancelled"
    await sql.execute("update penstock.jobs set visibility_timeout = '1 microsecond', delivery_strategy = 'at_most_once'")
    assert await sql.fetchval("select id from penstock.claim('psql', '{step}', 1)") == lost
    await sql.execute("select penstock.recover()")

    await resolve(sql)
    assert {id: await status(app, UUID(id)) for id in expected} == expected
    assert await sql.fetchval("select count(*) from penstock.workflow_ticks") == 0


async def test_a_job_waits_in_the_transaction_of_its_caller(app: Penstock, sql: Sql, url: str) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    other = await asyncpg.connect(url)
    first = (await app.enqueue("step", "first")).id
    transaction = sql.transaction()
    await transaction.start()
    later = await app.enqueue("step", "later", after=first, connection=sql)
    # The job that is waited for cannot be claimed before the transaction has ended; no claim waits for that.
    assert await other.fetch("select id from penstock.claim('psql', '{step}', 1)") == []
    await transaction.commit()
    await finish(other, first)
    await resolve(other)
    assert await status(app, later) == "queued"
    await other.close()


async def test_the_end_of_a_running_job_does_not_wait_for_who_enqueues_after_it(app: Penstock, sql: Sql, url: str) -> None:
    """The race between an end and an enqueue: whichever commits first, the later job is released once."""
    await sql.execute("select penstock.create_job_type('step')")
    other = await asyncpg.connect(url)
    for resolved in ("before the commit", "after it"):
        first = (await app.enqueue("step", "first")).id
        claimed = await other.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
        transaction = sql.transaction()
        await transaction.start()
        later = await app.enqueue("step", "later", after=first, connection=sql)
        await other.fetch(
            "select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *claimed, timeout=20
        )
        if resolved == "before the commit":
            await resolve(other)
        await transaction.commit()
        await resolve(other)
        assert await status(app, later) == "queued"
        await finish(other, later.id)
    await other.close()


async def test_a_rolled_back_enqueue_leaves_nothing(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first = (await app.enqueue("step", "first")).id
    transaction = sql.transaction()
    await transaction.start()
    await app.enqueue("step", "later", after=first, connection=sql)
    await transaction.rollback()
    await finish(sql, first)
    await resolve(sql)
    left = "select (select count(*) from penstock.waiting_jobs) + (select count(*) from penstock.job_dependencies)"
    assert await sql.fetchval(left) == 0


async def test_what_another_transaction_has_locked_is_released_later(app: Penstock, sql: Sql, url: str) -> None:
    """A resolve waits for no transaction: the other dependents of the same job are released at once."""
    await sql.execute("select penstock.create_job_type('step')")
    other = await asyncpg.connect(url)
    first = (await app.enqueue("step", "first")).id
    held, free = [await app.enqueue("step", name, after=first) for name in ("held", "free")]
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("select penstock.cancel($1)", held.id)
    await finish(other, first)
    await asyncio.wait_for(resolve(other), 20)
    assert (await status(app, held), await status(app, free)) == ("waiting", "queued")
    await transaction.rollback()
    await resolve(other)
    assert await status(app, held) == "queued"
    await other.close()


async def test_options_of_a_waiting_job_hold_when_it_is_released(app: Penstock, sql: Sql) -> None:
    declare(app)
    await app.enqueue("step", "declares", run_after=HOUR)
    first = (await app.enqueue("step", "first")).id
    deferred = await app.enqueue("step", "x", after=first, run_after=HOUR, priority=7, key="k", max_attempts=3)
    await finish(sql, first)
    await resolve(sql)
    record = await app.find(deferred.id)
    assert (record.status, record.priority, record.key, record.max_attempts) == (Status.QUEUED, 7, "k", 3)
    assert (await app.why(deferred.id)).reason == "deferred"


async def test_jobs_of_a_pool_can_wait(app: Penstock) -> None:
    ran: list[str] = []
    declare(app)
    pool = app.pool("accounts", slots=4)

    @pool.job
    async def book(job: Job[str]) -> None:
        ran.append(f"{job.key} {job.data}")

    first = await app.enqueue("step", "first")
    for number in range(3):
        await pool.enqueue("a", f"{number}", after=first)
    await run_due_jobs(app)
    assert ran == ["a 0", "a 1", "a 2"]


async def test_a_unique_key_coalesces_among_waiting_jobs_and_again_when_they_are_released(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first = (await app.enqueue("step", "first")).id
    one = await app.enqueue("step", "one", after=first, unique="u")
    again = await app.enqueue("step", "again", after=first, unique="u")
    assert again == Enqueued(one.id, EnqueueOutcome.COALESCED)
    await finish(sql, first)
    await resolve(sql)
    assert await app.enqueue("step", "third", unique="u") == Enqueued(one.id, EnqueueOutcome.COALESCED)
    # Another job has taken the key when this one is released: both run.
    second = (await app.enqueue("step", "second", priority=-9)).id
    waits = await app.enqueue("step", "two", after=second, unique="u")
    await finish(sql, second)
    await resolve(sql)
    assert (await status(app, waits), await status(app, one)) == ("queued", "queued")


async def test_the_same_id_again_is_the_same_job(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first, id = (await app.enqueue("step", "first")).id, make_id()
    outcomes = []
    for end in (None, "release", "end"):
        if end == "release":
            await finish(sql, first)
            await resolve(sql)
        elif end == "end":
            await finish(sql, id)
        outcomes += [(await app.enqueue("step", "later", id=id, after=first)).outcome.value for _ in range(2)]
    assert outcomes == ["waiting", "duplicate", "duplicate", "duplicate", "archived", "archived"]
    assert await sql.fetchval("select count(*) from penstock.waiting_jobs") == 0


@pytest.mark.parametrize("end", ["cancelled", "expired", "dependency", "succeeded"])
@pytest.mark.parametrize("many", [False, True])
async def test_the_id_of_a_waiting_job_is_that_job_also_without_after(app: Penstock, end: str, many: bool) -> None:
    ran: list[str] = []
    declare(app, ran)
    async with app.job_group("import") as group:
        first = await app.enqueue("step", "fail" if end == "dependency" else "first")
        waits = await app.enqueue(
            "step", "waits", after=first, group=group, expires_at=timedelta(0) if end == "expired" else None
        )
    again = [NewJob("again", id=waits.id), *([NewJob("beside"), NewJob("unique", unique="one")] if many else [])]
    receipts = await app.enqueue_many("step", again)
    assert receipts[0] == (waits.id, EnqueueOutcome.DUPLICATE)
    assert {receipt.outcome for receipt in receipts[1:]} <= {EnqueueOutcome.QUEUED}
    assert (await app.enqueue("step", "once more", id=waits.id)).outcome is EnqueueOutcome.DUPLICATE
    if end == "cancelled":
        await app.cancel(waits.id)
    await run_due_jobs(app)
    assert not {"again", "once more"} & set(ran)
    assert [str(job.status) for job in await app.find_many(workflow=group)] == [end if end != "dependency" else "cancelled"]
    ended = await group.find()
    assert (ended.added, ended.ended, ended.finished_at is not None) == (1, 1, True)


async def test_many_jobs_of_one_call_can_wait_for_each_other_in_order(app: Penstock) -> None:
    ran: list[str] = []
    declare(app, ran)
    ids = [make_id() for _ in range(50)]
    jobs = [NewJob(f"{n}", id=ids[n], after=ids[n - 1] if n % 10 else None) for n in range(50)]
    receipts = await app.enqueue_many("step", jobs)
    assert [receipt.outcome.value for receipt in receipts] == (["queued"] + ["waiting"] * 9) * 5
    await run_due_jobs(app)
    for chain in range(5):
        assert [n for n in ran if int(n) // 10 == chain] == [f"{chain * 10 + n}" for n in range(10)]


async def test_a_waiting_job_says_why_is_listed_counted_cancelled_and_purged(app: Penstock, sql: Sql) -> None:
    declare(app)
    first, second = [await app.enqueue("step", "x") for _ in range(2)]
    waits, other, third = [await app.enqueue("step", "y", after=[first, second]) for _ in range(3)]
    why = await app.why(waits.id)
    assert (why.reason, why.ahead, why.by_job) == ("dependencies", 2, min(first.id, second.id))
    assert f"{why.by_job} of step, which is queued" in why.message
    (counts,) = await app.counts()
    assert (counts.waiting, counts.ready) == (3, 2)

    def ids(records: list[JobRecord]) -> set[UUID]:
        return {record.id for record in records}

    assert ids(await app.find_many(name="step", status="waiting")) == {waits.id, other.id, third.id}
    assert ids(await app.find_many(name="step", status="queued")) == {first.id, second.id}
    assert len(await app.find_many(name="step")) == 5
    assert await app.cancel(waits.id) == "cancelled"
    with pytest.raises(Exception, match="waits for others"):
        await app.replay(other.id)
    await sql.execute("select penstock.start_operation('purge', '{\"status\": \"waiting\"}')")
    while await sql.fetchval("select id from penstock.advance_operation()") is not None:
        pass
    records = [await app.find(job.id) for job in (waits, other, third, first)]
    assert [(str(record.status), record.reason) for record in records] == [
        ("cancelled", None), ("cancelled", "purged"), ("cancelled", "purged"), ("queued", None),
    ]  # fmt: skip


async def test_a_type_with_waiting_jobs_is_dropped_by_force_only(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    await sql.execute("select penstock.create_job_type('gone')")
    first = (await app.enqueue("step", "first")).id
    waits = await app.enqueue("gone", "x", after=first)
    with pytest.raises(asyncpg.PostgresError, match="jobs of gone wait"):
        await sql.execute("select penstock.drop_job_type('gone')")
    await sql.execute("select penstock.drop_job_type('gone', true)")
    record = await app.find(waits.id)
    assert (record.status, record.reason) == (Status.CANCELLED, "dropped")


async def test_a_day_is_kept_while_a_job_waits_for_one_of_it(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first = (await app.enqueue("step", "first")).id
    claimed = await sql.fetchrow("select id, attempt, lease from penstock.claim('psql', '{step}', 1)")
    later = await app.enqueue("step", "later", after=first)
    await sql.fetch("select * from penstock.settle(array[$1::uuid], array[$2::smallint], array[$3::bigint])", *claimed)
    await sql.execute("select set_config('penstock.clock', (now() + interval '10 days')::text, false)")
    with_jobs = "select * from penstock.prune('1 day') where jobs > 0"
    assert await sql.fetch(with_jobs) == []
    await resolve(sql)
    assert len(await sql.fetch(with_jobs)) == 1
    assert await status(app, later) == "queued"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"after": []}, "after names no job"),
        ({"after": 7}, "after names no job"),
        ({"after": "pdf"}, "invalid job id: 'pdf'"),
        ({"after": [None]}, "invalid job id"),
        ({"after": UUID(int=7)}, "is to wait for a job that does not exist: 00000000-0000-0000-0000-000000000007"),
        ({"after": UUID(int=8), "id": UUID(int=8)}, "is to wait for itself"),
        ({"when": "finished"}, "when is given without after"),
        ({"after": UUID(int=7), "when": "failed"}, "when"),
        ({"after": [UUID(int=n) for n in range(101)]}, "at most 100 jobs, not 101"),
        ({"after": UUID(int=7), "unique": "u", "unique_for": HOUR}, "unique_for and after exclude each other"),
    ],
)
async def test_what_cannot_be_waited_for_is_refused(app: Penstock, options: Any, error: str) -> None:
    declare(app)
    with pytest.raises(InvalidInput, match=error):
        await app.enqueue("step", "x", **options)
    assert (await app.counts())[0].waiting == 0


async def test_a_cycle_is_refused(app: Penstock, sql: Sql) -> None:
    declare(app)
    one, two = make_id(), make_id()
    with pytest.raises(InvalidInput, match="comes behind it in the same call"):
        await app.enqueue_many("step", [NewJob("x", id=one, after=two), NewJob("y", id=two, after=one)])
    with pytest.raises(InvalidInput, match="does not exist"):
        await app.enqueue("step", "x", id=one, after=two)
    assert await sql.fetchval("select count(*) from penstock.waiting_jobs") == 0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ('{"after": "x"}', "after must be an array of ids of jobs"),
        ('{"after": ["x"]}', "after must be an array of ids of jobs"),
        ('{"after": [null]}', "after has a null among its ids"),
        ('{"after": []}', "after must be an array of ids of jobs"),
        ('{"after": {}}', "after must be an array of ids of jobs"),
        ('{"when": "finished"}', "when is given without after"),
        ('{"after": ["00000000-0000-0000-0000-000000000007"], "when": "sometimes"}', "when must be succeeded or finished"),
    ],
)
async def test_sql_refuses_what_cannot_be_waited_for(sql: Sql, options: str, error: str) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    with pytest.raises(asyncpg.PostgresError, match=error) as refused:
        await sql.execute("select penstock.enqueue_many('step', '{1}', p_options => array[$1::jsonb])", options)
    assert refused.value.sqlstate == "PS400"


async def test_sql_enqueues_after_a_job(sql: Sql, app: Penstock) -> None:
    await sql.execute("select penstock.create_job_type('step')")
    first = await sql.fetchval("select penstock.enqueue('step')")
    later = await sql.fetchval("select penstock.enqueue('step', p_after => array[$1::uuid], p_when => 'finished')", first)
    document = f'[{{"after": ["job_{later}"]}}]'
    (row,) = await sql.fetch("select * from penstock.enqueue_json('step', $1)", document)
    assert (await status(app, later), row["outcome"]) == ("waiting", "waiting")
    await finish(sql, first, "failed-for-good")
    await resolve(sql)
    assert (await status(app, later), await status(app, row["id"])) == ("queued", "waiting")


async def test_a_resolve_needs_its_own_snapshots(sql: Sql) -> None:
    with pytest.raises(asyncpg.PostgresError, match="read committed"):
        async with sql.transaction(isolation="repeatable_read"):
            await sql.execute("select penstock.resolve_workflows()")
