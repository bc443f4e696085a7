"""What processes of one version do at a schema of another one: a real second version of the package migrates the database."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psycopg
import pytest

import penstock as package
from penstock import Job, Penstock, SchemaMismatch
from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.settings import Settings
from tests.waiting import eventually

NOW, NEXT = migrate.PROTOCOL, migrate.PROTOCOL + 1


def version(folder: Path, number: str, protocol: int, oldest: int, tables: str = "", functions: str = "") -> Path:
    """A copy of the package as another version, with a further file of tables and one of functions."""
    there = folder / f"version-{number}-{protocol}-{oldest}"
    shutil.copytree(Path(package.__file__).parent, there / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    (there / "penstock" / "_version.py").write_text(f'__version__ = "{number}"\n')
    code = there / "penstock" / "postgres" / "migrate.py"
    code.write_text(
        code.read_text()
        .replace(f"PROTOCOL = {migrate.PROTOCOL}\n", f"PROTOCOL = {protocol}\n")
        .replace(f"OLDEST_CLIENT = {migrate.OLDEST_CLIENT}\n", f"OLDEST_CLIENT = {oldest}\n")
    )
    schema = there / "penstock" / "postgres" / "schema"
    if tables:
        (schema / "tables" / "9999_second.sql").write_text(tables)
    if functions:
        (schema / "functions" / "worker" / "zz_second.sql").write_text(functions)
    return there


def run(there: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "PYTHONPATH": str(there), "PENSTOCK_DATABASE_URL": url},
        capture_output=True, text=True, timeout=120, check=False, cwd=there,
    )  # fmt: skip


DROPS = "drop function penstock.claim(text, text[], integer, jsonb, text[], integer[], boolean);"


async def nothing(job: Job[Any]) -> None:
    pass


async def worked(app: Penstock, sql: Any) -> bool:
    return bool(await sql.fetchval("select count(*) > 0 from penstock.archived_jobs where status = 'succeeded'"))


async def test_a_worker_stops_when_a_migration_leaves_it_behind(
    app: Penstock, url: str, sql: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = version(tmp_path, "9.0.0", NEXT, NEXT, "create table penstock.second (n integer);", DROPS)
    app.job("mail")(nothing)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    await eventually(running.done, "the worker stops")
    with pytest.raises(
        SchemaMismatch, match=rf"of version 9\.0\.0 and serves protocols {NEXT} to {NEXT}; this version .* speaks {NOW}"
    ) as refused:
        await running
    assert "Upgrade the package" in str(refused.value)
    assert await sql.fetchval("select count(*) from penstock.workers") == 0, "it did not take its leave"
    assert caplog.text.count("schema_cannot_be_used") == 1
    # Nor does one start.
    with pytest.raises(SchemaMismatch, match=f"speaks {NOW}"):
        await Penstock(url).open()
    with pytest.raises(SchemaMismatch, match=f"speaks {NOW}"):
        await migrate.migrate(Database(url, Settings()))


async def test_a_worker_goes_on_at_a_newer_schema_that_serves_it(app: Penstock, url: str, sql: Any, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", NEXT, NOW, "create table penstock.second (n integer);")
    app.job("mail")(nothing)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    # One of this version starts, changes nothing of the newer schema, and enqueues.
    assert (await migrate.migrate(Database(url, Settings()))).functions is False
    async with Penstock(url) as other:
        await other.enqueue("mail", {})
    await eventually(lambda: worked(app, sql), "the job is done")
    assert not running.done()
    worker.stop()
    await running
    assert await sql.fetchval("select version from penstock.protocol") == "9.0.0"


async def test_a_worker_of_the_version_before_works_on_as_long_as_the_functions_that_it_calls_are_kept(
    app: Penstock, url: str, sql: Any, tmp_path: Path
) -> None:
    """The next version calls `promote` with a further parameter, the one after it no longer serves those that do not."""
    second, third = version(tmp_path, "9.0.0", NEXT, NOW), version(tmp_path, "9.1.0", NEXT + 1, NEXT)
    for there in (second, third):
        functions = there / "penstock" / "postgres" / "schema" / "functions"
        file = functions / "jobs" / "maintenance.sql"
        before, start, rest = file.read_text().partition("create or replace function penstock.promote(")
        promote, end, after = rest.partition("$$;\n")
        changed = start + promote.replace("p_limit integer default 1000", "p_limit integer, p_further text", 1) + end
        comment, _, after = after.partition("create or replace")
        named = changed + comment.replace("promote(integer)", "promote(integer, text)")
        file.write_text(f"{before}{named}create or replace{after}")
        if there is second:
            (functions / "kept").mkdir()
            (functions / "kept" / f"protocol_{NOW}.sql").write_text(start + promote + end + comment)

    app.job("mail")(nothing)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    signatures = "select array_agg(oid::regprocedure::text order by 1) from pg_proc where proname = 'promote'"
    assert await sql.fetchval(signatures) == ["penstock.promote(integer)", "penstock.promote(integer,text)"]
    await app.enqueue("mail", {}, run_after=timedelta(milliseconds=10))
    await eventually(lambda: worked(app, sql), "the deferred job is done")
    assert not running.done()
    done = await asyncio.to_thread(run, third, url, "migrate")
    assert done.returncode == 0, done.stderr
    assert await sql.fetchval(signatures) == ["penstock.promote(integer,text)"]
    await eventually(running.done, "the worker stops")
    with pytest.raises(SchemaMismatch, match=f"serves protocols {NEXT} to {NEXT + 1}"):
        await running


async def test_a_version_whose_schema_is_the_same_takes_it_over(app: Penstock, url: str, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", NOW, NOW)
    refused = await asyncio.to_thread(run, second, url, "types")
    assert refused.returncode != 0 and "are older than this version" in " ".join(refused.stderr.split()), refused.stderr
    for command in ("migrate", "types"):
        done = await asyncio.to_thread(run, second, url, command)
        assert done.returncode == 0, done.stderr


async def test_a_worker_stops_when_what_it_calls_is_gone_whatever_the_numbers_say(app: Penstock, url: str, sql: Any) -> None:
    app.job("mail")(nothing)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    await sql.execute("drop function penstock.promote(integer)")
    await eventually(running.done, "the worker stops", timeout=60)
    with pytest.raises(SchemaMismatch, match=r"penstock\.promote"):
        await running


async def test_two_builds_of_one_version_are_told_apart(app: Penstock, url: str, tmp_path: Path) -> None:
    same = package.__version__
    functions = version(
        tmp_path, same, NOW, NOW, functions="create function penstock.second() returns void language sql as 'select';"
    )
    refused = await asyncio.to_thread(run, functions, url, "types")
    assert refused.returncode != 0
    assert f"another build of version {same}" in " ".join(refused.stderr.split()), refused.stderr
    assert "penstock migrate" in refused.stderr
    tables = functions / "penstock" / "postgres" / "schema" / "tables" / "0009_history.sql"
    tables.write_text(tables.read_text() + "-- edited\n")
    for command in ("types", "migrate"):
        refused = await asyncio.to_thread(run, functions, url, command)
        assert refused.returncode != 0
        assert "files of tables are not those of this one (0009_history.sql)" in " ".join(refused.stderr.split()), refused.stderr


async def test_an_older_schema_wants_a_migration(url: str, sql: asyncpg.Connection, tmp_path: Path) -> None:
    async with Penstock(url):
        pass
    second = version(tmp_path, "9.0.0", NEXT, NEXT, "create table penstock.second (n integer);")
    refused = await asyncio.to_thread(run, second, url, "types")
    assert refused.returncode != 0 and "lacks 9999_second.sql" in refused.stderr and "penstock migrate" in refused.stderr


def test_a_data_folder_of_another_build_is_refused_and_its_data_can_be_exported(tmp_path: Path) -> None:
    folder = tmp_path / "data of before"
    environment = {**os.environ, "PENSTOCK_DATA_DIR": str(folder), "COLUMNS": "1000"}
    environment.pop("PENSTOCK_DATABASE_URL", None)

    def command(line: str) -> subprocess.CompletedProcess[str]:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return subprocess.run(
            ["sh", "-c", line], env={**environment, "PATH": programs},
            capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
        )  # fmt: skip

    rows = "select count(*), min(data ->> 'customer') from penstock.queued_jobs"
    with EmbeddedServer(folder) as server, psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute((Path(__file__).parents[1] / "another_build.sql").read_text())
        for line in ("penstock types", "penstock migrate", "penstock enqueue invoice '{}'"):
            refused = command(line)
            said = " ".join(refused.stderr.split())
            assert refused.returncode != 0 and f"in the data folder {folder} were made by another build" in said, said
            assert "Traceback" not in said
            assert connection.execute(rows).fetchone() == (1, "7")
            assert connection.execute("select to_regclass('penstock.jobs')").fetchone() == (None,)
        # What the message advises: to export, and then to drop.
        export, drop = re.findall(r"^  (PENSTOCK_DATA_DIR=.+)$", refused.stderr, re.MULTILINE)
        assert command(export).returncode == 0
        assert '{"customer": 7}' in (tmp_path / "penstock.sql").read_text()
        assert command(drop).returncode == 0
        done = command("penstock types")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_server_ends_when_a_migration_leaves_it_behind(url: str, tmp_path: Path, processes: int) -> None:
    second = version(tmp_path, "9.0.0", NEXT, NEXT, "create table penstock.second (n integer);", DROPS)
    log = tmp_path / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "penstock", "server", "--port", "0", "--processes", str(processes)],
            env={**os.environ, "PENSTOCK_DATABASE_URL": url, "NO_COLOR": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        await eventually(lambda: "listening on" in log.read_text(), "the server listens", timeout=60)
        port = log.read_text().partition("listening on http://127.0.0.1:")[2].split()[0]
        async with httpx.AsyncClient() as client:

            async def ready() -> bool:
                return (await client.get(f"http://127.0.0.1:{port}/readyz", timeout=30)).status_code == 200

            await eventually(ready, "the server is ready", timeout=60)
        done = await asyncio.to_thread(run, second, url, "migrate")
        assert done.returncode == 0, done.stderr
        assert await asyncio.to_thread(server.wait, 60) == 1
    finally:
        server.kill()
        server.wait()
    said = log.read_text()
    assert 1 <= said.count("schema_cannot_be_used") <= processes
    assert f"serves protocols {NEXT} to {NEXT}" in said
    assert "Traceback" not in said and "unexpected error" not in said
    assert f"serves protocols {NEXT} to {NEXT}" in " ".join(said.rpartition("error: ")[2].split()), said


async def test_a_consumer_of_its_own_ends_when_a_migration_leaves_it_behind(app: Penstock, url: str, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", NEXT, NEXT, "create table penstock.second (n integer);", DROPS)
    stream = app.stream("events", partitions=2)
    await stream.append({"n": 1})
    seen = []

    async def consume() -> None:
        async with stream.consume("group") as batches:
            async for batch in batches:
                seen.extend(event.data for event in batch)

    consuming = asyncio.create_task(consume())
    await eventually(lambda: seen == [{"n": 1}], "the event")
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    await eventually(consuming.done, "the consumer ends")
    with pytest.raises(SchemaMismatch, match=f"serves protocols {NEXT} to {NEXT}"):
        await consuming


async def test_a_worker_that_pulls_ends_when_a_migration_leaves_it_behind(app: Penstock, url: str, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", NEXT, NEXT, "create table penstock.second (n integer);", DROPS)
    pool = app.pool("work", int)
    await pool.enqueue("ada", 1)
    seen = []

    async def pull() -> None:
        async with pool.worker() as worker:
            async for job in worker.jobs():
                seen.append(job.data)
                await job.ack()

    pulling = asyncio.create_task(pull())
    await eventually(lambda: seen == [1], "the job")
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    await eventually(pulling.done, "the worker ends")
    with pytest.raises(SchemaMismatch, match=f"serves protocols {NEXT} to {NEXT}"):
        await pulling
