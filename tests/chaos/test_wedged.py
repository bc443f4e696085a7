"""Handlers that block the event loop of their worker: for a while, which only delays other jobs, and for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock import Penstock
from tests.chaos.wedged_workload import VISIBLE
from tests.checker.history import Event, Gone, Run, read, runs_of
from tests.checker.keys import Ended, Placed, check_keys
from tests.waiting import eventually

KEYS, JOBS, WORKERS = 24, 12, 3
ENVIRONMENT = {
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.3",
    "PENSTOCK_DEAD_AFTER": "1.5",
    "PENSTOCK_MAINTENANCE_INTERVAL": "0.2",
}
# Longer than the silence after which a worker counts as dead; and longer than the visibility timeout of its jobs.
SLOW_S, WEDGED_S = 4.0, 14.0
LOOKS_S = 0.5  # a little more than the interval at which the heartbeat checks the loop


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    violations: list[str]
    runs: list[Run]
    wedged: Run
    codes: list[int]

    @property
    def moved_early(self) -> list[Run]:
        """Runs of the wedged worker's keys on other workers while it was alive and sent heartbeats."""
        mine = {key_of(run) for run in self.runs if run.worker == self.wedged.worker and run.begin <= self.wedged.begin}
        until = self.wedged.begin + VISIBLE.total_seconds() - LOOKS_S
        return [
            run for run in self.runs
            if key_of(run) in mine and run.worker != self.wedged.worker and self.wedged.begin < run.begin < until
        ]  # fmt: skip


def key_of(run: Run) -> str:
    return run.name.rpartition("/")[0]


async def run_wedged(url: str, folder: Path, sabotage: str = "") -> Result:
    """Enqueue jobs of many keys, of which one is slow and one wedges its worker, and check the history."""
    history = folder / "history.jsonl"
    history.touch()
    environment = {"PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history), "CHAOS_SABOTAGE": sabotage}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", "worker", "tests.chaos.wedged_workload:app"],
            env={**os.environ, **ENVIRONMENT, **environment}, cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for _ in range(WORKERS)
    ]  # fmt: skip
    try:
        async with Penstock(url) as app:
            database = await app.database()

            async def spread() -> bool:
                owners = await database.fetchval("select count(distinct owner) from penstock.slots where owner is not null")
                return bool(owners == WORKERS)

            await eventually(spread, "the members", timeout=60)
            blocks = {("k0", 3): SLOW_S, ("k1", 3): WEDGED_S}
            jobs = [
                (f"k{key}", {"n": n, "sleep_s": 0.05, "blocks_s": blocks.get((f"k{key}", n), 0)})
                for n in range(JOBS)
                for key in range(KEYS)
            ]
            await app.pool("keyed", slots=16).enqueue_many(jobs)
            placed = {f"{key}/{data['n']}": Placed(1, place, 0.0, 0.0) for place, (key, data) in enumerate(jobs)}

            async def drained() -> bool:
                return all(count.ready + count.deferred + count.in_progress == 0 for count in await app.counts())

            await eventually(drained, "the end of all jobs", timeout=120)

            def late() -> Event | None:
                ends = [event for event in read(history) if event.kind == "ended" and event.name == "k1/3" and event.attempt == 1]
                return ends[0] if ends else None

            back = await eventually(late, "the late end of what was wedged", timeout=60)
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            codes = [worker.wait(60) for worker in workers]
            found = await database.fetch(
                "select key || '/' || (data ->> 'n') as name, status::text, attempt from penstock.archived_jobs"
            )
            ended = {row["name"]: Ended(row["status"], row["attempt"], 0.0) for row in found}
        events = read(history)
        runs = runs_of(events)
        (wedged,) = [run for run in runs if run.name == "k1/3" and run.attempt == 1]
        # From then on other workers may have its jobs, and what it does after its return does not count.
        gone = Gone(wedged.worker, wedged.begin + VISIBLE.total_seconds() - LOOKS_S, back.at)
        violations = check_keys(events, placed, ended, [gone], within_s=15.0)
        violations += [f"P2: {name} is archived as {how.status}" for name, how in ended.items() if how.status != "succeeded"]
        violations += [f"P2: {name} is not archived" for name in placed.keys() - ended.keys()]
        if ended["k1/3"].attempt == 1:
            violations.append("P4: what the wedged worker said long after its time counts")
        return Result(violations, runs, wedged, codes)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.chaos
async def test_a_wedged_worker_keeps_its_keys_until_the_visibility_timeout_ends_it(url: str, tmp_path: Path) -> None:
    result = await run_wedged(url, tmp_path)
    assert result.violations == [], "\n".join(result.violations[:20])
    assert result.moved_early == []
    slow = [run for run in result.runs if run.name == "k0/3"]
    assert len(slow) == 1 or slow[0].worker == result.wedged.worker, "a loop that was blocked for a while lost its job"
    after = [run for run in result.runs if key_of(run) == "k1" and run.worker != result.wedged.worker]
    assert after, "no worker took over"
    assert result.codes == [0] * WORKERS


@pytest.mark.chaos
@pytest.mark.soak
async def test_without_the_heartbeat_beside_the_loop_keys_run_twice(url: str, tmp_path: Path) -> None:
    result = await run_wedged(url, tmp_path, "heartbeat_of_the_loop")
    assert any(each.startswith("P6: ") for each in result.violations), result.violations
    assert result.moved_early
