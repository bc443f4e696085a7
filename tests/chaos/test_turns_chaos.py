"""Keys of a pool with a limit take turns over several workers, of which some are killed (P12)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import NewJob, Penstock, Pool
from penstock.testing import TemporaryDatabases
from tests.chaos.queue_chaos import HEALED_WITHIN
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.checker.history import read
from tests.checker.turns import check_turns
from tests.waiting import eventually

WORKERS, NOISY, JOBS, QUIET_JOBS = 3, 8, 150, 10
# A noisy key gets a few jobs in its turn, and each of the workers has turns of its own: about 20 starts.
# A key that starves sees hundreds.
MOST = 150


def worker(url: str, history: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PENSTOCK_DATABASE_URL": url,
        "CHAOS_HISTORY": str(history),
        "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
        "PENSTOCK_DEAD_AFTER": "2",
        "PENSTOCK_MAINTENANCE_INTERVAL": "0.3",
    }
    with history.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.turns_app:app"]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log)


NO_TURNS = Sabotage(
    "P12",
    (
        Edit("fair_places", r"if p_places <= 0 or", "if true or p_places <= 0 or"),
        Edit("pass_on_places", r"if not exists \(select from penstock\.place_waiters where name = p_name\) then", "if true then"),
    ),
)


@pytest.mark.chaos
@pytest.mark.timeout(600)
async def test_a_quiet_key_is_served_in_its_turn(app: Penstock, url: str, tmp_path: Path) -> None:
    violations = await run_turns(app, turns_of(app), url, tmp_path)
    assert violations == [], "\n".join(violations[:20])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_places_without_turns_are_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    # On a machine that is busy with other things no worker is fast enough to take all places.
    async def run(folder: Path) -> list[str]:
        with databases.database() as url:
            async with Penstock(url) as app:
                await NO_TURNS.prepare(app)
                return await run_turns(app, turns_of(app), url, folder)

    await found_out(NO_TURNS.expected, tmp_path, run)


def turns_of(app: Penstock) -> Pool[Any]:
    return app.pool("turns", slots=32, concurrency=4, max_attempts=9)


async def run_turns(app: Penstock, pool: Pool[Any], url: str, tmp_path: Path) -> list[str]:
    """Run noisy and quiet keys over several workers, one of which is killed. Returns the violations."""
    history = tmp_path / "history.jsonl"
    history.touch()
    workers = [worker(url, history) for _ in range(WORKERS)]
    away: list[tuple[float, float]] = []
    enqueued: dict[str, tuple[str, float]] = {}

    try:
        noisy = [NewJob(n, key=f"noisy{key}") for n in range(JOBS) for key in range(NOISY)]
        for receipt, job in zip(await app.enqueue_many("turns", noisy), noisy, strict=True):
            enqueued[str(receipt.id)] = (str(job.key), time.monotonic())
        for n in range(QUIET_JOBS):
            # The quiet keys' jobs come while the noisy keys have jobs left.
            await eventually(lambda n=n: _reached(history, 60 * n + 1), "the work", timeout=120)
            for key in ("quiet0", "quiet1"):
                receipt = await pool.enqueue(key, n)
                enqueued[str(receipt.id)] = (key, time.monotonic())
            if n == QUIET_JOBS // 2:
                workers[0].kill()
                workers[0].wait()
                workers[0] = worker(url, history)
                # Until others have its keys.
                away.append((time.monotonic(), time.monotonic() + HEALED_WITHIN))
        await eventually(lambda: _ended(history) >= len(enqueued), "the last job", timeout=300)
    finally:
        for each in workers:
            each.kill()
            each.wait()
    return check_turns(read(history), enqueued, most=MOST, until=time.monotonic(), away=away)


def _reached(history: Path, count: int) -> bool:
    return sum(event.kind == "started" for event in read(history)) >= count


def _ended(history: Path) -> int:
    return len({event.id for event in read(history) if event.kind == "ended"})
