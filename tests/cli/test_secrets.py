"""Errors in every kind of process, with a secret in their messages and local variables: no output shows the secret."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import httpx
import pytest
from aiohttp import web
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from penstock import Penstock
from tests.http.http_server import free_port
from tests.waiting import eventually

SECRET = "s3cret-in-the-payload"
SPANS = """
import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=open(f"spans-{os.getpid()}", "w"))))
trace.set_tracer_provider(provider)
"""
ROOMS = """
import asyncio
import threading
from datetime import timedelta

from pydantic import BaseModel

from penstock import Event, Fail, Job, Penstock

app = Penstock()
OTHER = "s3cret-in-the" + "-payload"


class Order(BaseModel):
    total: int


@app.job("on-loop", max_attempts=1)
async def on_loop(job: Job[dict]) -> None:
    held = job.data
    raise ValueError(f"cannot take {held}")


@app.job("in-thread", max_attempts=1)
def in_thread(job: Job[dict]) -> None:
    threading.Thread(target=explode, args=(job.data,)).start()
    raise KeyError(job.data["card"])


@app.job("in-process", max_attempts=1, executor="process")
def in_process(job: Job[dict]) -> None:
    raise RuntimeError(job.data["card"])


@app.job("gives-up")
async def gives_up(job: Job[dict]) -> None:
    asyncio.create_task(forgotten(job.data))
    raise Fail(f"no such card {job.data}")


@app.job("typed", max_attempts=1)
async def typed(job: Job[Order]) -> None:
    raise AssertionError


@app.job("bad-result", max_attempts=1, keep_result=True)
async def bad_result(job: Job[dict]) -> object:
    return {"card": job.data["card"] + chr(0)}


@app.job("exits", max_attempts=1)
async def exits(job: Job[dict]) -> None:
    raise SystemExit(job.data["card"])


pool = app.pool("keyed", slots=4)


@pool.job
async def keyed(job: Job[dict]) -> None:
    raise ValueError(job.data["card"])


@pool.standing
async def standing(job) -> None:
    raise ValueError(job.data["card"])


@app.stream("events", partitions=1).consumer(group="readers", on_failure="dead-letter")
async def consume(event: Event[dict]) -> None:
    raise ValueError(event.data["card"])


@app.stream("halting", partitions=1).consumer(group="readers", on_failure="halt")
async def halt(event: Event[dict]) -> None:
    raise ValueError(event.data["card"])


@app.topic("news").subscriber("listener", max_attempts=1)
async def listen(job: Job[dict]) -> None:
    raise ValueError(str(job.data))


@app.timer(every=timedelta(seconds=1), as_job=False)
async def tick() -> None:
    card = OTHER
    raise ValueError(card)


async def forgotten(data: dict) -> None:
    raise ValueError(f"forgotten {data}")


def explode(data: dict) -> None:
    raise ValueError(f"in a thread {data}")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rooms.py").write_text(SPANS + ROOMS)
    (tmp_path / "broken.py").write_text(f"card = {SECRET!r}\nraise ValueError(card)\n")
    return tmp_path


def run(url: str, folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_PROCESSES_FOR_HANDLERS": "1", **environment},
        cwd=folder,
        stdout=(folder / "out").open("wb"),
        stderr=(folder / "err").open("wb"),
    )


def output(folder: Path) -> str:
    return (folder / "out").read_text() + (folder / "err").read_text()


def spans(folder: Path) -> str:
    """The spans of all processes."""
    return "".join(path.read_text() for path in folder.glob("spans-*"))


JOBS = ("on-loop", "in-thread", "in-process", "gives-up", "typed", "bad-result", "exits")


