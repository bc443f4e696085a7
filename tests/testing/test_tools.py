"""The tools for tests of applications, used as a test uses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import asyncpg
import pytest

from penstock import Depends, Event, InvalidInput, Job, NotFound, Penstock, Retry, Status, Tick
from penstock.testing import (
    TemporaryDatabases,
    advance,
    assert_enqueued,
    assert_not_enqueued,
    enqueued,
    run_due,
    run_job,
)
from tests.waiting import eventually


async def test_run_due_runs_jobs_schedules_and_consumers_until_nothing_is_due(app: Penstock) -> None:
    seen: list[Any] = []
    orders = app.stream("orders", partitions=2)

    @app.job
    async def bill(customer: str) -> None:
        seen.append(("bill", customer))

    @orders.consumer(group="billing")
    async def on_order(event: Event[Any]) -> None:
        await bill.enqueue(event.data)

    @app.job
    async def shop(customer: str) -> None:
        await orders.append(customer)

    @app.cron("0 4 * * *", missed="once", as_job=False)
    async def report(tick: Tick) -> None:
        seen.append(tick.name)

    @app.timer(every=timedelta(days=1))
    async def sweep() -> None:
        seen.append("sweep")

    await shop.enqueue("acme")
    finished = await run_due(app)
    assert [(each.name, str(each.status)) for each in finished] == [("shop", "succeeded"), ("bill", "succeeded")]
    assert seen == [("bill", "acme")]
    await advance(app, timedelta(days=1))
    await run_due(app)
    assert sorted(str(each) for each in seen[1:]) == ["report", "sweep"]


async def test_retries_are_due_when_time_has_passed(app: Penstock) -> None:
    @app.job(max_attempts=3)
    async def flaky(number: int, job: Job[Any]) -> None:
        if job.attempt < 2:
            raise Retry("later", after=timedelta(hours=5))

    receipt = await app.enqueue("flaky", {"number": 3})
    assert await run_due(app) == []
    assert (await app.find(receipt.id)).status is Status.QUEUED
    await advance(app, timedelta(hours=4))
    assert await run_due(app) == []
    await advance(app, timedelta(hours=1))
    [record] = await run_due(app)
    assert (record.id, record.status) == (receipt.id, Status.SUCCEEDED)
    await flaky.options(run_after=timedelta(hours=2), expires_at=timedelta(hours=3)).enqueue(number=1)  # type: ignore[call-arg]
    await advance(app, timedelta(hours=3))
    [expired] = await run_due(app)
    assert expired.status is Status.EXPIRED
    with pytest.raises(InvalidInput, match="span must be"):
        await advance(app, timedelta(0))


async def test_what_stays_due_is_named(app: Penstock) -> None:
    events = app.stream("events", partitions=1)

    @app.job
    async def never(number: int) -> None: ...

    @events.consumer(group="g")
    async def broken(event: Event[Any]) -> None:
        raise ValueError("the index is closed")

    await never.enqueue(1)
    await app.pause("never")
    await events.append(1)

    async def named() -> bool:
        with pytest.raises(TimeoutError, match="still due .*1 events of events/g.*1 jobs of never") as still_due:
            await run_due(app, timeout=timedelta(seconds=2))
        # On a slow machine the consumer has not come to its event yet.
        return "(ValueError: the index is closed)" in str(still_due.value)

    await eventually(named, "the error of the consumer")


async def test_what_is_no_job_type_does_not_run_as_a_job() -> None:
    app = Penstock("postgresql://nowhere/x")

    @app.cron("0 4 * * *")
    async def report() -> None: ...

    for wrong in (report, "report"):
        with pytest.raises(InvalidInput, match="run_job takes a job type"):
            await run_job(wrong)  # type: ignore[arg-type]


async def test_a_schedule_runs_at_its_next_time_and_not_at_one_that_it_missed(app: Penstock) -> None:
    ran: list[str] = []

    @app.timer(every=timedelta(hours=3))
    async def report() -> None:
        ran.append("report")

    await app.declare()
    await advance(app, timedelta(hours=5))
    await run_due(app)
    assert ran == []
    [schedule] = await app.list_schedules()
    assert schedule.next_at is not None
    await advance(app, schedule.next_at - datetime.now(UTC))
    await run_due(app)
    assert ran == ["report"]
    await app.run_schedule("report")
    await run_due(app)
    assert ran == ["report", "report"]


async def test_a_handler_runs_with_all_that_is_around_it_and_without_a_database() -> None:
    app = Penstock("postgresql://nowhere/x")
    seen: list[Any] = []

    @app.lifespan
    async def numbers() -> AsyncIterator[list[int]]:
        yield [1, 2]

    @app.middleware
    async def noted(work: Any, call_next: Any) -> Any:
        seen.append(type(work).__name__)
        return await call_next(work)

    async def get_number() -> int:
        return 5

    @app.job
    async def add(
        path: str, number: Annotated[int, Depends(get_number)], state: Annotated[list[int], Depends(numbers)], width: int = 1
    ) -> int:
        return number + width + sum(state)

    @app.job(max_batch_size=3)
    async def index(jobs: list[Job[int]]) -> list[Any]:
        return [Retry("later") if job.data == 0 else job.data for job in jobs]

    @app.job
    def plain(job: Job[str]) -> str:
        job.progress(50)
        return f"{job.key} {job.attempt} of {job.max_attempts}: {job.data}"

    assert await run_job(add, path="a", width=10) == 18  # type: ignore[call-arg]
    app.dependency_overrides[get_number] = lambda: 0
    assert await run_job(add, path="a", width=10) == 13  # type: ignore[call-arg]
    assert await run_job(plain.options(key="u1"), "x") == "u1 1 of 5: x"
    assert await run_job(index, 4) == 4
    with pytest.raises(Retry):
        await run_job(index, 0)
    with pytest.raises(InvalidInput, match="width"):
        await run_job(add, path="a", width="wide")  # type: ignore[call-arg, arg-type]
    assert seen == ["Job", "Job", "Job", "Jobs", "Jobs"]


async def test_what_was_enqueued_is_asserted(app: Penstock) -> None:
    @app.job
    async def resize(path: str, width: int = 1) -> None: ...

    await assert_not_enqueued(app, resize)
    await resize.options(key="u1").enqueue("a.png", width=3)
    await resize.enqueue("b.png")
    [job] = await assert_enqueued(app, resize, {"path": "a.png"})
    assert (job.key, job.data) == ("u1", {"path": "a.png", "width": 3})
    assert len(await assert_enqueued(app, "resize", count=2)) == 2
    assert len(await enqueued(app, resize, key="u1")) == 1
    await assert_not_enqueued(app, resize, {"path": "c.png"})
    with pytest.raises(AssertionError, match=r"expected a job of resize with \{'path': 'c.png'\}, and found 0; .*\n  .*a.png"):
        await assert_enqueued(app, resize, {"path": "c.png"})
    with pytest.raises(AssertionError, match="expected 1 jobs of resize, and found 2"):
        await assert_enqueued(app, resize, count=1)


async def test_assertions_see_a_transaction_that_the_test_rolls_back(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    @app.job
    async def resize(path: str) -> None: ...

    await app.declare()
    transaction = sql.transaction()
    await transaction.start()
    await resize.options(connection=sql).enqueue("a.png")
    await assert_enqueued(app, resize, {"path": "a.png"}, connection=sql)
    await assert_not_enqueued(app, resize)
    await transaction.rollback()
    await assert_not_enqueued(app, resize, connection=sql)


PROJECT = {
    "pytest.ini": "[pytest]\npenstock_app = mailshop:app\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n",
    "mailshop.py": """
