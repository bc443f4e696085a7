"""The work of a killed worker runs again within 15 s, with the default settings and without intervention."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import Penstock
from tests.chaos.queue_chaos import RULES
from tests.checker.history import Gone, read
from tests.checker.jobs import History, check_jobs, healing
from tests.checker.tables import finals
from tests.waiting import eventually


@pytest.mark.chaos
async def test_the_work_of_a_killed_worker_runs_again_within_fifteen_seconds(url: str, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    history.touch()
    command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.workload:app", "-t", "unhurried", "-t", "once"]
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history)}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)

    workers = [start(), start()]
    async with Penstock(url) as app:
        try:

            async def ready() -> bool:
                return bool(await (await app.database()).fetchval("select count(*) = 2 from penstock.workers"))

            await eventually(ready, "both workers")
            receipts = await app.enqueue_many("unhurried", [{"sleep_s": 1.0, "failures": 0}] * 300)
            receipts += await app.enqueue_many("once", [{"sleep_s": 1.0, "failures": 0}] * 100)
            await eventually(
                lambda: len({event.worker for event in read(history) if event.kind == "started"}) == 2, "jobs on both"
            )
            victim = workers[0]
            victim.kill()
            victim.wait()
            killed = Gone(str(victim.pid), time.monotonic())

            async def over() -> bool:
                return all(count.ready + count.deferred + count.in_progress == 0 for count in await app.counts())

            await eventually(over, "the end of the jobs", timeout=60)
            checked = History(read(history), await finals(app), RULES, [killed], healed_within=15.0)
            healed = healing(checked)
            assert healed, "the killed worker was running no job"
            assert check_jobs(checked) == []
            print(f"{len(healed)} jobs, {min(healed.values()):.1f} to {max(healed.values()):.1f} s after the kill")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
