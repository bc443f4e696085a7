"""Workers that are killed from outside: no job has done it, so none is convicted, and all run again side by side (P9)."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from tests.chaos.restarted import Fleet
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
pytestmark = [pytest.mark.chaos, pytest.mark.soak, pytest.mark.timeout(300)]
# As many as three workers of the application run at once.
JOBS = 60


def most_at_once(events: list[dict[str, Any]], attempt: int) -> int:
    """How many jobs one process ran at the same time, at most, of those that ran for at least the given time."""
    running: Counter[int] = Counter()
    most = 0
    for event in sorted(events, key=lambda event: event["at"]):
        if event["attempt"] >= attempt:
            running[event["pid"]] += 1 if event["kind"] == "started" else -1
            most = max(most, running[event["pid"]])
    return most


async def test_jobs_of_workers_that_are_killed_three_times_all_succeed_and_run_side_by_side(
    url: str, sql: Sql, tmp_path: Path
) -> None:
    """As by deploys that kill hard, or by the OOM killer; the third time strikes whatever is on trial."""
    fleet = Fleet(url, tmp_path / "history.jsonl")

    async def in_progress(attempt: int, jobs: int) -> bool:
        query = "select count(*) >= $2 from penstock.queued_jobs where attempt >= $1 and status = 'in-progress'"
        return bool(await sql.fetchval(query, attempt, jobs))

    async def kill_all() -> None:
        killed = fleet.pids
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not set(killed) & set(fleet.pids), "other workers in their places")

    try:
        async with Penstock(url) as app:
            fleet.start(3, "plain")
            await eventually(lambda: sql.fetchval("select count(*) = 3 from penstock.workers"), "the workers")
            await app.enqueue_many("plain", [{"n": n, "sleep_s": 2.0} for n in range(JOBS)])
            for attempt, jobs in ((1, 20), (2, 20), (3, 1)):
                await eventually(lambda: in_progress(attempt, jobs), f"{jobs} jobs in progress for at least the time {attempt}")  # noqa: B023
                await kill_all()
            await eventually(
                lambda: sql.fetchval("select not exists (select from penstock.queued_jobs)"), "the end of all jobs", timeout=180
            )
    finally:
        fleet.stop()
    ends = await sql.fetch("select status::text, reason, count(*) from penstock.archived_jobs group by 1, 2")
    assert [tuple(end) for end in ends] == [("succeeded", None, JOBS)]
    assert most_at_once(fleet.events(), 3) > 3, "those that had lost two workers ran one after the other"
