"""Spark jobs: run by drivers that workers start; tracked, cancelled, retried, taken over; what they write counts once."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import psutil
import pytest

from penstock import Conflict, InvalidInput, Job, Penstock
from penstock.errors import JobFailed, MissingExtra
from penstock.jobs.spark_attempt import FENCE, SparkAttempt
from penstock.testing import running_worker
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]
CONNECT = "org.apache.spark.sql.connect.service.SparkConnectServer"
LONG = timedelta(seconds=240)


@pytest.fixture
def jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> Penstock:
    """The application of `spark_job_app`, on the database of the test."""
    from tests.spark import spark_job_app

    monkeypatch.setattr(spark_job_app.app.context, "settings", Penstock(url).settings)
    return spark_job_app.app


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_spark_job_is_tracked_and_what_a_retry_writes_counts_once(jobs: Penstock, ask: Ask, tmp_path: Path) -> None:
    async with jobs, running_worker(jobs, "copy", "script"):
        copied = await jobs.enqueue("copy", {"rows": 30})
        counted = await jobs.enqueue("script", {"file": str(tmp_path / "rows"), "rows": 12})
        record = await jobs.wait(copied.id, timeout=LONG)
        await jobs.wait(counted.id, timeout=LONG)
        record = await jobs.find(copied.id)
    assert record.result == {"rows": 30, "attempt": 2}
    assert [(error["type"], error["message"]) for error in record.errors] == [("ValueError", "after the write")]
    assert [line.line for line in record.log] == [f"attempt {n} from a dependency" for n in (1, 2)]
    assert (tmp_path / "rows").read_text() == "12"
    queued = await asyncio.to_thread(ask, "select data ->> 'n' as n from penstock.queued_jobs where name = 'copied'")
    assert sorted(int(row["n"]) for row in queued) == list(range(30))


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_what_a_test_puts_in_place_of_a_dependency_reaches_the_driver(jobs: Penstock) -> None:
    from tests.spark.spark_job_app import source, stand_in

    jobs.dependency_overrides[source] = stand_in
    try:
        async with jobs, running_worker(jobs, "copy"):
            copied = await jobs.enqueue("copy", {"rows": 1})
            await jobs.wait(copied.id, timeout=LONG)
            record = await jobs.find(copied.id)
        assert [line.line for line in record.log] == [f"attempt {n} from a test" for n in (1, 2)]
    finally:
        jobs.dependency_overrides.clear()


@pytest.mark.no_jvm
async def test_a_stand_in_that_a_driver_cannot_import_fails_the_job_in_words(jobs: Penstock) -> None:
    from tests.spark.spark_job_app import source

    jobs.dependency_overrides[source] = lambda: "nowhere"
    try:
        async with jobs, running_worker(jobs, "copy"):
            copied = await jobs.enqueue("copy", {"rows": 1})
            with pytest.raises(JobFailed, match="cannot run in a process, which imports it by its name"):
                await jobs.wait(copied.id, timeout=LONG)
    finally:
        jobs.dependency_overrides.clear()


async def copied_through(jobs: Penstock, name: str, url: str, ask: Ask) -> dict[str, Any]:
    """Run a job that writes, fails and is retried. Returns its result, when what it wrote counts once."""
    async with jobs, running_worker(jobs, name):
        job = await jobs.enqueue(name, {"rows": 20, "url": url})
        await jobs.wait(job.id, timeout=LONG)
        record = await jobs.find(job.id)
    assert [(error["type"], error["message"]) for error in record.errors] == [("ValueError", "after the write")]
    queued = await asyncio.to_thread(ask, "select data ->> 'n' as n from penstock.queued_jobs where name = 'copied'")
    assert sorted(int(row["n"]) for row in queued) == list(range(20))
    result: dict[str, Any] = record.result
    return result


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_job_is_started_by_spark_submit(jobs: Penstock, url: str, ask: Ask) -> None:
    result = await copied_through(jobs, "submitted", url, ask)
    assert result == {
        "session": "pyspark.sql.session", "settings": ["yes", "7", "3"],
        # Other users of the machine see command lines.
        "password": "s3cret = a:b\\c#d!", "shown": False,
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_job_runs_at_a_server_of_spark_connect(jobs: Penstock, url: str, ask: Ask, connect_server: str) -> None:
    from tests.spark.spark_job_app import SOON, copy_through

    config = {"spark.sql.shuffle.partitions": "3"}
    jobs.spark_job("remote", remote=connect_server, config=config, max_attempts=2, backoff=SOON, keep_result=True)(copy_through)
    result = await copied_through(jobs, "remote", url, ask)
    assert result == {
        "session": "pyspark.sql.connect.session", "settings": [None, "5", "3"], "password": None, "shown": False
    }  # fmt: skip


@pytest.fixture
async def connect_server(tmp_path: Path) -> AsyncIterator[str]:
    """A server of Spark Connect, as a process of its own."""
    from penstock.spark.java import find_java

    pytest.importorskip("grpc")
    java = find_java()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PENSTOCK_DATABASE_URL"},
        "JAVA_HOME": str(java.home),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    settings = {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.memory": "800m",
        "spark.driver.extraJavaOptions": " ".join(java.options),
        "spark.task.maxFailures": "5",
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    with (tmp_path / "connect.log").open("wb") as log:
        server = subprocess.Popen(
            [
                Path(sys.executable).parent / "spark-submit", "--class", CONNECT, "--master", "local[2]",
                *[word for name, value in settings.items() for word in ("--conf", f"{name}={value}")],
                "spark-internal",
            ],
            env=environment, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def listens() -> bool:
        assert server.poll() is None, (tmp_path / "connect.log").read_text()[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        await eventually(listens, "the server of Spark Connect", timeout=120)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_a_cancelled_job_cancels_what_spark_runs(jobs: Penstock, tmp_path: Path) -> None:
    marker = tmp_path / "driver"
    async with jobs, running_worker(jobs, "long"):
        job = await jobs.enqueue("long", {"marker": str(marker)})
        stages: dict[str, Any] = {}

        async def in_a_stage() -> bool:
            nonlocal stages
            stages = (await jobs.find(job.id)).progress or {}
            return bool(stages.get("active"))

        await eventually(in_a_stage, "a stage", timeout=200)
        assert (stages["stages"], stages["stages_done"], stages["active"][0]["tasks"]) == (1, 0, 2)
        await jobs.cancel(job.id)

        async def ended() -> bool:
            return (await jobs.find(job.id)).status.finished

        await eventually(ended, "the end", timeout=100)
        assert (await jobs.find(job.id)).status == "cancelled"
    driver = int(marker.read_text())
    await eventually(lambda: gone(driver), "the end of the driver", timeout=60)


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_the_job_of_a_killed_worker_is_taken_over_and_its_driver_ends(
    jobs: Penstock, url: str, ask: Ask, tmp_path: Path
) -> None:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "tests.spark.spark_job_app", url])

    worker = start()
    try:
        async with jobs:
            job = await jobs.enqueue("interrupted", {"folder": str(tmp_path)})
            await eventually((tmp_path / "written 1").exists, "the first write", timeout=200)
            driver = int((tmp_path / "written 1").read_text())
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
            await eventually(lambda: gone(driver), "the end of the orphan", timeout=60)
            worker = start()
            await jobs.wait(job.id, timeout=LONG)
            record = await jobs.find(job.id)
        assert (record.result, record.attempt) == (2, 2)
        queued = await asyncio.to_thread(ask, "select count(*) as jobs from penstock.queued_jobs where name = 'copied'")
        assert queued[0]["jobs"] == 50
    finally:
        worker.kill()
        worker.wait()


@pytest.fixture
def running(url: str, ask: Ask) -> SparkAttempt:
    """A job that runs, as far as the database knows, and a driver of it."""
    ask("select penstock.create_job_type(name) from unnest('{spark-job,copied}'::text[]) as name")
    ask("select penstock.enqueue('spark-job')")
    (row,) = ask("select id, attempt, lease from penstock.claim('w', '{spark-job}', 1)")
    return SparkAttempt(row["id"], row["attempt"], row["lease"], "first")


def test_what_an_orphan_writes_does_not_count(
    spark: SparkSession, url: str, ask: Ask, running: SparkAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.spark import register

    def write(attempt: SparkAttempt, **options: Any) -> None:
        monkeypatch.setenv(FENCE, attempt.as_json())
        register(spark)
        rows = spark.range(5).selectExpr("named_struct('n', id) as data")
        rows.write.format("penstock").option("url", url).option("job", "copied").options(**options).mode("append").save()

    def number() -> int:
        return int(ask("select count(*) from penstock.queued_jobs where name = 'copied'")[0][0])

    try:
        write(running)
        with pytest.raises(Exception, match="writes to job copied more than once"):
            write(running)
        write(running, epoch="1")
        assert number() == 10
        # The driver of a retry writes the same again, which counts once.
        retried = SparkAttempt(running.job, running.attempt, running.lease, "second")
        write(retried)
        write(retried, epoch="1")
        assert number() == 10
        # Another worker has the job, as the same attempt: it was released before its end.
        ask(f"select penstock.settle('{{{running.job}}}', '{{{running.attempt}}}', '{{{running.lease}}}', '{{released}}');")
        (row,) = ask("select id, attempt, lease from penstock.claim('other', '{spark-job}', 1)")
        assert (row["id"], row["attempt"]) == (running.job, running.attempt)
        orphans = [
            SparkAttempt(running.job, 7, row["lease"], "third"),
            SparkAttempt(UUID(int=7), 1, row["lease"], "fourth"),
            running,
        ]
        for orphan in orphans:
            with pytest.raises(Exception, match="does not run any more"):
                write(orphan, writer="another", epoch="1")
        assert number() == 10
    finally:
        monkeypatch.delenv(FENCE, raising=False)
        register(spark)


@pytest.mark.no_jvm
@pytest.mark.parametrize("module", ["grpc", "grpc_status", "zstandard"])
def test_spark_connect_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    from penstock.spark import session

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"(?s)Spark Connect.*{module}"):
        session(remote="sc://127.0.0.1:1")


def test_a_session_of_spark_connect_is_refused_beside_one_of_spark_itself(spark: SparkSession) -> None:
    from penstock.spark import session

    with pytest.raises(Conflict, match="has a session of Spark itself, and cannot connect to sc://127.0.0.1:1"):
        session(remote="sc://127.0.0.1:1")
    assert session() is spark


@pytest.mark.no_jvm
def test_declarations_that_cannot_run_are_refused(tmp_path: Path) -> None:
    app = Penstock("postgresql://nowhere")
    with pytest.raises(InvalidInput, match="there is no script"):
        app.spark_job("a", script=tmp_path / "absent.py")
    with pytest.raises(InvalidInput, match="master, remote and submit of a exclude each other"):
        app.spark_job("a", master="local[1]", remote="sc://host")
    with pytest.raises(InvalidInput, match="a function within a function"):

        @app.spark_job("a")
        def within(spark: Any) -> None: ...

    with pytest.raises(InvalidInput, match="is async"):
        app.spark_job("a")(asynchronous)
    declared = app.spark_job("b", concurrency=3)(plain)
    assert (declared.declared.concurrency, declared.signature.form) == (3, "fields")
    # It stays a function, which a test can call with a session of its own.
    assert declared("session", day="monday") == ("session", "monday")


def plain(spark: Any, day: str) -> tuple[Any, str]:
    return spark, day


async def asynchronous(spark: Any, job: Job[Any]) -> None: ...


@pytest.mark.no_jvm
async def test_an_attempt_that_does_not_run_is_refused(app: Penstock, sql: asyncpg.Connection[Any]) -> None:
    await app.open()
    await sql.execute("select penstock.create_job_type('step')")
    id = await sql.fetchval("select penstock.enqueue('step')")
    claim = "select id, attempt, lease from penstock.claim($1, '{step}', 1)"

    async def refused(attempt: int, lease: int) -> bool:
        try:
            await sql.execute("select penstock.require_attempt($1, $2, $3)", id, attempt, lease)
        except asyncpg.PostgresError as error:
            assert f"attempt {attempt} of Spark job {id} does not run any more under lease {lease}" in str(error)
            return True
        return False

    assert await refused(1, 1)
    first = (await sql.fetchrow(claim, "psql"))["lease"]
    assert not await refused(1, first)
    assert await refused(2, first)
    assert await refused(1, first + 1)
    # However often it is extended, it is the same claim.
    held = first
    for _ in range(3):
        held = await sql.fetchval("select lease from penstock.extend(array[$1::uuid], '{1}', array[$2::bigint])", id, held)
    assert held > first + 2
    assert not await refused(1, first)
    # Released before its end, and claimed by another worker, it is the same attempt, and another claim.
    settle = "select * from penstock.settle(array[$1::uuid], array[1::smallint], array[$2::bigint], array[$3])"
    await sql.fetch(settle, id, held, "released")
    assert await refused(1, first)
    again = await sql.fetchrow(claim, "other")
    assert (again["id"], again["attempt"]) == (id, 1)
    assert await refused(1, first)
    assert await refused(1, held)
    assert not await refused(1, again["lease"])
    await sql.fetch(settle, id, again["lease"], "succeeded")
    assert await refused(1, again["lease"])
