"""Server processes for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

TOKEN = "t0ken-of-the-tests"


class Served:
    """A server process."""

    def __init__(self, process: subprocess.Popen[str], base_url: str, database_url: str, log: Path, said: str) -> None:
        self.process = process
        self.base_url = base_url
        self.database_url = database_url
        self.log = log
        self.said = said

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=30, **({"auth": ("admin", TOKEN)} | options))


@contextmanager
def serving(database_url: str, *arguments: str, token: str | None = TOKEN, **environment: str) -> Iterator[Served]:
    """A server on a free port; it must end with 0 when it is told to stop."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = {**os.environ, "PENSTOCK_DATABASE_URL": database_url, **environment}
        if token is not None:
            env["PENSTOCK_HTTP_TOKEN"] = token
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "server", "--port", "0", *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        assert process.stdout is not None
        try:
            said = ""
            for line in process.stdout:
                said += line
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                pytest.fail(f"the server did not start: {said}{log.read_text()}")
            served = Served(process, found[1], database_url, log, said)
            with httpx.Client(base_url=served.base_url, transport=httpx.HTTPTransport(retries=10)) as client:
                assert client.get("/healthz").text == "ok\n"
            yield served
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
