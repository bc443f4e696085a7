"""The HTTP API and the downstream worker, each as a process of its own, on one embedded PostgreSQL (fsync on).

    .venv/bin/python -m benchmarks.http                  # everything
    .venv/bin/python -m benchmarks.http --only put       # one of put, drain; put needs wrk (apt-get install wrk)

The downstream service takes a job, answers 202 and calls back at once. It is written on a bare protocol, so that what is
measured is Penstock.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import psutil

from benchmarks.environments import ON_DISK
from penstock.testing import TemporaryDatabases

TOKEN = "token-of-the-benchmark"
LUA = """
wrk.method = "PUT"
wrk.body = '{"data": {"user-agent": "boom"}}'
wrk.headers["Authorization"] = "Bearer admin.token-of-the-benchmark"
"""


@contextmanager
def running(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line that it says."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.terminate()
        process.wait(30)


@contextmanager
def server(url: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    arguments = ("penstock", "server", "--port", "0")
    with running(*arguments, PENSTOCK_DATABASE_URL=url, PENSTOCK_HTTP_TOKEN=TOKEN) as (process, said):
        found = re.search(r"http://\S+", said)
        assert found is not None, said
        with httpx.Client(base_url=found[0], auth=("admin", TOKEN), timeout=60) as client:
            yield process, client


def peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def cpu_ms(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system) * 1000


def make_type(client: httpx.Client, name: str, concurrency: int) -> None:
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": concurrency}
    client.post("/v1/jobs", json=body).raise_for_status()


def put(url: str, seconds: int) -> None:
    with server(url) as (process, client), tempfile.TemporaryDirectory() as folder:
        make_type(client, "echo", 5)
        script = Path(folder) / "put.lua"
        script.write_text(LUA)
        idle = peak_mb(process.pid)
        command = ["wrk", "-t1", "-c50", f"-d{seconds}s", "--latency", "-s", str(script)]
        said = subprocess.run(
            [*command, f"{client.base_url}/v1/jobs/echo/random_id"], capture_output=True, text=True, check=True
        ).stdout
        rate, p50, p99 = (re.search(rf"{name}\s+(\S+)", said) for name in ("Requests/sec:", "50%", "99%"))
        errors = re.search(r"Non-2xx.*|Socket errors.*", said)
        assert rate and p50 and p99
        wrong = errors[0] if errors else ""
        print(f"PUT, 50 connections, 1 process: {float(rate[1]):8.0f}/s   p50 {p50[1]}  p99 {p99[1]}   {wrong}")
        print(f"  memory of the server: {idle:.0f} MB idle, {peak_mb(process.pid):.0f} MB at the peak")
        ready = client.get("/v1/jobs/echo/stats").json()["ready"]
        print(f"  jobs in the queue: {ready:,}; processor time of the server in ms a job: {cpu_ms(process.pid) / ready:.3f}")


def drain(url: str, concurrency: int, jobs: int) -> None:
    with server(url) as (process, client):
        name = f"drain-{concurrency}"
        make_type(client, name, concurrency)
        lines = "".join(f'{{"data": {{"n": {n}}}}}\n' for n in range(jobs))
        client.post(f"/v1/jobs/{name}/batch", content=lines).raise_for_status()
        with running("benchmarks.http", "--service", str(client.base_url)) as (service, port):
            environment = {
                "PENSTOCK_DATABASE_URL": url,
                "DOWNSTREAM_URL": f"http://127.0.0.1:{port.strip()}",
                "DOWNSTREAM_WORKER_AUTH": "x",
                "HTTP_MAX_IDLE_CONNS": str(max(100, concurrency)),
            }
            started = time.perf_counter()
            with running("penstock", "dequeue", **environment) as (dequeuer, _):
                first: float | None = None
                while True:
                    stats = client.get(f"/v1/jobs/{name}/stats").json()
                    left = stats["ready"] + stats["in_progress"] + stats["deferred"]
                    if first is None and left < jobs:
                        first, done_then = time.perf_counter(), jobs - left
                    if left == 0:
                        break
                    if time.perf_counter() - started > 300:
                        sys.exit(f"not drained in 300 s: {stats}")
                    time.sleep(0.1)
                assert first is not None
                took = time.perf_counter() - first
                used = {"dequeuer": dequeuer, "server": process, "service": service}
                print(
                    f"drain, concurrency {concurrency:3}: {(jobs - done_then) / took:8.0f} jobs/s"
                    f"   memory: dequeuer {peak_mb(dequeuer.pid):.0f} MB, server {peak_mb(process.pid):.0f} MB"
                )
                shares = ", ".join(f"{name} {cpu_ms(of.pid) / jobs:.2f}" for name, of in used.items())
                print(f"  processor time in ms a job: {shares}")


class Service(asyncio.Protocol):
    """The downstream service: one connection from the dequeuer."""

    calls: CallBacks

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            path = head.split(b" ", 2)[1]
            attempt = body.rpartition(b'"attempts":')[2].rstrip(b"}")
            self.transport.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}")
            self.calls.put(path, attempt)


class CallBacks:
    """Connections to Penstock, one request at a time on each."""

    def __init__(self, host: str, port: int) -> None:
        self.address = (host, port)
        self.waiting: deque[tuple[bytes, bytes]] = deque()
        self.idle: list[asyncio.Transport] = []

    async def open(self, connections: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(connections):
            await loop.create_connection(lambda: CallBack(self), *self.address)

    def put(self, path: bytes, attempt: bytes) -> None:
        self.waiting.append((path, attempt))
        if self.idle:
            self.send(self.idle.pop())

    def send(self, transport: asyncio.Transport) -> None:
        if not self.waiting:
            self.idle.append(transport)
            return
        path, attempt = self.waiting.popleft()
        body = b'{"status":"succeeded","attempt":' + attempt + b"}"
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer admin.%s\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % (path, TOKEN.encode(), len(body)) + body)


class CallBack(asyncio.Protocol):
    """One connection to Penstock."""

    def __init__(self, calls: CallBacks) -> None:
        self.calls = calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.calls.send(self.transport)

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            sys.stderr.write(data.decode()[:300])
        self.calls.send(self.transport)


async def serve(penstock: str) -> None:
    host, port = penstock.removeprefix("http://").rstrip("/").split(":")
    Service.calls = CallBacks(host, int(port))
    await Service.calls.open(100)
    listening = await asyncio.get_running_loop().create_server(Service, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["put", "drain"])
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--service", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.service:
        import uvloop

        uvloop.run(serve(given.service))
        return
    with TemporaryDatabases(parent=ON_DISK) as databases:
        if given.only in (None, "put"):
            with databases.database() as url:
                put(url, given.seconds)
        if given.only in (None, "drain"):
            for concurrency in (50, 300):
                with databases.database() as url:
                    drain(url, concurrency, given.jobs)


if __name__ == "__main__":
    main()
