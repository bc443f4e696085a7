"""Worker processes that are replaced: after many jobs, for their memory, and by new code. Real processes, which miss nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from penstock import Penstock
from tests.command_line import penstock
from tests.waiting import eventually

SHOP = """
import asyncio, os
from pathlib import Path
from penstock import Penstock
app = Penstock()
kept = []

@app.job(keep_result=True)
async def small() -> list[int]:
    return [os.getpid(), VERSION]

@app.job(keep_result=True)
async def leaks() -> int:
    kept.append(b"x" * 200_000_000)
    return os.getpid()

@app.job(keep_result=True)
async def long(until: str) -> int:
    while not Path(until).exists():
        await asyncio.sleep(0.05)
    return os.getpid()
"""


def write(folder: Path, version: str) -> None:
    (folder / "shop.py").write_text(f"VERSION = {version}\n{SHOP}")


@contextmanager
def working(url: str, folder: Path, *arguments: str, command: str = "worker") -> Iterator[subprocess.Popen[str]]:
    """A command that works for the shop, which has to end in an orderly way when it alone is told to."""
    assert penstock(url, "declare", "shop:app", cwd=folder).returncode == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", command, "shop:app", *arguments],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder, stdout=subprocess.DEVNULL, start_new_session=True, text=True,
    )  # fmt: skip
    try:
        yield process
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert psutil.wait_procs(children, timeout=60)[1] == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def run(app: Penstock, name: str, **payload: Any) -> Any:
    """The result of a job, which has to succeed at its first attempt."""
    receipt = await app.enqueue(name, payload)
    return await result(app, receipt.id)


async def result(app: Penstock, id: Any) -> Any:
    record = await app.wait(id)
    assert (record.status, record.attempt) == ("succeeded", 1), record
    return record.result


async def test_a_process_with_its_jobs_done_is_replaced_and_finishes_what_it_runs(
    url: str, app: Penstock, tmp_path: Path
) -> None:
    write(tmp_path, "1")
    with working(url, tmp_path, "--max-jobs", "5"):
        first, _ = await run(app, "small")
        long = await app.enqueue("long", {"until": str(tmp_path / "done")})
        await eventually(lambda: is_running(app, long.id), "the start of the long job")

        async def elsewhere() -> bool:
            return (await run(app, "small"))[0] != first

        await eventually(elsewhere, "jobs on another process", timeout=60)
        # The first process claims nothing any more, and still runs what it had.
        assert await is_running(app, long.id)
        assert first not in [(await run(app, "small"))[0] for _ in range(3)]
        (tmp_path / "done").touch()
        assert await result(app, long.id) == first
        await eventually(lambda: not psutil.pid_exists(first), "the end of the first process", timeout=60)


async def is_running(app: Penstock, id: Any) -> bool:
    return id in [one.id for one in await app.find_many(name="long", status="in-progress")]


async def test_a_process_that_takes_much_memory_is_replaced(url: str, app: Penstock, tmp_path: Path) -> None:
    write(tmp_path, "1")
    with working(url, tmp_path, "--max-memory", "200MiB"):
        first = await run(app, "leaks")
        await eventually(lambda: not psutil.pid_exists(first), "the end of the process that leaks", timeout=60)
        assert (await run(app, "small"))[0] != first


async def test_new_code_replaces_the_old_which_works_on_while_it_does_not_start(url: str, app: Penstock, tmp_path: Path) -> None:
    write(tmp_path, "1")
    with working(url, tmp_path, "--reload") as supervisor:
        first, version = await run(app, "small")
        assert version == 1
        known = {child.pid for child in psutil.Process(supervisor.pid).children()}
        write(tmp_path, "what is missing")

        def tried() -> bool:
            return bool({child.pid for child in psutil.Process(supervisor.pid).children()} - known)

        await eventually(tried, "the start of the new code", timeout=60)
        await eventually(lambda: not tried(), "its end", timeout=60)
        assert await run(app, "small") == [first, 1]
        write(tmp_path, "2")

        async def new() -> bool:
            return bool((await run(app, "small"))[1] == 2)

        await eventually(new, "the new code", timeout=60)
        await eventually(lambda: not psutil.pid_exists(first), "the end of the old code", timeout=60)


async def test_processes_of_up_end_with_it(url: str, app: Penstock, tmp_path: Path) -> None:
    write(tmp_path, "1")
    with working(url, tmp_path, "--processes", "2", command="up"):
        await run(app, "small")


def test_a_size_that_is_none_is_refused(url: str, tmp_path: Path) -> None:
    write(tmp_path, "1")
    for size in ("many", "-5", "0"):
        refused = penstock(url, "worker", "shop:app", f"--max-memory={size}", cwd=tmp_path)
        assert refused.returncode == 2 and re.search(f"'{size}' is no size", refused.stderr), refused.stderr
    assert json.loads(penstock(url, "workers", "--json").stdout) == []
