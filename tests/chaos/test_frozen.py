"""A worker that counts as dead while its process is alive."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock import Penstock, Status
from penstock.testing import TemporaryDatabases
from tests.chaos.queue_chaos import RULES
from tests.chaos.sabotage import Edit, Sabotage
from tests.checker.history import Gone, read
from tests.checker.jobs import History, check_jobs
from tests.checker.tables import finals
from tests.waiting import eventually

ENVIRONMENT = {
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.3",
    "PENSTOCK_DEAD_AFTER": "1.5",
    "PENSTOCK_MAINTENANCE_INTERVAL": "0.2",
}


SABOTAGES = {
    # A job of an at_most_once type goes back to the queue when its worker is lost.
    "at most once begins again": Sabotage(
        "P3", (Edit("end_attempts", r"when type\.delivery_strategy = 'at_most_once' then 'failed'", "when false then 'failed'"),)
    ),
}


async def test_each_edit_finds_what_it_takes_out(databases: TemporaryDatabases) -> None:
    for sabotage in SABOTAGES.values():
        with databases.database() as url:
            async with Penstock(url) as app:
                await sabotage.prepare(app)


async def _run_frozen(url: str, tmp_path: Path, sabotage: Sabotage | None = None) -> list[str]:
    """Freeze a worker with ten running jobs until another one has recovered them, and return what is wrong."""
    history = tmp_path / "history.jsonl"
    history.touch()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "worker", "tests.chaos.workload:app"],
            env={**os.environ, **ENVIRONMENT, "PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
        )

    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        frozen = start()
        other = None
        try:
            await eventually(lambda: _workers(app, 1), "the first worker")
            long = {"sleep_s": 1.0, "failures": 0}
            receipts = await app.enqueue_many("plain", [long] * 5) + await app.enqueue_many("once", [long] * 5)
            await eventually(lambda: sum(e.kind == "started" for e in read(history)) == 10, "the start of the jobs")
            frozen.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
            stopped_at = time.monotonic()
            other = start()

            async def recovered() -> bool:
                records = [await app.find(receipt.id) for receipt in receipts]
                return all(record.status.finished for record in records)

            await eventually(recovered, "the recovery")
            gone = Gone(str(frozen.pid), stopped_at, time.monotonic())
            frozen.send_signal(signal.SIGCONT)
            await eventually(lambda: _workers(app, 2), "the return of the frozen worker")
            later = await app.enqueue("plain", {"sleep_s": 0, "failures": 0})
            await app.wait(later.id)
            records = [await app.find(receipt.id) for receipt in receipts]
            found = check_jobs(History(read(history), await finals(app), RULES, [gone]))
            if (statuses := [record.status for record in records]) != [Status.SUCCEEDED] * 5 + [Status.FAILED] * 5:
                found.append(f"the jobs are {statuses}")
            if {record.errors[0]["type"] for record in records} != {"WorkerLost"}:
                found.append(f"the errors are {[record.errors for record in records]}")
            for worker in (frozen, other):
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(40) == 0
            return found
        finally:
            for worker in filter(None, (frozen, other)):
                worker.kill()
                worker.wait()


@pytest.mark.chaos
async def test_a_frozen_worker_loses_its_jobs_and_goes_on_under_a_new_name(url: str, tmp_path: Path) -> None:
    assert await _run_frozen(url, tmp_path) == []


@pytest.mark.chaos
@pytest.mark.soak
async def test_a_second_start_of_what_a_frozen_worker_had_begun_is_found_out(url: str, tmp_path: Path) -> None:
    sabotage = SABOTAGES["at most once begins again"]
    found = await _run_frozen(url, tmp_path, sabotage)
    assert [each for each in found if re.match(sabotage.expected, each)], found


async def _workers(app: Penstock, count: int) -> bool:
    database = await app.database()
    return bool(await database.fetchval("select count(*) from penstock.workers") == count)


@pytest.mark.soak
async def test_what_a_frozen_worker_had_not_begun_is_started_elsewhere_and_only_there(url: str, tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    history.touch()
    environment = {**os.environ, **ENVIRONMENT, "PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history)}
    command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.workload:app", "-t", "once"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)

    frozen, other = start(), None
    async with Penstock(url) as app:
        database = await app.database()
        idle = (
            "select not exists (select from pg_stat_activity"
            " where backend_xid is not null and pid <> pg_backend_pid() and datname = current_database())"
        )
        # The jobs that it has claimed: those marked as begun, and the others.
        held = (
            "select count(*) filter (where begun), count(*) filter (where not begun)"
            " from penstock.queued_jobs where status = 'in-progress'"
        )
        try:
            await eventually(lambda: _workers(app, 1), "the first worker")
            receipts, begun, unbegun = [], 0, 0
            for _ in range(200):
                receipts += await app.enqueue_many("once", [{"sleep_s": 0.002, "failures": 0}] * 100)
                frozen.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
                # The server completes a statement that was under way.
                await eventually(lambda: database.fetchval(idle), "the end of what is under way")
                begun, unbegun = await database.fetchrow(held)
                if unbegun:
                    break
                frozen.send_signal(signal.SIGCONT)
            assert unbegun, "the worker was never frozen with jobs that it had not begun"
            other = start()

            async def recovered() -> bool:
                return all(count.in_progress + count.ready + count.deferred == 0 for count in await app.counts())

            await eventually(recovered, "the recovery", 60)
            frozen.send_signal(signal.SIGCONT)
            await eventually(lambda: _workers(app, 2), "the return of the frozen worker")
            last = await app.enqueue_many("once", [{"sleep_s": 0, "failures": 0}] * 50)
            for receipt in last:
                await app.wait(receipt.id)
            events = read(history)
            starts = Counter(event.id for event in events if event.kind == "started")
            assert max(starts.values()) == 1
            failed = 0
            for receipt in receipts:
                record = await app.find(receipt.id)
                assert record.status in (Status.SUCCEEDED, Status.FAILED)
                failed += record.status is Status.FAILED
                if record.status is Status.SUCCEEDED:
                    assert starts[str(receipt.id)] == 1
            # Only jobs that had begun are lost.
            assert failed == begun
        finally:
            for worker in filter(None, (frozen, other)):
                worker.kill()
                worker.wait()
