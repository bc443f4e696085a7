"""The server as a process: several processes, shutdown, timeouts, a database that goes away."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from penstock.testing import TemporaryDatabases
from tests.chaos.proxy import Proxy
from tests.http.http_calls import claim, put, until_waiting
from tests.http.http_server import TOKEN, Served, free_port, served_until_killed, serving
from tests.waiting import eventually

TYPE = {"name": "echo", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
AUTH = httpx.BasicAuth("admin", TOKEN)


def test_several_processes_are_one_server(url: str) -> None:
    with serving(url, "--processes", "2") as served, served.client() as client:
        client.post("/v1/jobs", json=TYPE)
        for _ in range(40):
            # A connection of its own for each, so that both processes get some.
            with served.client() as other:
                put(other, "echo")

        def total() -> float:
            found = re.search(r'^penstock_jobs_enqueued_total\{.*type="echo".*\} (\S+)', client.get("/metrics").text, re.M)
            return float(found[1]) if found else 0.0

        assert total() == 40
        assert client.get("/v1/jobs/echo/stats").json()["ready"] == 40


def test_no_process_outlives_the_one_that_started_it(url: str) -> None:
    with served_until_killed(url, "--processes", "2") as served, served.client() as client:
        client.get("/readyz")
        served.process.kill()
        # What its children hold open is closed when they end.
        served.output.read()


def test_a_long_poll_does_not_hold_up_the_shutdown(url: str) -> None:
    with serving(url) as served, served.client() as client:
        client.post("/v1/jobs", json=TYPE)
        id = put(client, "echo", run_after="2036-01-01T00:00:00Z")["id"]
        answers: list[Any] = []
        calls = [
            lambda: answers.append(claim(client, "echo", wait="250s")),
            lambda: answers.append(client.get(f"/v1/jobs/{id}?wait=250s").json()["status"]),
        ]
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        until_waiting(client, 2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
        for thread in threads:
            thread.join(60)
        assert sorted(map(str, answers)) == ["[]", "queued"]


def raw(served: Served, request: bytes) -> tuple[int, bytes]:
    """Send bytes, and return the status and the body of the answer."""
    host, port = served.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        return answer.status, answer.read()


AUTHORIZATION = b"Authorization: Bearer admin." + TOKEN.encode() + b"\r\n"


def test_a_body_that_is_announced_too_large_is_refused_before_it_is_read(served: Served) -> None:
    head = b"PUT /v1/jobs/echo/random_id HTTP/1.1\r\nHost: x\r\nContent-Length: 900000000\r\n" + AUTHORIZATION + b"\r\n"
    status, body = raw(served, head)
    assert status == 413
    assert b"entity_too_large" in body


def test_a_body_without_a_length_is_refused_where_it_becomes_too_large(served: Served) -> None:
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + AUTHORIZATION + b"\r\n"
    assert raw(served, head + chunk * 17)[0] == 413


def test_a_body_that_does_not_come_is_not_waited_for(url: str) -> None:
    with serving(url, PENSTOCK_HTTP_BODY_TIMEOUT="0.5") as served:
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n" + AUTHORIZATION + b"\r\n{"
        status, body = raw(served, head)
        assert status == 408
        assert b"request_timeout" in body


def test_a_request_id_is_kept_or_made(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(client.get("/healthz", headers={"X-Request-Id": "a b"}).headers["x-request-id"]) == 16


def test_the_id_of_a_failed_request_is_in_the_log(url: str) -> None:
    with serving(url, "--log-format", "json") as served, served.client() as client:
        client.get("/v1/jobs", headers={"X-Request-Id": "find-me"}, auth=("nobody", "x"))
        assert served.line_with('"request_id": "find-me"')


def test_the_home_page_shows_a_dashboard_of_ones_own(url: str) -> None:
    environment = {"HOMEPAGE_TITLE": "Jobs <3", "HOMEPAGE_IFRAME_URL": "https://dashboards.example.com/?a=1&b=2"}
    with serving(url, **environment) as served, served.client() as client:
        page = client.get("/home").text
        assert "<title>Jobs &lt;3</title>" in page
        assert 'src="https://dashboards.example.com/?a=1&amp;b=2"' in page


def test_unencrypted_proxy_traffic_can_be_allowed(url: str) -> None:
    with serving(url, ALLOW_UNENCRYPTED_PROXY_TRAFFIC="true") as served, served.client() as client:
        assert client.get("/v1/jobs", headers={"X-Forwarded-Proto": "http"}).status_code == 200


def test_every_request_is_logged_when_that_is_wanted(url: str) -> None:
    with serving(url, "--log-format", "json", PENSTOCK_HTTP_LOG_REQUESTS="true") as served, served.client() as client:
        client.post("/v1/jobs", json=TYPE, headers={"X-Request-Id": "find-me"})
        said = {"event": "request", "method": "POST", "path": "/v1/jobs", "status": 201, "user": "admin"}
        assert said.items() <= json.loads(served.line_with("find-me")).items()


OURS = """
import uvicorn
from penstock.http import Credentials, Principal, Refused, Role, create_app

