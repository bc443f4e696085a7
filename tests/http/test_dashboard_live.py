"""Live pages, and the poller that reads for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import islice
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import Penstock, Settings
from penstock.core.spending import spending
from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.http.dashboard import poller
from penstock.http.dashboard.pacing import SHARE
from penstock.http.errors import from_penstock
from penstock.jobs.top import top_types
from penstock.postgres.database import Database
from penstock.postgres.read_only import ReadOnlyDatabase
from penstock.postgres.translation import StatementCancelled
from penstock.testing import TemporaryDatabases
from tests.chaos.proxy import Proxy
from tests.http.dashboard_browser import Reader
from tests.http.dashboard_server import reader
from tests.http.http_server import TOKEN, Served, serving
from tests.waiting import eventually


def test_one_user_does_not_take_all_live_connections(dashboard: Served) -> None:
    with reader(dashboard, "work") as greedy, reader(dashboard, "admin") as other, ExitStack() as stack:
        answers = [stack.enter_context(connection_of(greedy, "live?page=topics")) for _ in range(60)]
        assert [b" 200 " in first_of(answer) for answer in answers].count(True) == 50
        assert b" 200 " in first_of(stack.enter_context(connection_of(other, "live?page=topics")))


async def number_of(database: Database, number: int) -> int:
    one: int = await database.fetchval("select $1::integer", number)
    return one


async def test_no_page_waits_for_a_database_that_hangs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay open, and nothing comes back: no call ends, and neither does its cancellation."""
    monkeypatch.setattr(poller, "HANGS_S", 1.0)
    async with Proxy(url) as proxy, Penstock(proxy.url, settings=Settings(command_timeout=timedelta(hours=1))) as app:
        readings = poller.Poller(app)
        assert (await readings.read(number_of, 1))[0].problem is None
        proxy.cut()
        readings.changed()
        async with asyncio.timeout(120):
            reading, _ = await readings.read(number_of, 1)
            assert (reading.value, reading.problem) == (1, "the database has not answered for 1 s")
            for another in (2, 3):
                with pytest.raises(DatabaseUnavailable, match="does not answer"):
                    await readings.read(number_of, another)
        proxy.mend()

        async def read_again() -> bool:
            readings.changed()
            return (await readings.read(number_of, 1))[0].problem is None

        await eventually(read_again, "a reading", timeout=60)
        await readings.close()


async def slept(database: Database, seconds: float) -> None:
    await database.fetchval("select pg_sleep($1)", seconds)


async def test_the_time_for_which_a_statement_waits_is_no_cost(url: str) -> None:
    """Beside a full machine each statement waits: for that, nothing is read more rarely."""
    async with Penstock(url) as app:
        database = (await app.database()).beside(app.settings, "test", ReadOnlyDatabase)
        await database.open()
        with spending() as spent:
            for _ in range(3):
                await slept(database, 0.15)
        assert spent.statements == 3
        assert spent.cost_s / 3 * SHARE < 2.0, "what costs so little is read every two seconds"
        with spending() as dear:
            await database.fetch("select count(*) from pg_proc as a, pg_class as b where a.oid > b.oid")
        assert dear.cost_s > 10 * spent.cost_s / 3
        await database.close()


async def test_a_change_is_seen_before_a_dear_reading_is_due(url: str) -> None:
    async with Penstock(url) as app:
        await app.create_job_type("a")
        readings = poller.Poller(app)
        first, kept = await readings.read(top_types, ("a",), 1, kept_s=300.0, follows=True)
        assert first.value == []
        assert not await readings.is_due([kept])
        await app.enqueue_many("a", [{}])

        async def shown() -> bool:
            reading, _ = await readings.read(top_types, ("a",), 1, kept_s=300.0, follows=True)
            return [load.ready for load in reading.value] == [1]

        await eventually(shown, "the job")
        await readings.close()


async def test_a_job_whose_transaction_ends_after_the_look_is_seen_too(url: str, sql: asyncpg.Connection) -> None:
    async with Penstock(url) as app:
        await app.create_job_type("a")
        readings = poller.Poller(app)
        _, kept = await readings.read(top_types, ("a",), 1, kept_s=300.0, follows=True)
        await readings.is_due([kept])
        transaction = sql.transaction()
        await transaction.start()
        await sql.execute("select count(*) from penstock.enqueue_many('a', array['{}'::jsonb])")

        async def read() -> list[int]:
            reading, _ = await readings.read(top_types, ("a",), 1, kept_s=300.0, follows=True)
            return [load.ready for load in reading.value]

        async def noticed() -> bool:
            assert await read() == []
            return readings.changes.version > 0 and not await readings.is_due([kept])

        await eventually(noticed, "the mark of the open transaction")
        await transaction.commit()
        await eventually(lambda: _is(read, [1]), "the job")
        await readings.close()


