"""Workers in programs of one's own: `await app.run_worker()` and `app.run_worker_sync()`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from penstock import Penstock, Status

SHOP = """
import asyncio
from penstock import Penstock

app = Penstock()


@app.job
async def ship(id: str) -> None: ...


@app.job
async def bill(id: str) -> None: ...
"""
PROGRAMS = {
    "with an event loop": 'asyncio.run(app.run_worker("ship"))\nprint("ended")\n',
    "without an event loop": 'app.run_worker_sync("ship")\nprint("ended")\n',
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_runs_a_worker_until_it_is_told_to_end(
    app: Penstock, url: str, tmp_path: Path, program: str, number: signal.Signals
) -> None:
    (tmp_path / "own_worker.py").write_text(SHOP + PROGRAMS[program])
    await app.create_job_type("ship")
    await app.create_job_type("bill")
    shipped = await app.enqueue("ship", {"id": "shp_1"})
    billed = await app.enqueue("bill", {"id": "shp_1"})
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "own_worker.py",
        cwd=tmp_path,
        env={**os.environ, "PENSTOCK_DATABASE_URL": url},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await app.wait(shipped.id)
        # It works on what it was given, and nothing else.
        assert (await app.find(billed.id)).status is Status.QUEUED
        process.send_signal(number)
        out, err = await process.communicate()
        # The call returns, so that the program can end by itself.
        assert (process.returncode, out.decode().strip()) == (0, "ended"), err.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
