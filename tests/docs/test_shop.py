"""The shop of examples/shop: its own tests, and its processes as its README starts them, from a folder that holds nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from penstock import Penstock
from penstock.testing import memory_folder
from tests.docs.snippets import blocks
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMMANDS = [line for block in blocks(ROOT / "examples/shop/README.md") for line in block.code.splitlines()]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTEST_", "DATABASE_"))}
    return {**kept, "PENSTOCK_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT)}


def command(starting: str) -> list[str]:
    [found] = [each for each in COMMANDS if each.startswith(f".venv/bin/{starting}")]
    return found.replace(".venv/bin/", f"{BIN}/").split()


@contextmanager
def running(arguments: list[str], folder: Path) -> Iterator[None]:
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment(folder), stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def test_its_own_tests_pass(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command("pytest"), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


async def test_its_processes_run_on_a_fresh_database() -> None:
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shop-", dir=memory_folder(), ignore_cleanup_errors=True))
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # The order comes before any worker has ever run.
        stack.enter_context(running([port if word == "8000" else word for word in command("uvicorn")], folder))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as browser:

            async def answers(method: str, path: str, json: Any = None) -> Any:
                try:
                    answer = await browser.request(method, path, json=json)
                except httpx.TransportError:
                    return None
                assert answer.is_success, answer.text
                return answer.json()

            order = {"customer": "ada", "article": "tea", "cents": 1250}
            placed = await eventually(lambda: answers("POST", "/orders", order), "the first order", 60)
            assert placed == {"order": 1}
            stack.enter_context(running(command("penstock up"), folder))

            async def points() -> bool:
                return await answers("GET", "/customers/ada") == {"points": 12}

            await eventually(points, "the points of the first order", 60)
            await answers("POST", "/orders/1/ship")
            async with Penstock(data_dir=folder / "data") as app:
                database = await app.database()

                async def mails() -> bool:
                    found = await database.fetch("select text from public.mails order by id")
                    return [row["text"] for row in found] == ["Thank you for order 1: tea", "Order 1 is on its way: tea"]

                await eventually(mails, "the mails", 60)
                shown = await asyncio.to_thread(
                    subprocess.run,
                    command("penstock streams lag"),
                    cwd=ROOT,
                    env=environment(folder),
                    capture_output=True,
                    text=True,
                )
                assert shown.returncode == 0, shown.stderr
                assert "sales" in shown.stdout
