"""What runs for ever waits at its start for a database that is not there yet, and not for ever."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

import pytest

from tests.chaos.proxy import Proxy

COMMANDS = {
    "worker": (["worker", "shop:app"], "worker_started"),
    "server": (["server", "--port", "0"], "listening on"),
    "dequeue": (["dequeue", "--downstream-url", "http://127.0.0.1:9"], "worker_started"),
}
SHOP = "from penstock import Penstock\napp = Penstock()\n\n@app.job('pack')\nasync def pack(job): ...\n"


async def start(url: str, folder: Path, arguments: list[str], timeout_s: float) -> Process:
    (folder / "shop.py").write_text(SHOP)
    settings = {
        "PENSTOCK_DATABASE_URL": url,
        "PENSTOCK_START_TIMEOUT": str(timeout_s),
        "PENSTOCK_HTTP_TOKEN": "token-of-the-tests",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", *arguments, env={**os.environ, **settings}, cwd=folder, stdout=PIPE, stderr=STDOUT
    )


async def line_with(process: Process, words: str) -> None:
    assert process.stdout is not None
    seen = b""
    while line := await asyncio.wait_for(process.stdout.readline(), 60):
        seen += line
        if words.encode() in line:
            return
    pytest.fail(f"it ended without {words!r}: {seen.decode()}")


@pytest.mark.parametrize("command", COMMANDS)
async def test_it_waits_for_a_database_that_starts_later(url: str, tmp_path: Path, command: str) -> None:
    arguments, ready = COMMANDS[command]
    async with Proxy(url) as proxy:
        proxy.refuses = True
        process = await start(proxy.url, tmp_path, arguments, 60)
        try:
            await line_with(process, "database_awaited")
            proxy.refuses = False
            await line_with(process, ready)
            process.terminate()
            await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@pytest.mark.parametrize("command", COMMANDS)
async def test_it_gives_up_on_a_database_that_does_not_come(url: str, tmp_path: Path, command: str) -> None:
    async with Proxy(url) as proxy:
        proxy.refuses = True
        process = await start(proxy.url, tmp_path, COMMANDS[command][0], 0.3)
        said, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 3
        assert b"error: the database is not available" in said
