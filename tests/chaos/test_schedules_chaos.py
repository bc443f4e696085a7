"""Workers that are killed between a slot of a schedule and its run: each slot has one run, and none is lost."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
_DEATHS = 10


async def test_each_slot_has_one_run_whatever_is_killed_between_slot_and_run(
    url: str, tmp_path: Path, sql: asyncpg.Connection[Any]
) -> None:
    await sql.execute("create table public.ran (slot timestamptz, id uuid)")
    deaths = launched = 0
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    log = (tmp_path / "workers.log").open("ab")

    def launch() -> subprocess.Popen[bytes]:
        nonlocal launched
        launched += 1
        environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "SCHEDULE_SEED": f"{seed} {launched}"}
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.schedule_app:app"]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log)

    workers = [launch() for _ in range(3)]

    async def enough() -> bool:
        nonlocal deaths
        for place, worker in enumerate(workers):
            if worker.poll() is not None:
                deaths += 1
                workers[place] = launch()
        return deaths >= _DEATHS

    try:
        await eventually(enough, f"{_DEATHS} deaths", timeout=200)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        log.close()
    # The runs that are still open belong to dead workers. A worker without the schedule completes them.
    async with Penstock(url) as app:
        [schedule] = await app.list_schedules()
    enqueued = await sql.fetch("select id, (data ->> 'at')::timestamptz as slot from penstock.queued_jobs")
    enqueued += await sql.fetch("select id, (data ->> 'at')::timestamptz as slot from penstock.archived_jobs")
    slots = sorted(row["slot"] for row in enqueued)
    assert len(slots) >= _DEATHS
    # Each slot has one run, from the first slot to the one before the next due slot.
    assert slots == [slots[0] + timedelta(milliseconds=100) * n for n in range(len(slots))]
    assert schedule.next_at == slots[-1] + timedelta(milliseconds=100)
    # A job that ran again after a crash ran for its own slot.
    of = {row["id"]: row["slot"] for row in enqueued}
    ran = await sql.fetch("select id, slot from public.ran")
    assert {row["slot"] for row in ran} <= set(slots)
    assert all(of[row["id"]] == row["slot"] for row in ran)
    statuses = await sql.fetch("select status::text, reason, count(*) from penstock.archived_jobs group by 1, 2")
    assert [(row["status"], row["reason"]) for row in statuses] == [("succeeded", None)]
    # Runs never overlap: a run is enqueued when the previous one is archived.
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") <= 1
