"""How workers stop: signals to one process, to its group, and handlers that do not want to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.command_line import penstock

STUBBORN = """
import asyncio, time
from penstock import Job, Penstock
app = Penstock()

@app.job("waits")
async def waits(job: Job[int]) -> None:
    print("began", flush=True)
    await asyncio.sleep(3600)

@app.job("blocks")
def blocks(job: Job[int]) -> None:
    print("began", flush=True)
    time.sleep(3600)

@app.job("swallows")
async def swallows(job: Job[int]) -> None:
    print("began", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass
"""


def start(url: str, folder: Path, *arguments: str, command: str = "worker") -> subprocess.Popen[str]:
    (folder / "shop.py").write_text(STUBBORN)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", command, "shop:app", *arguments],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PENSTOCK_SHUTDOWN_GRACE": "3600", "PYTHONUNBUFFERED": "1"},
        cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def lines_of(worker: subprocess.Popen[str]) -> Iterator[str]:
    assert worker.stdout is not None
    return iter(worker.stdout)


def status(url: str, id: str) -> str:
    return str(json.loads(penstock(url, "jobs", "show", id, "--json").stdout)["status"])


@pytest.mark.parametrize("handler", ["blocks", "swallows"])
def test_a_second_signal_ends_the_process_whatever_its_handlers_do(url: str, tmp_path: Path, handler: str) -> None:
    worker = start(url, tmp_path)
    try:
        lines = lines_of(worker)
        next(line for line in lines if "worker_started" in line)
        id = json.loads(penstock(url, "enqueue", handler, "1", "--json").stdout)["id"]
        next(line for line in lines if "began" in line)
        worker.send_signal(signal.SIGTERM)
        next(line for line in lines if "worker_stopping" in line)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
        assert status(url, id) == "queued"
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_counts_once(url: str, tmp_path: Path, number: signal.Signals) -> None:
    supervisor = start(url, tmp_path, "--processes", "2")
    try:
        lines = lines_of(supervisor)
        for _ in range(2):
            next(line for line in lines if "worker_started" in line)
        id = json.loads(penstock(url, "enqueue", "waits", "1", "--json").stdout)["id"]
        next(line for line in lines if "began" in line)
        os.killpg(supervisor.pid, number)
        # The idle worker is gone, so the other one has been told twice, if ever.
        next(line for line in lines if "worker_stopped" in line)
        assert supervisor.poll() is None
        assert status(url, id) == "in-progress"
        os.killpg(supervisor.pid, number)
        assert supervisor.wait(60) == 0
        assert status(url, id) == "queued"
    finally:
        if supervisor.poll() is None:
            os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_http_api_of_up_ends_with_it(url: str, tmp_path: Path, number: signal.Signals) -> None:
    everything = start(url, tmp_path, "--http", "--port", "0", command="up")
    try:
        said = ""
        lines = lines_of(everything)
        while not ("listening on" in said and "worker_started" in said):
            said += next(lines)
        address = re.search(r"listening on (http://\S+)", said)
        assert address is not None
        assert httpx.get(f"{address[1]}/readyz", timeout=60).status_code == 200
        everything.send_signal(number)
        everything.communicate(timeout=60)  # the server has the same output: it is closed when both are gone
        assert everything.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address[1]}/readyz")
    finally:
        if everything.poll() is None:
            os.killpg(everything.pid, signal.SIGKILL)
        everything.communicate()
