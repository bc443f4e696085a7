"""P11: what a worker holds in memory has a ceiling, however many jobs wait and whatever they carry.

A worker process works off a short and a long backlog and says how large it has been. Another one keeps what it is given, as a
defect would: that one must be found out, or the test would see nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"
SHORT, LONG = 5_000, 60_000
PAYLOAD = "x" * 1_000
WORKER = """
import asyncio, sys
from pathlib import Path
from penstock import Job, Penstock

app = Penstock()
left, hoards = int(sys.argv[1]), sys.argv[2] == "hoards"
hoard = []

@app.job("label")
async def label(job: Job[dict]) -> None:
    global left
    left -= 1
    if hoards:
        hoard.append(job)
    if left == 0:
        worker.stop()

async def main() -> None:
    global worker
    async with app:
        worker = await app.worker()
        await worker.run()
    # Not getrusage: its peak is that of the process that forked this one.
    print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")).split()[1])

asyncio.run(main())
"""


async def peak_kib(url: str, sql: Sql, folder: Path, jobs: int, manner: str) -> int:
    """The most memory that a worker had for that many jobs."""
    await sql.fetch(
        "select penstock.enqueue_many('label', array_fill($1::jsonb, array[$2::integer]))", json.dumps({"text": PAYLOAD}), jobs
    )
    script = folder / "labels.py"
    script.write_text(WORKER)
    worker = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, script, str(jobs), manner],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert worker.returncode == 0, worker.stderr
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0
    return int(worker.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("manner", ["works", pytest.param("hoards", marks=pytest.mark.soak)])
async def test_a_worker_does_not_grow_with_its_backlog(app: Penstock, url: str, sql: Sql, tmp_path: Path, manner: str) -> None:
    await app.create_job_type("label")
    short = await peak_kib(url, sql, tmp_path, SHORT, manner)
    long = await peak_kib(url, sql, tmp_path, LONG, manner)
    grew = long - short
    room = (LONG - SHORT) * len(PAYLOAD) / 1024 / 3
    assert grew < room if manner == "works" else grew > room, f"from {short} KiB to {long} KiB"
