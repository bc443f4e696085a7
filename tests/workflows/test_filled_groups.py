"""A job group that the handler of a job fills: its attempts go on with it, and the end of the job ends it."""

from __future__ import annotations

import asyncio
import importlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Backoff, Conflict, Fail, InvalidInput, Job, JobGroupRecord, NewJob, Penstock
from penstock.jobs.models import make_id
from penstock.jobs.records import Status
from penstock.testing import run_due_jobs, running_worker
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
AT_ONCE = Backoff(base=timedelta(0), cap=timedelta(0), jitter=0)


def declare(app: Penstock) -> list[tuple[str, Any]]:
    """A type of children, which fail when told so, and one for the end. Returns what ran."""
    ran: list[tuple[str, Any]] = []

    @app.job("part", max_attempts=1)
    async def part(job: Job[Any]) -> None:
        ran.append(("part", job.data))
        if job.data == "fail":
            raise Fail("as told")

    @app.job("report")
    async def report(job: Job[Any]) -> None:
        group = await job.group()
        assert group is not None
        assert group == await app.group_of(job.id)
        ran.append(("report", (group.name, group.status, group.succeeded, group.added)))

    return ran


def counts(group: JobGroupRecord) -> tuple[str, int, int]:
    return group.status, group.added, group.succeeded


@pytest.fixture
async def ran(app: Penstock) -> AsyncIterator[list[tuple[str, Any]]]:
    yield declare(app)


async def fan_out(app: Penstock, parts: list[Any], fails_after: int | None) -> None:
    async with app.job_group("import", then="report") as group:
        for number, part in enumerate(parts):
            if number == fails_after:
                raise RuntimeError("interrupted")
            await app.enqueue("part", part, group=group)


@pytest.mark.parametrize("step", [False, True])
async def test_a_handler_that_fails_in_its_block_goes_on_with_the_group_in_the_next_attempt(
    app: Penstock, ran: list[tuple[str, Any]], step: bool
) -> None:
    @app.job("import", backoff=AT_ONCE)
    async def run(job: Job[Any]) -> None:
        fails_after = 2 if job.attempt == 1 else None
        if step:
            await job.step("fan out", fan_out, app, ["a", "b", "b", "c"], fails_after)
        else:
            await fan_out(app, ["a", "b", "b", "c"], fails_after)

    job = await app.enqueue("import", {})
    await run_due_jobs(app)
    found = await app.find(job.id)
    assert (found.status, found.attempt) == (Status.SUCCEEDED, 2), found.errors
    assert counts(await app.find_group("import")) == ("succeeded", 4, 4)
    assert sorted(data for name, data in ran if name == "part") == ["a", "b", "b", "c"]
    assert [data for name, data in ran if name == "report"] == [("import", "succeeded", 4, 4)]


async def test_a_handler_that_fails_behind_its_block_finds_the_group_that_has_ended(
    app: Penstock, ran: list[tuple[str, Any]]
) -> None:
    receipts: list[str] = []

    @app.job("import", backoff=Backoff(base=timedelta(hours=1), cap=timedelta(hours=1)))
    async def run(job: Job[Any]) -> None:
        async with app.job_group("import", then="report") as group:
            receipts.append((await app.enqueue("part", "a", group=group)).outcome.value)
        if job.attempt == 1:
            raise RuntimeError("behind the block")

    job = await app.enqueue("import", {})
    await run_due_jobs(app)
    assert counts(await app.find_group("import")) == ("succeeded", 1, 1)
    await app.run_now(job.id)
    await run_due_jobs(app)
    assert (await app.find(job.id)).status is Status.SUCCEEDED
    assert receipts == ["queued", "archived"]
    assert [name for name, _ in ran] == ["part", "report"]