from penstock import Penstock

app = Penstock()
sent = []

@app.job
async def send_mail(to: str) -> None:
    sent.append(to)
""",
    "test_mailshop.py": """
from mailshop import app, send_mail, sent
from penstock.testing import assert_enqueued, run_due

async def test_a_mail_is_sent(penstock_app):
    async with penstock_app:
        assert penstock_app is app
        await send_mail.enqueue("ada@example.com")
        await run_due(app)
    assert sent == ["ada@example.com"]

def test_a_plain_test_has_a_database_of_its_own(penstock_app):
    send_mail.sync.enqueue("bob@example.com")
    assert [each.ready for each in penstock_app.sync.counts()] == [1]

def test_another_one(penstock_app, penstock_database):
    assert [each.ready for each in penstock_app.sync.counts()] == [0]
    assert penstock_database in penstock_app.database_url()
""",
}


async def test_the_plugin_gives_each_test_the_application_on_its_own_database(tmp_path: Any) -> None:
    import sys

    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    ran = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await ran.communicate()
    assert ran.returncode == 0, output.decode()
    assert "3 passed" in output.decode()


async def test_databases_are_made_after_all_connections_were_ended(databases: TemporaryDatabases) -> None:
    with databases.database() as first:
        await databases.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")
        with databases.database() as second:
            for url in (first, second):
                connection = await asyncpg.connect(url)
                assert await connection.fetchval("select count(*) from penstock.jobs") == 0
                await connection.close()


async def test_the_name_of_no_job_type_is_no_proof_that_nothing_was_enqueued(app: Penstock) -> None:
    @app.job
    async def resize(path: str) -> None: ...

    await app.open()
    await assert_not_enqueued(app, "resize")
    for call in (assert_not_enqueued(app, "risize"), assert_enqueued(app, "risize"), enqueued(app, "risize")):
        with pytest.raises(NotFound, match="no such job type: risize") as refused:
            await call
        assert "resize" in str(refused.value.hint)
