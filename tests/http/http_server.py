"""Server processes for tests."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest

from tests.command_line import Command
from tests.plain_http import NO_CERTIFICATES

TOKEN = "t0ken-of-the-tests"
# Most of the start of a server are its imports. Tests of the start itself (test_server.py) have processes that make them.
IMPORTED = ("penstock.http.server", "uvicorn", "httptools", "websockets")


def free_port() -> int:
    """A port that nothing listens on, below those that outgoing connections take while a server is down."""
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


class Served:
    """A server process, forked from one that has made its imports."""

    def __init__(self, process: Command, base_url: str, database_url: str, log: Path, output: TextIO, said: str) -> None:
        self.process = process
        self.base_url = base_url
        self.database_url = database_url
        self.log = log
        self.output = output
        self.said = said

    def line_with(self, words: str) -> str:
        """The first line of its log with these words; it may be written after the answer."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for line in self.log.read_text().splitlines(keepends=True):
                if words in line and line.endswith("\n"):
                    return line
            time.sleep(0.02)
        pytest.fail(f"the server did not log {words!r}: {self.log.read_text()}")

    def client(self, **options: Any) -> httpx.Client:
        options = {"auth": ("admin", TOKEN)} | options
        return httpx.Client(base_url=self.base_url, timeout=30, verify=NO_CERTIFICATES, **options)


@contextmanager
def serving(
    database_url: str, *arguments: str, token: str | None = TOKEN, command: Sequence[str] = ("server",), **environment: str
) -> Iterator[Served]:
    """A server on a free port; it must end with 0 when it is told to stop."""
    with served_until_killed(database_url, *arguments, token=token, command=command, **environment) as served:
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


@contextmanager
def served_until_killed(
    database_url: str, *arguments: str, token: str | None = TOKEN, command: Sequence[str] = ("server",), **environment: str
) -> Iterator[Served]:
    """A server on a free port; it is killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder) / "log", Path(folder) / "out"
        os.mkfifo(out)
        variables = {"PENSTOCK_DATABASE_URL": database_url, **environment}
        if token is not None:
            variables["PENSTOCK_HTTP_TOKEN"] = token
        words = [*command, *([] if "--port" in arguments else ["--port", "0"]), *arguments]
        files = (Path(os.devnull), out, log)
        with Command(*words, files=files, cwd=None, environment=variables, modules=IMPORTED) as process, out.open() as output:
            said = ""
            for line in output:
                said += line
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                pytest.fail(f"the server did not start: {said}{log.read_text()}")
            served = Served(process, found[1], database_url, log, output, said)
            transport = httpx.HTTPTransport(retries=10, verify=NO_CERTIFICATES)
            with httpx.Client(base_url=served.base_url, transport=transport, timeout=60) as client:
                assert client.get("/healthz").text == "ok\n"
            yield served
            process.kill()
            process.wait(60)
            # What its children hold open is closed when they end.
            output.read()