async def test_an_attempt_adds_what_the_one_before_did_not_have_in_any_order(app: Penstock, ran: list[tuple[str, Any]]) -> None:
    @app.job("import", backoff=AT_ONCE)
    async def run(job: Job[Any]) -> None:
        await fan_out(app, ["a", "b"] if job.attempt == 1 else ["c", "b", "a"], 2 if job.attempt == 1 else None)
        if job.attempt == 1:
            raise RuntimeError("behind the block")

    await app.enqueue("import", {})
    await run_due_jobs(app)
    assert sorted(data for name, data in ran if name == "part") == ["a", "b", "c"]
    assert counts(await app.find_group("import")) == ("succeeded", 3, 3)


async def test_two_jobs_that_fill_one_group_with_the_same_payloads_add_all_of_them(
    app: Penstock, ran: list[tuple[str, Any]]
) -> None:
    both = asyncio.Barrier(2)

    @app.job("import", backoff=AT_ONCE)
    async def run(job: Job[Any]) -> None:
        async with app.job_group("import", then="report") as group:
            await app.enqueue_many("part", ["a", NewJob("a", group=group), NewJob("a", group=group)])
            await both.wait()

    await app.enqueue_many("import", [1, 2])
    async with running_worker(app):
        await eventually(lambda: any(name == "report" for name, _ in ran), "the report")
    assert counts(await app.find_group("import")) == ("succeeded", 4, 4)


@pytest.mark.parametrize("end", ["fail", "cancel", "swallow", "erase"])
@pytest.mark.parametrize("on_failure", ["cancel", "continue"])
async def test_a_group_that_is_not_sealed_is_cancelled_when_the_job_has_ended(
    app: Penstock, sql: Sql, end: str, on_failure: Any
) -> None:
    ran = declare(app)

    @app.job("import", backoff=Backoff(base=timedelta(hours=1), cap=timedelta(hours=1)))
    async def run(job: Job[Any]) -> None:
        try:
            async with app.job_group("import", then="report", on_failure=on_failure) as group:
                await app.enqueue("part", "a", group=group, run_after=timedelta(hours=1))
                raise Fail("for good") if end == "fail" else RuntimeError("for now")
        except RuntimeError:
            if end != "swallow":
                raise

    job = await app.enqueue("import", {}, key="gone")
    await run_due_jobs(app)
    if end in ("cancel", "erase"):
        # Between the attempts nothing is cancelled.
        assert counts(await app.find_group("import")) == ("open", 1, 0)
        if end == "cancel":
            await app.cancel(job.id)
        else:
            await sql.execute('select penstock.advance_operation() from penstock.start_erasure(\'{"key": "gone"}\')')

    async def is_cancelled() -> bool:
        await sql.execute("select penstock.resolve_workflows()")
        await sql.execute("select penstock.advance_operation()")
        return (await app.find_group("import")).status == "cancelled"

    await eventually(is_cancelled, "the cancellation of the group")
    then = (await app.find_group("import")).then_job
    assert then is not None
    assert (await app.find(then)).status is Status.CANCELLED
    assert ran == []


async def test_a_job_that_ends_does_not_cancel_a_group_that_is_sealed_or_opened_without_a_block(
    app: Penstock, sql: Sql, ran: list[tuple[str, Any]]
) -> None:
    @app.job("import", max_attempts=1)
    async def run(job: Job[Any]) -> None:
        async with app.job_group("sealed") as group:
            await app.enqueue("part", "a", group=group, run_after=timedelta(hours=1))
        await app.job_group("opened").open()
        raise RuntimeError("behind both")

    await app.enqueue("import", {})
    await run_due_jobs(app)
    await sql.execute("select penstock.resolve_workflows()")
    assert {group.name: group.status for group in await app.job_groups()} == {"sealed": "running", "opened": "open"}


