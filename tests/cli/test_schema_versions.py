"""What processes of one version do at a schema of another one: a real second version of the package migrates the database."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

import penstock as package
from conftest import eventually
from penstock import Job, Penstock, SchemaMismatch
from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.settings import Settings


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
        (schema / "functions" / "99_second.sql").write_text(functions)
    return there


def run(there: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "PYTHONPATH": str(there), "PENSTOCK_DATABASE_URL": url},
        capture_output=True, text=True, timeout=120, check=False, cwd=there,
    )  # fmt: skip


DROPS = "drop function penstock.claim(text, text[], integer, jsonb);"


async def nothing(job: Job[Any]) -> None:
    pass


async def worked(app: Penstock, sql: Any) -> bool:
    return bool(await sql.fetchval("select count(*) > 0 from penstock.archived_jobs where status = 'succeeded'"))


async def test_a_worker_stops_when_a_migration_leaves_it_behind(
    app: Penstock, url: str, sql: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    second = version(tmp_path, "9.0.0", 2, 2, "create table penstock.second (n integer);", DROPS)
    app.job("mail")(nothing)
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    done = await asyncio.to_thread(run, second, url, "migrate")
    assert done.returncode == 0, done.stderr
    await eventually(running.done, "the worker stops")
    with pytest.raises(
        SchemaMismatch, match=r"of version 9\.0\.0 and serves protocols 2 to 2; this version .* speaks 1"
    ) as refused:
        await running
    assert "Upgrade the package" in str(refused.value)
    assert await sql.fetchval("select count(*) from penstock.workers") == 0, "it did not take its leave"
    said = capfd.readouterr()
    assert (said.out + said.err).count("schema_cannot_be_used") == 1
    # Nor does one start.
    with pytest.raises(SchemaMismatch, match="speaks 1"):
        await Penstock(url).open()
    with pytest.raises(SchemaMismatch, match="speaks 1"):
        await migrate.migrate(Database(url, Settings()))


async def test_a_worker_goes_on_at_a_newer_schema_that_serves_it(app: Penstock, url: str, sql: Any, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", 2, 1, "create table penstock.second (n integer);")
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
        tmp_path, same, 1, 1, functions="create function penstock.second() returns void language sql as 'select';"
    )
    refused = await asyncio.to_thread(run, functions, url, "types")
    assert refused.returncode != 0
    assert f"another build of version {same}" in " ".join(refused.stderr.split()), refused.stderr
    assert "penstock migrate" in refused.stderr
    tables = functions / "penstock" / "postgres" / "schema" / "tables" / "0015_scan.sql"
    tables.write_text(tables.read_text() + "-- edited\n")
    for command in ("types", "migrate"):
        refused = await asyncio.to_thread(run, functions, url, command)
        assert refused.returncode != 0
        assert "0015_scan.sql differs from what was applied" in " ".join(refused.stderr.split()), refused.stderr


async def test_an_older_schema_wants_a_migration(url: str, sql: asyncpg.Connection, tmp_path: Path) -> None:
    async with Penstock(url):
        pass
    second = version(tmp_path, "9.0.0", 2, 2, "create table penstock.second (n integer);")
    refused = await asyncio.to_thread(run, second, url, "types")
    assert refused.returncode != 0 and "lacks 9999_second.sql" in refused.stderr and "penstock migrate" in refused.stderr


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_server_ends_when_a_migration_leaves_it_behind(url: str, tmp_path: Path, processes: int) -> None:
    second = version(tmp_path, "9.0.0", 2, 2, "create table penstock.second (n integer);", DROPS)
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
    assert "serves protocols 2 to 2" in said
    assert "Traceback" not in said


async def test_a_consumer_of_its_own_ends_when_a_migration_leaves_it_behind(app: Penstock, url: str, tmp_path: Path) -> None:
    second = version(tmp_path, "9.0.0", 2, 2, "create table penstock.second (n integer);", DROPS)
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
    with pytest.raises(SchemaMismatch, match="serves protocols 2 to 2"):
        await consuming