@pytest.mark.parametrize(("payloads", "options"), [(False, []), (True, []), (False, ["--processes", "2"])])
async def test_workers_show_no_payload_of_what_fails(
    url: str, folder: Path, app: Penstock, payloads: bool, options: list[str]
) -> None:
    environment = {"PENSTOCK_TRACES": "1", "PENSTOCK_LOG_LEVEL": "debug"} | ({"PENSTOCK_LOG_PAYLOADS": "1"} if payloads else {})
    worker = run(url, folder, "worker", "rooms:app", "--metrics", ":0", *options, **environment)
    try:
        await eventually(lambda: "worker_started" in output(folder), "the start of the worker", 60)
        data = {"card": SECRET}
        for name in JOBS:
            await app.enqueue(name, data)
        pool = app.pool("keyed", slots=4)
        await pool.enqueue("acme", data)
        await pool.start("acme", data)
        await app.stream("events", partitions=1).append(data)
        await app.stream("halting", partitions=1).append(data)
        await app.topic("news").publish(data)

        async def told() -> bool:
            # Everything has failed, and its row says why.
            found = await app.find_many(limit=100)
            ended = {job.name for job in found if job.status.finished and job.errors}
            standing = await database.fetchval("select failures > 0 from penstock.standing_jobs")
            log = output(folder)
            words = ("event_failed", "consumer_halted", "schedule_handler_failed", "standing_job_failed")
            events = all(word in log for word in words)
            return {*JOBS, "news_listener"} <= ended and bool(standing) and events

        database = await app.database()
        await eventually(told, "that all have failed", 90)
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", output(folder))
        failures = re.compile(r'penstock_jobs_settled_total\{outcome="failed",type="([a-z-]+)"\} [1-9]')

        async def shown() -> bool:
            # With several processes, each reports once a second.
            text = httpx.get(address, timeout=60).text
            assert SECRET not in text
            return {*failures.findall(text)} >= {*JOBS} - {"typed"}

        await eventually(shown, "the failures in the metrics", 60)
        worker.send_signal(signal.SIGTERM)
        # A consumer that halted is an error of its worker; the supervisor of several has done what it should.
        assert worker.wait(60) == (0 if options else 1)
    finally:
        worker.kill()
        worker.wait()
    log = output(folder)
    assert all(f"process {name}" in spans(folder) for name in JOBS)
    assert SECRET not in spans(folder)
    assert ("job_failed" in log, "ValueError" in log) == (True, True)
    assert (SECRET in log) is payloads, [line for line in log.splitlines() if SECRET in line]


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "broken:app"],
        ["worker", "broken:app", "--processes", "2"],
        ["server"],
        ["jobs", "list", "--json"],
        ["gearman", "--server", "nonsense"],
        ["dequeue", "--downstream-url", f"http://jobs:{SECRET}@"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_commands_that_fail_show_no_password(folder: Path, arguments: list[str]) -> None:
    # A URL that asyncpg cannot read, with a password in it.
    done = run(
        f"postgresql://someone:{SECRET}@127.0.0.1:1/none?sslmode={SECRET}", folder, *arguments, PENSTOCK_START_TIMEOUT="0.2",
        PENSTOCK_CONNECT_TIMEOUT="1",
    )  # fmt: skip
    try:
        assert done.wait(60) in (1, 2, 3)
    finally:
        done.kill()
        done.wait()
    assert output(folder).strip()
    assert SECRET not in output(folder)


SERVER = """
import sys
import uvicorn
from penstock.http import create_app


class Broken:
    async def authorize(self, credentials):
        password = credentials.secret
        raise RuntimeError(f"cannot check {password}")


uvicorn.run(create_app(authorizer=Broken()), port=int(sys.argv[1]), log_config=None)
"""


async def test_a_server_that_fails_shows_no_credential(url: str, folder: Path) -> None:
    """This holds in an application without a configuration of logs too: structlog's default shows local variables."""
    port = free_port()
    (folder / "served.py").write_text(SERVER)
    process = subprocess.Popen(
        [sys.executable, "served.py", str(port)],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "DEBUG_HTTP_TRAFFIC": "true"},
        cwd=folder, stdout=(folder / "out").open("wb"), stderr=(folder / "err").open("wb"),
    )  # fmt: skip
    basic = base64.b64encode(f"admin:{SECRET}".encode()).decode()
    bearer = base64.urlsafe_b64encode(f"admin.{SECRET}".encode()).decode().rstrip("=")
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

            async def answers() -> bool:
                try:
                    return (await client.get("/healthz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers, "the server", 60)
            credentials = [
                {"Authorization": f"Basic {basic}"}, {"Authorization": f"Bearer admin.{SECRET}"},
                {"Authorization": f"Basic {basic}", "Cookie": f"session={SECRET}", "X-Api-Key": SECRET,
                 "Sec-WebSocket-Protocol": f"penstock, penstock.bearer.{bearer}", "X-Amz-Security-Token": SECRET},
            ]  # fmt: skip
            for headers in credentials:
                for method, path in (
                    ("GET", "/v1/jobs"),
                    ("PUT", "/v1/jobs/a/random_id"),
                    ("GET", "/v1/streams/a/events/follow"),
                ):
                    assert (await client.request(method, path, headers=headers)).status_code == 500
            for options in ({"additional_headers": credentials[0]}, {"subprotocols": ["penstock", f"penstock.bearer.{bearer}"]}):
                with pytest.raises(WebSocketException):
                    async with connect(f"ws://127.0.0.1:{port}/v1/topics/a/deliveries", **options):  # type: ignore[arg-type]
                        pass
    finally:
        process.kill()
        process.wait()
    log = output(folder)
    assert log.count("RuntimeError") >= 11, log
    for secret in (SECRET, basic, bearer):
        assert secret not in log


BUSY_SERVER = (
    SPANS
    + """
import sys

import uvicorn

from penstock.core import logs
from penstock.http import create_app

logs.configure("json")
uvicorn.run(create_app(), port=int(sys.argv[1]), log_config=None)
"""
)


async def test_a_server_shows_no_payload_and_no_token_in_metrics_spans_or_log(url: str, folder: Path) -> None:
    port, token = free_port(), f"t0ken-{SECRET}"
    (folder / "served.py").write_text(BUSY_SERVER)
    environment = {
        "PENSTOCK_DATABASE_URL": url,
        "PENSTOCK_HTTP_TOKEN": token,
        "PENSTOCK_TRACES": "1",
        "PENSTOCK_LOG_LEVEL": "debug",
    }
    process = subprocess.Popen(
        [sys.executable, "served.py", str(port)],
        env={**os.environ, **environment}, cwd=folder, stdout=(folder / "out").open("wb"), stderr=(folder / "err").open("wb"),
    )  # fmt: skip
    kind = {"name": "mail", "delivery_strategy": "at_least_once", "attempts": 1, "concurrency": 5}
    job, stream, data = f"/v1/jobs/mail/{uuid4()}", f"/v1/streams/orders-{uuid4()}", {"card": SECRET}
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, auth=("admin", token)) as client:

            async def answers() -> bool:
                assert process.poll() is None, output(folder)
                try:
                    return (await client.get("/healthz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(answers, "the server", 60)
            done = [
                await client.request(method, path, json=body, params=query)
                for method, path, body, query in (
                    ("POST", "/v1/jobs", kind, {}),
                    ("PUT", job, {"data": data, "unique": SECRET, "key": SECRET}, {}),
                    ("POST", "/v1/streams", {"name": stream.rpartition("/")[2], "partitions": 1}, {}),
                    ("POST", f"{stream}/events", {"data": data, "key": SECRET, "headers": {"card": SECRET}}, {}),
                    ("POST", "/v1/jobs/mail/claim", {"worker": "w", "limit": 1}, {}),
                )
            ]
            assert [answer.text for answer in done if answer.status_code >= 300] == []
            (claimed,) = done[-1].json()["jobs"]
            error = {"type": "ValueError", "message": SECRET}
            held = {name: claimed[name] for name in ("id", "attempt", "lease")}
            settled = await client.post(
                "/v1/jobs/mail/settle", json={"jobs": [{**held, "outcome": "failed-for-good", "detail": error, "error": error}]}
            )
            refused = [
                settled,
                await client.put(f"/v1/jobs/mail/{SECRET}", json={"data": 1}),
                await client.put(job, content=f'{{"data": "{SECRET}'),
                await client.put(job, json={"data": 1, "run_after": SECRET, SECRET: 1}),
                await client.get(f"/nothing/{SECRET}", params={"card": SECRET}),
                await client.get("/v1/jobs", auth=("admin", f"{token}-wrong"), headers={"Cookie": SECRET}),
            ]
            assert [answer.status_code for answer in refused[1:]] == [400, 400, 400, 404, 403]
            metrics = (await client.get("/metrics")).text
    finally:
        process.terminate()
        process.wait(60)
    assert 'penstock_jobs_enqueued_total{outcome="queued",type="mail"} 1.0' in metrics
    assert "penstock_http_refused_logins_total 1.0" in metrics
    # A server makes no spans, also not those of FastAPI, which have paths and queries: it gives the contexts of its clients on.
    assert [path.name for path in folder.glob("spans-*")]
    for shown in (metrics, spans(folder), output(folder)):
        assert SECRET not in shown, [line for line in shown.splitlines() if SECRET in line]
    assert output(folder).strip()


async def test_the_log_of_the_embedded_server_quotes_no_values(tmp_path: Path) -> None:
    async with Penstock(data_dir=tmp_path / "data") as app:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(await app.start_server())
        for statement in (
            f"select '{SECRET}'::integer",
            f"do $$ begin raise '%', '{SECRET}'; end $$",
            f'select * from "{SECRET}"',
        ):
            with pytest.raises(asyncpg.PostgresError):
                await connection.execute(statement)
        await connection.close()
    logs = list(tmp_path.rglob("postgres.log"))
    assert logs
    assert all(SECRET not in log.read_text() for log in logs)


async def _misbehave(request: web.Request) -> web.Response:
    """A service that fails in many ways, each with what it was sent."""
    told = await request.text()
    act = (await request.json())["act"]
    if act == "break":
        assert request.transport is not None
        request.transport.abort()
    if act == "raise":
        return web.Response(status=500, text=f"Traceback: {told} {request.headers}")
    if act == "refuse":
        return web.json_response({"title": told, "id": "x", "detail": told, "retryable": False}, status=400)
    return web.Response(status=200 if act == "odd" else 302, text=told, headers={"Location": f"http://127.0.0.1:1/{SECRET}"})


async def test_a_dequeuer_shows_neither_payloads_nor_its_password(url: str, folder: Path, app: Penstock, sql: Any) -> None:
    service = web.Application()
    service.router.add_route("*", "/{path:.*}", _misbehave)
    runner = web.AppRunner(service)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    await sql.execute('select penstock.create_job_type(\'ship\', \'{"max_attempts": 1, "time_limit": "3 seconds"}\')')
    acts = ("break", "raise", "refuse", "away")
    for act in acts:
        await app.enqueue("ship", {"act": act, "card": SECRET})
    password = "s3cret-of-the-service"
    dequeuer = run(
        url, folder, "dequeue", "--metrics", ":0", PENSTOCK_LOG_LEVEL="debug", DOWNSTREAM_URL=f"http://user:{password}@127.0.0.1:{port}",
        DOWNSTREAM_WORKER_AUTH=password, PENSTOCK_DOWNSTREAM_TIMEOUT_S="2",
    )  # fmt: skip
    try:
        failed = "select count(*) from penstock.archived_jobs where status = 'failed'"

        async def all_failed() -> bool:
            assert dequeuer.poll() is None, output(folder)
            return bool(await sql.fetchval(failed) == len(acts))

        await eventually(all_failed, "every job fails", 60)
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", output(folder))
        counted = 'penstock_jobs_settled_total{outcome="failed",type="ship"} 4.0'
        await eventually(lambda: counted in httpx.get(address, timeout=60).text, "the failures in its metrics")
        metrics = httpx.get(address, timeout=60).text
        assert httpx.get(address.replace("metrics", "readyz"), timeout=60).text == "ready\n"
    finally:
        dequeuer.send_signal(signal.SIGTERM)
        dequeuer.wait(60)
        await runner.cleanup()
    said = output(folder)
    assert "job_failed" in said, said
    for secret in (SECRET, password, base64.b64encode(f"user:{password}".encode()).decode()):
        assert secret not in said, said
        assert secret not in metrics
