"""Through a real PgBouncer in transaction mode, with the defaults: it is found out, and everything works."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from penstock import Batch, DatabaseUnavailable, Job, Penstock
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.testing import TemporaryDatabases, running_worker
from penstock.worker import doctor
from tests.debian import find, missing
from tests.http.http_calls import put
from tests.http.http_server import free_port, serving
from tests.waiting import eventually

pytestmark = [pytest.mark.embedded, pytest.mark.skipif(bool(missing("pgbouncer")), reason=missing("pgbouncer"))]


@pytest.fixture(scope="module")
def bouncer(databases: TemporaryDatabases, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a PgBouncer with fewer connections than there are clients, so that statements change theirs."""
    if databases.server is None:
        pytest.skip("the server is not the embedded one")
    data = databases.server.data_dir / "postgres"
    folder = tmp_path_factory.mktemp("pgbouncer")
    identity: dict[str, Any] = {}
    if os.geteuid() == 0:
        # It does not run as root, so as whom the server runs.
        owner = data.stat()
        identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
        with (data / "pg_ident.conf").open("a") as rules:
            rules.write(f"penstock {data.owner()} penstock\n")
        asyncio.run(databases.execute("select pg_reload_conf()"))
    port = free_port()
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n* = host={databases.server.socket_dir} user=penstock\n"
        f"[pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={port}\nauth_type=any\n"
        "pool_mode=transaction\ndefault_pool_size=3\nmax_client_conn=500\nunix_socket_dir=\n"
    )
    with (folder / "log").open("wb") as log:
        # The file is standard input: that user may not be able to go where it is.
        process = subprocess.Popen(
            [find("pgbouncer") or "", "/dev/stdin"], stdin=settings.open("rb"), stdout=log, stderr=log, cwd="/", **identity
        )
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


def through(bouncer: int, url: str) -> str:
    return f"postgresql://penstock@127.0.0.1:{bouncer}/{url.partition('@/')[2].partition('?')[0]}"


async def connected(url: str) -> bool:
    try:
        await (await asyncpg.connect(url)).close()
    except (OSError, asyncpg.PostgresError):
        return False
    return True


async def test_everything_works_with_the_defaults_and_one_line_says_so(bouncer: int, url: str) -> None:
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")
    done: list[int] = []
    events: list[int] = []

    def shop() -> Penstock:
        app = Penstock(pooled, settings=Settings(pool_size=8, poll_interval=0.1))

        @app.job("ship")
        async def ship(job: Job[int]) -> None:
            done.append(job.data)

        stream = app.stream("orders", int, partitions=4)

        @stream.consumer(group="billing")
        async def bill(batch: Batch[int]) -> None:
            events.extend(event.data for event in batch.events)

        return app

    with capture_logs() as logs:
        async with shop() as one, shop() as two:
            workers = [await app.worker() for app in (one, two)]
            running = [asyncio.create_task(worker.run()) for worker in workers]
            for app in (one, two):
                # Many calls at once, so that the server's connections change hands between any two round trips.
                await asyncio.gather(*[app.enqueue("ship", number) for number in range(100)])
                await app.enqueue_many("ship", range(100, 150))
                await asyncio.gather(*[app.streams["orders"].append(number) for number in range(30)])
            await eventually(lambda: len(done) >= 300 and len(events) >= 60, "the jobs and events")

            # The handlers have returned, and their results may still be on their way.
            async def empty() -> bool:
                return {count.name: count.ready + count.in_progress for count in await one.counts()} == {"ship": 0}

            await eventually(empty, "the settlement of all jobs", timeout=60)
            for worker in workers:
                worker.stop()
            await asyncio.gather(*running)
    assert sorted(done) == sorted([*range(150), *range(150)])
    assert sorted(events) == sorted([*range(30), *range(30)])
    found = [line for line in logs if line["event"] == "pooler_found"]
    assert len(found) == 2  # one for each app
    assert "PENSTOCK_STATEMENT_CACHE" in found[0]["setting"]
    assert not [line for line in logs if line["log_level"] == "error" or "prepared statement" in str(line.get("error"))]