class Ours:
    async def authorize(self, credentials: Credentials | None) -> Principal:
        if credentials is None or credentials.secret != "open sesame":
            raise Refused
        return Principal(credentials.user, Role.READ)

uvicorn.run(create_app(authorizer=Ours()), port={port}, lifespan="on", log_level="warning")
"""


async def test_a_server_of_ones_own_with_an_authorizer_of_ones_own(url: str) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", OURS.replace("{port}", str(port))], env={**os.environ, "PENSTOCK_DATABASE_URL": url}
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", auth=("ali", "open sesame"), timeout=20) as client:

            def up() -> bool:
                with suppress(httpx.TransportError):
                    return client.get("/readyz").status_code == 200
                return False

            await eventually(up, "the server")
            assert client.get("/v1/jobs").status_code == 200
            assert client.post("/v1/jobs", json=TYPE).status_code == 403
            assert client.get("/v1/jobs", auth=("ali", "x")).status_code == 403
    finally:
        process.terminate()
        process.wait(30)


async def test_the_server_comes_back_with_its_database(url: str, sql: Any) -> None:
    with serving(url) as served, served.client() as client:
        client.post("/v1/jobs", json=TYPE)
        name = await sql.fetchval("select current_database()")
        for _ in range(5):
            put(client, "echo")
            await sql.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()", name
            )
            # An enqueue may be repeated, and a lost connection is no reason to refuse it.
            answer = client.put("/v1/jobs/echo/random_id", json={"data": 1})
            assert answer.status_code == 202, answer.text + served.log.read_text()
        await eventually(lambda: client.get("/readyz").status_code == 200, "readiness")


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/echo/random_id"])
async def test_without_a_database_the_answer_is_503(databases: TemporaryDatabases, path: str) -> None:
    with databases.database() as url, serving(url, PENSTOCK_CONNECT_TIMEOUT="1") as served, served.client() as client:
        client.post("/v1/jobs", json=TYPE)
        name = urlsplit(url).path[1:]
        sql = await asyncpg.connect(databases.server_url)
        try:
            await sql.execute(f'alter database "{name}" allow_connections false')
            await sql.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name)
            response = client.request("PUT" if "random" in path else "GET", path, json={"data": 1})
            assert (response.status_code, response.json()["id"]) == (503, "service_unavailable")
            assert response.headers["retry-after"] == "1"
            assert name not in response.text
            assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 200
            await sql.execute(f'alter database "{name}" allow_connections true')
            await eventually(lambda: client.get("/readyz").status_code == 200, "readiness")
        finally:
            await sql.close()


async def test_probes_and_scrapes_are_answered_while_the_database_hangs(url: str) -> None:
    """Connections stay open, and nothing comes back: no call ends, and neither does its cancellation."""
    stack = ExitStack()
    async with Proxy(url) as proxy:
        # The proxy needs the loop while the server starts, and while it stops.
        served = await asyncio.to_thread(stack.enter_context, serving(proxy.url, PENSTOCK_COMMAND_TIMEOUT="3600"))
        try:
            client = stack.enter_context(served.client())
            client.timeout = httpx.Timeout(120)

            async def get(path: str) -> httpx.Response:
                return await asyncio.to_thread(client.get, path)

            assert (await get("/readyz")).status_code == 200
            assert "penstock_database_up 1.0" in (await get("/metrics")).text
            proxy.cut()
            ready, alive, shown, examined = await asyncio.gather(*map(get, ("/readyz", "/healthz", "/metrics", "/v1/doctor")))
            assert (ready.status_code, alive.status_code, shown.status_code, examined.status_code) == (503, 200, 200, 503)
            assert "penstock_database_up 0.0" in shown.text
            proxy.mend()

            async def back() -> bool:
                return (await get("/readyz")).status_code == 200

            await eventually(back, "readiness", timeout=60)
        finally:
            await asyncio.to_thread(stack.close)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_signal_at_any_moment_of_the_start_ends_the_server(url: str, processes: str) -> None:
    for pause in (0.0, 0.05, 0.2):
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "server", "--port", "0", "--processes", processes],
            env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_HTTP_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert "listening" in process.stdout.readline()
            time.sleep(pause)  # any moment is good
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()


async def test_a_server_without_its_database_shows_that(databases: TemporaryDatabases) -> None:
    with databases.database() as url, serving(url) as served, served.client() as client:
        assert re.search(r"^penstock_database_up 1\.0$", client.get("/metrics").text, re.M)
        name = urlsplit(url).path[1:]
        sql = await asyncpg.connect(databases.server_url)
        try:
            await sql.execute(f"alter database {name} with allow_connections false")
            await sql.fetch("select pg_terminate_backend(pid) from pg_stat_activity where datname = $1", name)
            answer = await asyncio.to_thread(client.get, "/metrics")
            assert answer.status_code == 200
            assert re.search(r"^penstock_database_up 0\.0$", answer.text, re.M)
            assert re.search(r"^penstock_loop_lag_seconds_count \d", answer.text, re.M)
        finally:
            await sql.execute(f"alter database {name} with allow_connections true")
            await sql.close()