async def _is(read: Callable[[], Awaitable[list[int]]], wanted: list[int]) -> bool:
    return await read() == wanted


async def test_a_statement_that_takes_too_long_is_named_so_and_not_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadOnlyDatabase, "time_limit_s", 0.2)
    async with Penstock(url) as app:
        readings = poller.Poller(app)
        for _ in range(2):
            with pytest.raises(StatementCancelled, match=r"was cancelled after 0\.2 s") as late:
                await readings.read(slept, 60.0)
            answer = from_penstock(late.value)
            assert (answer.status, "not available" in answer.message) == (503, False)
            assert "cancelled after 0.2 s" in answer.message and "database answers" in str(answer.hint)
        assert (await readings.read(number_of, 1))[0].value == 1
        await readings.close()


def connection_of(reading: Reader, path: str) -> socket.socket:
    """A connection on which a request is sent, so that all are open at once."""
    request = reading.client.build_request("GET", path)
    connection = socket.create_connection((request.url.host, request.url.port or 80), timeout=60)
    lines = [f"GET /{path} HTTP/1.1", f"Host: {request.headers['host']}", f"Cookie: {request.headers['cookie']}"]
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    return connection


def first_of(connection: socket.socket) -> bytes:
    """The first line of an answer."""
    return connection.recv(20)


def frames(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_an_open_page_shows_what_changes(dashboard: Served, admin: Reader) -> None:
    with admin.client.stream("GET", "live", params={"page": "types"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        coming = frames(answer)
        name, first = next(coming)
        assert name == "page" and "live-type" not in first["html"]
        with dashboard.client() as client:
            body = {"name": "live-type", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
            assert client.post("/v1/jobs", json=body).status_code == 201
        assert any("live-type" in data["html"] for name, data in coming if name == "page")


def test_a_page_is_not_sent_again_when_the_same_was_read_again(admin: Reader) -> None:
    page = admin.get("schedules").text
    version = page.split('data-version="')[1].partition('"')[0]
    with admin.client.stream("GET", "live", params={"page": "schedules", "seen": version}) as answer:
        (first, one), (second, other) = islice(frames(answer), 2)
    assert (first, second) == ("read", "read")
    assert one["at"] < other["at"]


def test_while_the_database_is_away_a_page_says_so_and_comes_back(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url) as served, Reader(served.base_url + "/") as reading:
        reading.log_in("admin", TOKEN)
        assert "What is wrong" in reading.get("").text
        name = asyncio.run(name_of(url))
        with reading.client.stream("GET", "live", params={"page": ""}) as answer:
            coming = frames(answer)
            next(coming)
            asyncio.run(databases.execute(f'alter database "{name}" allow_connections false'))
            asyncio.run(databases.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"))
            assert any(kind == "page" and "this is old" in data["html"] for kind, data in coming)
            never_read = reading.get("topics")
            assert never_read.status_code == 503 and "data-retry" in never_read.text
            assert reading.post("types/absent/pause").status_code == 503
            asyncio.run(databases.execute(f'alter database "{name}" allow_connections true'))
            assert any(kind == "page" and "this is old" not in data["html"] for kind, data in coming)


async def name_of(url: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval("select current_database()"))
    finally:
        await connection.close()


async def test_a_statement_of_the_poller_cannot_write_and_ends_in_time(dashboard: Served) -> None:
    async with Penstock(dashboard.database_url) as app:
        database = (await app.database()).beside(app.settings, "test", ReadOnlyDatabase)
        await database.open()
        with pytest.raises(DatabaseUnavailable, match="read-only"):
            await database.fetch("select penstock.begin_change('a', 'b', '{}')")
        with pytest.raises(DatabaseUnavailable, match="cancelled after 2 s"):
            await database.fetch("select pg_sleep(60)")
        assert await database.fetchval("select 1") == 1
        with pytest.raises(PenstockError):
            await database.fetch("create table public.mine ()")
        await database.close()


async def test_slow_searches_of_one_user_do_not_keep_another_from_reading(url: str) -> None:
    async with Penstock(url) as app:
        readings = poller.Poller(app)
        greedy = [asyncio.create_task(readings.read(slept, 1.9 + number / 1000, user="greedy")) for number in range(30)]
        await asyncio.sleep(0)
        for number in range(13):
            assert (await readings.read(number_of, number, user="other"))[0].value == number
        assert not all(task.done() for task in greedy), "all searches were awaited first"
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        assert (await readings.read(number_of, 14, user="greedy"))[0].value == 14
        await readings.close()