async def test_a_block_outside_of_a_job_cancels_its_group_when_it_raises(app: Penstock, ran: list[tuple[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        await fan_out(app, ["a", "b"], 1)
    assert (await app.find_group("import")).cancelled_at is not None


async def test_a_job_that_is_suspended_in_its_block_goes_on_with_the_group(app: Penstock, ran: list[tuple[str, Any]]) -> None:
    @app.job("import")
    async def run(job: Job[Any]) -> None:
        async with app.job_group("import", then="report") as group:
            await app.enqueue("part", "a", group=group)
            await job.wait_for("go on")
            await app.enqueue("part", "b", group=group)

    job = await app.enqueue("import", {})
    await run_due_jobs(app)
    assert counts(await app.find_group("import")) == ("open", 1, 1)
    await app.signal(job.id, "go on")
    await run_due_jobs(app)
    assert counts(await app.find_group("import")) == ("succeeded", 2, 2)
    assert [name for name, _ in ran] == ["part", "part", "report"]


@pytest.mark.parametrize(("type", "ends"), [("in-thread", "raises"), ("in-process", "raises"), ("in-process", "killed")])
async def test_a_plain_handler_goes_on_with_its_group_too(
    url: str, monkeypatch: pytest.MonkeyPatch, type: str, ends: str
) -> None:
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    filling = importlib.reload(importlib.import_module("tests.workflows.filling_app"))
    async with filling.app as app, running_worker(app):
        job = await app.enqueue(type, {"group": "import", "ends": ends})
        found = await app.wait(job.id)
        assert (found.status, found.attempt) == (Status.SUCCEEDED, 2), found.errors
        then = (await app.find_group("import")).then_job
        assert then is not None
        assert (await app.wait(then)).result == ["import", 2, 2]
        children = await app.find_many(workflow=(await app.find_group("import")).id)
        assert sorted(child.data for child in children) == ["a", "b"]


async def test_a_worker_that_is_killed_in_the_block_costs_the_group_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the worker dies, with the thread of the handler."""
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", url)
    filling = importlib.reload(importlib.import_module("tests.workflows.filling_app"))
    command = [sys.executable, "-m", "penstock", "worker", "tests.workflows.filling_app:app"]
    first = subprocess.Popen(command)
    async with filling.app as app:
        try:
            job = await app.enqueue("in-thread", {"group": "import", "ends": "killed"})
            await asyncio.to_thread(first.wait, 60)
            assert first.returncode == -signal.SIGKILL
        finally:
            first.kill()
        assert counts(await app.find_group("import"))[:2] == ("open", 1)
        async with running_worker(app):
            found = await app.wait(job.id)
            assert (found.status, found.attempt) == (Status.SUCCEEDED, 2), found.errors
            then = (await app.find_group("import")).then_job
            assert then is not None
            assert (await app.wait(then)).result == ["import", 2, 2]


async def test_an_enqueue_of_a_child_that_is_repeated_when_its_group_has_ended_is_the_same_job(
    app: Penstock, sql: Sql, ran: list[tuple[str, Any]]
) -> None:
    id = make_id()
    async with app.job_group("import") as group:
        await app.enqueue("part", "a", id=id, group=group)
    await run_due_jobs(app)
    assert counts(await group.find()) == ("succeeded", 1, 1)
    assert (await app.enqueue("part", "a", id=id, group=group)).outcome.value == "archived"
    assert await sql.fetchval("select penstock.enqueue('part', '1', $1, p_group => $2)", id, group.id) == id
    with pytest.raises(Conflict, match="takes no more children"):
        await app.enqueue("part", "b", group=group)
    with pytest.raises(Conflict, match="takes no more children"):
        await app.enqueue_many("part", [NewJob("a", id=id, group=group), NewJob("b", group=group)])


async def test_the_key_rule_of_its_type_gives_then_its_key(app: Penstock, sql: Sql) -> None:
    declare(app)

    @app.job("bill", key="customer")
    async def bill(job: Job[dict[str, Any]]) -> None:
        pass

    accounts = app.pool("accounts", slots=2)
    await accounts.declare()
    for name, then, key, given in (("rule", bill, None, "acme"), ("own", bill, "own", "own"), ("pool", "accounts", "p", "p")):
        group = await app.job_group(name, then=then, then_data={"customer": "acme"}, then_key=key).open()
        then_job = (await group.find()).then_job
        assert then_job is not None
        assert (await app.find(then_job)).key == given
        # To open it again is the same.
        assert (await app.job_group(name, then=then, then_data={"customer": "acme"}, then_key=key).open()).id == group.id
    with pytest.raises(Conflict, match="another then_key"):
        await app.job_group("rule", then=bill, then_data={"customer": "acme"}, then_key="other").open()
    with pytest.raises(InvalidInput, match="which is its declared key"):
        await app.job_group("none", then=bill).open()
    with pytest.raises(InvalidInput, match="then_key is given without then"):
        app.job_group("without", then_key="k")


async def test_the_group_of_a_job_has_its_numbers_while_it_runs_and_when_it_has_ended(
    app: Penstock, ran: list[tuple[str, Any]]
) -> None:
    seen: list[Any] = []

    @app.job("tree")
    async def tree(job: Job[int]) -> None:
        group = await job.group()
        assert group is not None
        seen.append(group.added)
        if job.data:
            await app.enqueue("tree", job.data - 1, group=group)

    async with app.job_group("outer") as outer, app.job_group("import", then="report", parent=outer) as group:
        first = await app.enqueue("tree", 2, group=group)
    free = await app.enqueue("part", "free")
    await run_due_jobs(app)
    assert seen == [1, 2, 3]
    found = await app.group_of(first.id)
    assert found is not None
    assert counts(found) == ("succeeded", 3, 3)
    # The then of a group in a group is a child of that one.
    then = await app.group_of(found.then_job or UUID(int=0))
    assert then == found
    assert then.parent == outer.id
    assert await app.group_of(free.id) is None
    assert await app.group_of(make_id()) is None


async def test_a_handler_that_has_lost_its_job_fills_no_group(app: Penstock, sql: Sql) -> None:
    declare(app)
    job = await app.enqueue("part", "x")
    group = await app.job_group("import").open()
    lease = await sql.fetchval("select lease from penstock.claim('psql', '{part}', 1)")
    fill = "select penstock.fill_group($1, $2, $3)"
    seed = await sql.fetchval(fill, group.id, job.id, lease)
    assert seed is not None
    assert await sql.fetchval(fill, group.id, job.id, lease) == seed
    for stale in (lease + 1, None):
        with pytest.raises(asyncpg.PostgresError, match="no longer belongs to this worker"):
            await sql.fetchval(fill, group.id, job.id, stale)
    # A job of another database.
    assert await sql.fetchval(fill, group.id, make_id(), lease) is None
    await sql.execute("select penstock.settle(array[$1]::uuid[], array[1]::smallint[], array[$2]::bigint[])", job.id, lease)
    with pytest.raises(asyncpg.PostgresError, match="no longer belongs to this worker"):
        await sql.fetchval(fill, group.id, job.id, lease)


async def test_a_handler_that_has_lost_its_job_seals_no_group(app: Penstock, sql: Sql, ran: list[tuple[str, Any]]) -> None:
    errors: list[BaseException] = []

    @app.job("import", backoff=AT_ONCE)
    async def run(job: Job[Any]) -> None:
        if job.attempt == 2:
            return
        try:
            async with app.job_group("import") as group:
                await app.enqueue("part", "a", group=group)
                await sql.execute("update penstock.leases set expires_at = penstock.clock() - interval '1 minute'")
                await sql.execute("select penstock.recover()")
        except Conflict as error:
            errors.append(error)
            assert (await group.find()).status == "open"
            raise

    await app.enqueue("import", {})
    await run_due_jobs(app)
    assert "no longer belongs to this worker" in str(errors[0])


async def test_the_children_of_a_step_that_is_done_are_not_taken_for_those_behind_it(
    app: Penstock, ran: list[tuple[str, Any]]
) -> None:
    """A further attempt leaves out the step, so that the child behind it is the first one of its payload."""

    @app.job("import", backoff=AT_ONCE)
    async def run(job: Job[Any]) -> None:
        async with app.job_group("import", then="report") as group:

            async def add() -> None:
                await app.enqueue("part", "a", group=group)

            await job.step("first", add)
            if job.attempt == 1:
                raise RuntimeError("between the two")
            await job.step("second", add)
            await add()

    await app.enqueue("import", {})
    await run_due_jobs(app)
    assert counts(await app.find_group("import")) == ("succeeded", 3, 3)
    assert [data for name, data in ran if name == "part"] == ["a"] * 3


async def filled(app: Penstock, sql: Sql, on_failure: Any = "continue") -> tuple[JobGroupRecord, UUID, int]:
    """A group with a `then`, which a job fills that is held. Returns it, and the job with its lease."""
    group = await app.job_group("import", then="report", on_failure=on_failure).open()
    job = await app.enqueue("part", "x")
    lease = await sql.fetchval("select lease from penstock.claim('psql', '{part}', 1)")
    await sql.execute("select penstock.fill_group($1, $2, $3)", group.id, job.id, lease)
    await sql.execute("select penstock.resolve_workflows()")
    return await group.find(), job.id, lease


async def test_an_idle_worker_is_told_of_a_group_that_is_left_open_and_only_then(app: Penstock, sql: Sql) -> None:
    declare(app)
    _, job, lease = await filled(app, sql)
    assert "workflows" not in await sql.fetchval("select due from penstock.due_work()")
    await sql.execute("select penstock.settle(array[$1]::uuid[], array[1]::smallint[], array[$2]::bigint[])", job, lease)
    assert "workflows" in await sql.fetchval("select due from penstock.due_work()")
    async with running_worker(app):
        await eventually(lambda: has_status(app, "cancelled"), "the cancellation of the group")


async def has_status(app: Penstock, status: str) -> bool:
    return (await app.find_group("import")).status == status


@pytest.mark.parametrize("locked", ["job_groups", "waiting_jobs"])
async def test_a_group_that_is_left_open_is_cancelled_when_others_give_it_free_and_holds_up_nothing(
    app: Penstock, sql: Sql, url: str, locked: str
) -> None:
    declare(app)
    group, job, lease = await filled(app, sql)
    other = await asyncpg.connect(url)
    try:
        transaction = other.transaction()
        await transaction.start()
        row = group.id if locked == "job_groups" else group.then_job
        await other.execute(f"select from penstock.{locked} where id = $1 for no key update", row)
        await sql.execute("select penstock.settle(array[$1]::uuid[], array[1]::smallint[], array[$2]::bigint[])", job, lease)
        # A pass that waited for the lock would end here with an error.
        await sql.execute("set lock_timeout = '5s'")
        for _ in range(5):
            await sql.execute("select penstock.resolve_workflows()")
        assert await has_status(app, "open")
        await transaction.rollback()
    finally:
        await other.close()
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass
    assert await has_status(app, "cancelled")
    assert group.then_job is not None
    then = await app.find(group.then_job)
    assert (then.status, then.reason) == (Status.CANCELLED, "group")


async def test_a_group_that_another_job_goes_on_to_fill_is_not_left_open(app: Penstock, sql: Sql) -> None:
    declare(app)
    group, job, lease = await filled(app, sql)
    await app.enqueue("part", "y")
    other = await sql.fetchrow("select id, lease from penstock.claim('psql', '{part}', 1)")
    await sql.execute("select penstock.settle(array[$1]::uuid[], array[1]::smallint[], array[$2]::bigint[])", job, lease)
    await sql.execute("select penstock.fill_group($1, $2, $3)", group.id, *other)
    while await sql.fetchval("select penstock.resolve_workflows()"):
        pass
    assert await has_status(app, "open")
