"""Work of every shape on an ordinary PostgreSQL, and on those whose defaults are hostile: nothing of it depends on them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest

from penstock import Backoff, DatabaseUnavailable, Event, Fail, Job, NewEvent, NewJob, Penstock, PenstockError, Status, Tick
from penstock.postgres.embedded import wheel_bin_dir
from penstock.testing import TemporaryDatabases, running_worker
from tests.command_line import penstock
from tests.http.http_calls import claim, put, settle
from tests.http.http_server import serving as serving_http
from tests.stock_server import KINDS, serving
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
HOSTILE = ("hostile", "repeatable")
AT_ONCE = Backoff(base=timedelta(0))
# What the settings would change: letters whose case differs in Turkish, signs that end a string, null as a text, a time.
ODD = {"I": "ıİiI", "quote": "it's a \\'\\\\ backslash", "null": "NULL", "euro": "€ \U0001f600", "float": 0.1 + 0.2, "none": None}


@pytest.fixture(scope="module", params=["stock", *HOSTILE])
def hostile(request: pytest.FixtureRequest) -> Iterator[TemporaryDatabases]:
    """Databases on a server of each kind."""
    with serving(request.param) as server, TemporaryDatabases(server.url) as databases:
        yield databases


@pytest.fixture
def url(hostile: TemporaryDatabases) -> Iterator[str]:
    with hostile.database() as url:
        yield url


@pytest.fixture
async def app(url: str) -> AsyncIterator[Penstock]:
    async with Penstock(url) as app:
        yield app


@pytest.fixture
async def sql(url: str) -> AsyncIterator[Sql]:
    """A caller of SQL with the defaults of the server, but for those that would end its connection or statements."""
    connection = await asyncpg.connect(url)
    await connection.execute("set statement_timeout = 0; set lock_timeout = 0; set idle_session_timeout = 0; set jit = off")
    yield connection
    connection.terminate()


@dataclass
class Approval:
    by: str


async def ended(app: Penstock, id: Any) -> str:
    """The status of a job when it has ended."""

    async def status() -> str | None:
        record = await app.find(id)
        return str(record.status) if record.finished_at else None

    return str(await eventually(status, f"the end of {id}"))


async def make_type(sql: Sql, name: str) -> None:
    await sql.execute(f"select penstock.declare_job_type('{name}')")


async def test_a_queue_works(app: Penstock) -> None:
    attempts: list[int] = []

    @app.job("echo", keep_result=True, concurrency=5)
    async def echo(job: Job[Any]) -> Any:
        return job.data

    @app.job("flaky", backoff=AT_ONCE, max_attempts=3)
    async def flaky(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        if job.attempt < 3:
            raise ValueError(job.data["quote"])

    @app.job("fails", delivery="at_most_once")
    async def fails(job: Job[Any]) -> None:
        raise Fail("no")

    async with running_worker(app):
        many = await echo.enqueue_many([NewJob({"n": n}) for n in range(300)])
        one = await echo.options(key="İ", unique="ı", priority=-3).enqueue(ODD)
        later = await echo.options(run_after=timedelta(milliseconds=300)).enqueue({"later": True})
        expired = await echo.options(
            run_after=timedelta(milliseconds=500),
            expires_at=datetime.now(timezone(timedelta(hours=-7))) + timedelta(milliseconds=400),
        ).enqueue({})
        retried, failed = await flaky.enqueue(ODD), await fails.enqueue(ODD)
        assert (await app.wait(one.id)).result == ODD
        assert (await app.wait(later.id)).result == {"later": True}
        assert [await ended(app, one.id) for one in (retried, failed, expired)] == ["succeeded", "failed", "expired"]
        assert attempts == [1, 2, 3]
        assert {await ended(app, each.id) for each in many} == {"succeeded"}
        again = await echo.options(id=one.id).enqueue(ODD)
        assert again.outcome == "archived"
    assert len(await app.find_many(name="echo", status=Status.SUCCEEDED, limit=1000)) == 302
    waiting = await app.replay(one.id)
    assert (await app.why(waiting.id)).reason


async def test_a_pool_works(app: Penstock) -> None:
    seen: dict[str, list[int]] = {}
    pool = app.pool("ship")

    @pool.job
    async def ship(job: Job[Any]) -> None:
        assert job.key is not None
        seen.setdefault(job.key, []).append(job.data["n"])

    keys = ["I", "ı", "İ", "\\", "NULL", "'"]
    async with running_worker(app):
        for n in range(20):
            for key in keys:
                await pool.enqueue(key, {"n": n})
        await eventually(lambda: sum(map(len, seen.values())) == 20 * len(keys), "all jobs of the pool")
    assert seen == {key: list(range(20)) for key in keys}


async def test_a_stream_works(app: Penstock) -> None:
    orders = app.stream("orders", partitions=4)
    seen: list[tuple[str | None, int, dict[str, str]]] = []

    @orders.consumer(group="g")
    async def consume(event: Event[Any]) -> None:
        seen.append((event.key, event.data["n"], dict(event.headers)))

    async with running_worker(app):
        await orders.append_many([NewEvent({"n": n}, key="ıI"[n % 2], headers={"h": "\\x00'"}) for n in range(200)])
        await eventually(lambda: len(seen) == 200, "all events")
    for key in "ıI":
        numbers = [n for of, n, _ in seen if of == key]
        assert numbers == sorted(numbers)
    assert seen[0][2]["h"] == "\\x00'"
    assert sum(lag.lag for lag in await orders.lag("g")) == 0


async def test_a_topic_works(app: Penstock) -> None:
    got: list[Any] = []
    delays = app.topic("delays")

    @delays.subscriber("JFK", filter={"dest": "İst"})
    async def at_jfk(job: Job[Any]) -> None:
        got.append(job.data)

    async with running_worker(app):
        await delays.publish({"dest": "İst", **ODD})
        await delays.publish({"dest": "ist"})
        await eventually(lambda: len(got) == 1, "the copy")
    assert got == [{"dest": "İst", **ODD}]


async def test_workflows_work(app: Penstock) -> None:
    @app.job("part", keep_result=True)
    async def part(job: Job[Any]) -> Any:
        return job.data

    @app.job("order", keep_result=True)
    async def order(job: Job[Any]) -> str:
        async def charge() -> Any:
            return ODD

        assert await job.step("pay", charge) == ODD
        await job.sleep("a moment", timedelta(milliseconds=50))
        return (await job.wait_for("approved", Approval, timeout=timedelta(hours=1))).by

    graph = app.workflow("diamond")
    first = graph.add(part, {"n": 1}, step="a")
    graph.add(part, {"n": 2}, step="b", after=[first])
    async with running_worker(app):
        receipt = await order.enqueue({})
        run = await graph.start(id="run")
        async with app.job_group("İ", then=part, then_data={"n": 3}) as group:
            for n in range(30):
                await part.options(group=group).enqueue({"n": n})
        assert (await app.wait_for_workflow("run")).succeeded == 2

        async def ended_group() -> bool:
            return (await group.find()).finished_at is not None

        await eventually(ended_group, "the end of the group")
        assert (await group.find()).succeeded == 30
        await app.signal(receipt.id, "approved", Approval("ada"))
        assert (await app.wait(receipt.id)).result == "ada"
    assert {step.status for step in await app.workflow_steps(run)} == {"succeeded"}


async def test_schedules_work(app: Penstock) -> None:
    ticks: list[datetime] = []

    @app.timer(every=timedelta(milliseconds=100), name="sweep")
    async def sweep(tick: Tick) -> None:
        ticks.append(tick.at)

    @app.cron("30 2 * * *", name="nightly", tz="Europe/Berlin")
    async def nightly(tick: Tick) -> None: ...

    async with running_worker(app):
        await eventually(lambda: len(ticks) >= 5, "five ticks")
    assert ticks == sorted(set(ticks))
    assert {schedule.name for schedule in await app.list_schedules()} == {"sweep", "nightly"}


def test_the_server_works(url: str) -> None:
    async def prepared() -> None:
        async with Penstock(url) as app:
            app.stream("orders", partitions=2)
            app.topic("delays")
            app.job("ship")(lambda job: None)
            await app.declare()

    asyncio.run(prepared())
    with serving_http(url) as served, served.client() as client:
        job = put(client, "ship", data=ODD)
        (held,) = claim(client, "ship")
        assert held["data"] == ODD
        assert settle(client, "ship", held) == "succeeded"
        assert client.get(f"/v1/jobs/{job['id']}").json()["status"] == "succeeded"
        for path in ("/metrics", "/readyz", "/v1/jobs", "/v1/workers", "/v1/streams/orders", "/v1/topics", "/v1/schedules"):
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)


async def test_commands_work_and_the_script_of_a_migration_does(url: str) -> None:
    assert (await asyncio.to_thread(penstock, url, "migrate")).returncode == 0
    connection = await asyncpg.connect(url)
    await connection.execute("drop schema penstock cascade")
    plan = await Penstock(url).plan_migration()
    chosen = os.environ.get("PENSTOCK_TEST_POSTGRES_BIN")
    psql = (Path(chosen) if chosen else wheel_bin_dir()) / "psql"
    done = await asyncio.to_thread(
        subprocess.run, [psql, "-X", "-v", "ON_ERROR_STOP=1", "-d", url], input=plan.script, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (await Penstock(url).plan_migration()).statements
    await connection.close()


async def test_what_the_doctor_says_mends_it(app: Penstock, url: str, sql: Sql) -> None:
    """Callers of SQL get a claim refused in words, or work; what the doctor says makes them work."""
    await make_type(sql, "ship")
    level = await sql.fetchval("show default_transaction_isolation")
    await sql.execute("select penstock.enqueue('ship', '{\"a\": \"it''s\"}')")
    found = [finding for finding in await app.doctor() if finding.check == "settings" and "isolation" in finding.message]
    if level == "read committed":
        assert not found
        assert len(await sql.fetch("select * from penstock.claim('w', array['ship'], 1)")) == 1
        return
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.fetch("select * from penstock.claim('w', array['ship'], 1)")
    assert refused.value.sqlstate == "PS409"
    (finding,) = found
    assert finding.advice is not None
    for statement in finding.advice.removeprefix("Run: ").split("; "):
        await sql.execute(statement)
    other = await asyncpg.connect(url)
    assert len(await other.fetch("select * from penstock.claim('w', array['ship'], 1)")) == 1
    await other.close()
    await sql.execute(f"alter system set default_transaction_isolation = '{level}'")
    await sql.execute("select pg_reload_conf()")


async def test_work_goes_on_while_the_server_says_that_all_is_read_only(app: Penstock, sql: Sql) -> None:
    @app.job("echo", keep_result=True)
    async def echo(job: Job[Any]) -> Any:
        return job.data

    database = await sql.fetchval("select current_database()")
    async with running_worker(app):
        await sql.execute(f'alter database "{database}" set default_transaction_read_only = on')
        await sql.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'penstock%'")

        async def enqueued() -> Any:
            try:
                return await echo.enqueue(ODD)
            except DatabaseUnavailable:  # on a connection that was ended
                return None

        receipt = await eventually(enqueued, "a new connection")
        assert (await app.wait(receipt.id)).result == ODD
        found = [finding.advice for finding in await app.doctor() if "default_transaction_read_only" in finding.message]
        assert found == [f"Run: alter database {database} reset default_transaction_read_only;"]


async def test_a_server_with_few_connections_is_shared_and_nothing_fails(url: str, sql: Sql) -> None:
    """Each process would open four connections; together they find no more than are left."""
    role = f"few_{uuid4().hex[:8]}"
    await sql.execute(f"create role {role} login connection limit 6; select penstock.grant_access('{role}', 'admin')")
    limited = url.replace("postgres@", f"{role}@")
    apps = [Penstock(limited) for _ in range(4)]
    try:
        await make_type(sql, "ship")
        await asyncio.gather(*[one.enqueue("ship", {"n": n}) for n in range(100) for one in apps])
        assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 400
    finally:
        for one in apps:
            await one.close()


async def test_an_encoding_other_than_utf8_is_refused_in_words(databases: TemporaryDatabases) -> None:
    async def refused(url: str) -> None:
        for call in (Penstock(url).migrate, Penstock(url).open):
            with pytest.raises(PenstockError, match="encoding SQL_ASCII, and Penstock needs UTF8") as error:
                await call()
            assert "encoding 'UTF8'" in (error.value.hint or "")
        (finding,) = await Penstock(url).doctor()
        assert finding.level == "problem" and "UTF8" in finding.message

    name = f"ascii_{uuid4().hex[:8]}"
    await databases.execute(f"create database {name} encoding 'SQL_ASCII' locale 'C' template template0")
    try:
        with databases.database() as other:
            found = other.split("/")
            await refused(other.replace(next(part for part in found if part.startswith("penstock_test_")).split("?")[0], name))
    finally:
        await databases.execute(f"drop database {name} with (force)")


def test_every_kind_is_tried() -> None:
    assert set(KINDS) == {"stock", *HOSTILE, "texts"}
