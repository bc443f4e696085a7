"""A real gearmand, and the real command line tool as client and worker."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import gear
import pytest

from penstock import Penstock
from penstock.integrations.gearman.bridge import Bridge
from penstock.integrations.gearman.wire import Server
from tests.debian import find, missing
from tests.waiting import eventually

WITHOUT_GEARMAN = missing("gearmand", "gearman")


class Gearmand:
    """A gearmand on a port of its own, which can be killed and started again."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.server = Server("127.0.0.1", self.port)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(find("gearmand")), "-L", "127.0.0.1", "-p", str(self.port), "--log-file", "none"]
        command += ["--user", "nobody"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def command(self, *arguments: str) -> list[str]:
        return [str(find("gearman")), "-h", "127.0.0.1", "-p", str(self.port), *arguments]

    def worker(self, function: str, *command: str) -> subprocess.Popen[bytes]:
        """The command line tool as a worker that runs a program for each job, which gets the payload on its standard input."""
        return subprocess.Popen(
            self.command("-w", "-f", function, *(("--", *command) if command else ())), stdout=subprocess.PIPE
        )

    async def client(self, function: str, payload: str, *options: str, timeout_s: float = 30) -> tuple[int, str]:
        """The command line tool as a client: its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            *self.command("-f", function, "-t", str(int(timeout_s * 1000)), *options, payload),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    def status(self) -> dict[str, list[int]]:
        """For each function: jobs in all, running, and workers."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as admin:
            admin.sendall(b"status\n")
            text = b""
            while not text.endswith(b".\n"):
                text += admin.recv(4096)
        return {line.split("\t")[0]: [int(n) for n in line.split("\t")[1:]] for line in text.decode().splitlines()[:-1]}

    def workers_of(self, function: str) -> int:
        try:
            return self.status().get(function, [0, 0, 0])[2]
        except OSError:
            return 0


class _Prompt(gear.Worker):  # type: ignore[misc]
    """gear's worker without Nagle's algorithm, which costs 40 ms a job."""

    def _onConnect(self, conn: Any) -> None:
        conn.conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super()._onConnect(conn)


class Echo:
    """A worker of gear's own, which answers each job with its payload and keeps what it was given."""

    def __init__(self, gearmand: Gearmand, *functions: str) -> None:
        self.given: list[tuple[str, bytes]] = []
        self._worker = _Prompt("echo")
        self._worker.addServer("127.0.0.1", gearmand.port)
        for function in functions:
            self._worker.registerFunction(function)
        self._thread = threading.Thread(target=self._work, name="echo")
        self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                job = self._worker.getJob()
            except gear.InterruptedError:
                return
            self.given.append((job.name, job.arguments))
            job.sendWorkComplete(job.arguments)

    def close(self) -> None:
        self._worker.stopWaitingForJobs()
        self._thread.join(10)
        self._worker.shutdown()


@contextmanager
def echoing(gearmand: Gearmand, *functions: str) -> Iterator[Echo]:
    echo = Echo(gearmand, *functions)
    try:
        yield echo
    finally:
        echo.close()


@pytest.fixture
def gearmand() -> Iterator[Gearmand]:
    server = Gearmand()
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def bridging(url: str, gearmand: Gearmand, **options: Any) -> AsyncIterator[Bridge]:
    """A bridge in this process, ready for jobs."""
    async with Penstock(url) as app:
        bridge = Bridge(app, [gearmand.server], **{"timeout": timedelta(seconds=3), **options})
        running = asyncio.create_task(bridge.run())
        await eventually(lambda: gearmand.workers_of("fanout") > 0 or running.done(), "the bridge")
        yield bridge
        bridge.stop()
        await running


class Caller:
    """gear's own client, which receives exceptions."""

    def __init__(self, gearmand: Gearmand) -> None:
        self._client = gear.Client("test")
        self._client.setOption("exceptions")
        self._client.addServer("127.0.0.1", gearmand.port)

    async def call(self, function: str, arguments: bytes) -> tuple[str, bytes]:
        job = gear.Job(function, arguments)
        await asyncio.to_thread(self._client.waitForServer, 10)
        await asyncio.to_thread(self._client.submitJob, job)
        await eventually(lambda: job.complete, f"the end of {function}")
        if job.failure:
            return "refused", job.exception or b""
        return "complete", b"".join(job.data)

    def close(self) -> None:
        self._client.shutdown()


@pytest.fixture
def caller(gearmand: Gearmand) -> Iterator[Caller]:
    caller = Caller(gearmand)
    yield caller
    caller.close()


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path / "inbox"