async def test_a_pool_beside_another_knows_of_the_pooler_and_says_nothing(bouncer: int, url: str) -> None:
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")
    first = Database(pooled, Settings())
    second = first.beside(Settings(pool_size=1), "beside", Database)
    with capture_logs() as logs:
        for database in (first, second):
            await database.open()
            assert await database.fetchval("select $1::text", "a") == "a"
            await database.close()
    assert [line["event"] for line in logs].count("pooler_found") == 1


async def test_the_http_server_and_a_direct_connection_for_notifications(bouncer: int, url: str) -> None:
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")
    async with Penstock(pooled, settings=Settings(listen_url=url, poll_interval=1000)) as app:  # type: ignore[arg-type]
        started = asyncio.Event()

        @app.job("ship")
        async def ship(job: Job[Any]) -> None:
            started.set()

        worker = await app.worker()
        running = asyncio.create_task(worker.run())
        await worker.started()

        def over_http() -> None:
            with serving(pooled, PENSTOCK_LISTEN_URL=url) as served, served.client() as client:
                job = put(client, "ship", data={})
                answer = client.get(f"/v1/jobs/{job['id']}", params={"wait": "20s"}).json()
                assert answer["status"] == "succeeded"

        await asyncio.to_thread(over_http)
        assert started.is_set()
        worker.stop()
        await running


async def test_what_was_set_is_done_and_the_error_names_the_setting(bouncer: int, url: str) -> None:
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")

    async def call_often(cache: bool | None) -> None:
        databases = [Database(pooled, Settings(statement_cache=cache)) for _ in range(4)]
        for database in databases:
            await database.open()
        try:
            calls = [database.fetch("select $1::int * 2", number) for number in range(40) for database in databases]
            for rows, number in zip(await asyncio.gather(*calls), (n for n in range(40) for _ in databases), strict=True):
                assert rows[0][0] == 2 * number
        finally:
            for database in databases:
                await database.close()

    await call_often(None)
    await call_often(False)
    # Statements clash when two clients get one connection of the server, which is up to the pooler.
    with pytest.raises(DatabaseUnavailable) as refused:
        for _ in range(100):
            await call_often(True)
    assert "PENSTOCK_STATEMENT_CACHE=false" in (refused.value.hint or "")


async def test_without_a_pooler_statements_are_prepared(url: str) -> None:
    database = Database(url, Settings())
    await database.open()
    with capture_logs() as logs:
        for _ in range(3):
            rows = await database.fetch("select count(*) from pg_prepared_statements where statement like '%pg_prepared%'")
    assert rows[0][0] == 1
    assert not logs
    await database.close()


async def test_the_doctor_says_that_the_pooler_swallows_notifications(
    bouncer: int, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "NOTIFY_S", 1.0)
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")
    await Penstock(url).migrate()
    for listen_url, level in ((None, "problem"), (url, "ok")):
        findings = await Penstock(pooled, settings=Settings(listen_url=listen_url)).doctor()  # type: ignore[arg-type]
        (finding,) = [one for one in findings if one.check == "notifications"]
        assert finding.level == level
        assert level == "ok" or "PENSTOCK_LISTEN_URL" in str(finding.advice)


async def test_defaults_of_the_database_do_not_matter_and_what_is_set_does_not_stay(bouncer: int, url: str) -> None:
    """Each transaction sets what it needs; other clients of the pooler get the connection as it was."""
    connection = await asyncpg.connect(url)
    name = await connection.fetchval("select current_database()")
    for setting in (
        "default_transaction_isolation = 'serializable'",
        "default_transaction_read_only = on",
        "DateStyle = 'SQL, DMY'",
    ):
        await connection.execute(f'alter database "{name}" set {setting}')
    await connection.close()
    pooled = through(bouncer, url)
    await eventually(lambda: connected(pooled), "PgBouncer")
    await Penstock(pooled).migrate()
    app = Penstock(pooled)

    @app.job("ship", keep_result=True)
    async def ship(job: Job[Any]) -> Any:
        return job.data

    async with app, running_worker(app):
        receipt = await ship.enqueue({"n": 1})
        assert (await app.wait(receipt.id)).result == {"n": 1}
    other = await asyncpg.connect(pooled, statement_cache_size=0)
    for setting, value in (
        ("default_transaction_isolation", "serializable"),
        ("DateStyle", "SQL, DMY"),
    ):
        assert await other.fetchval(f"show {setting}") == value
    await other.close()
