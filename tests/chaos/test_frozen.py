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
from typing import Any

import asyncpg
import pytest

from penstock import Penstock, Status
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
    # Both the fence of the process and the answer of the database would prevent the start.
    "start without its fences": Sabotage(r"P3: once \S+ was started 2 times", worker="refusals_ignored"),
}


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


# The calls of begin_jobs for leases of one process wait at a gate, an advisory lock; the jobs that workers give up are noted.
GATED = """
create table public.gated (pid integer);
create table public.given_up (id uuid);

alter function penstock.begin_jobs(uuid[], bigint[]) rename to kept_begin_jobs;
create function penstock.begin_jobs(p_ids uuid[], p_leases bigint[]) returns setof uuid language plpgsql as $do$
begin
    if exists (
        select from penstock.leases join public.gated on leases.worker like '%.' || gated.pid || '.%'
        where leases.id = any (p_leases)
    ) then
        perform pg_advisory_xact_lock_shared(14);
    end if;
    return query select kept_begin_jobs from penstock.kept_begin_jobs(p_ids, p_leases);
end
$do$;

alter function penstock.end_attempts(uuid[], smallint[], bigint[], text[], jsonb[], interval[], timestamptz)
    rename to kept_end_attempts;
create function penstock.end_attempts(
    p_ids uuid[], p_attempts smallint[], p_leases bigint[], p_outcomes text[], p_details jsonb[], p_retry_after interval[],
    p_moment timestamptz
) returns table (id uuid, outcome text) language plpgsql as $do$
begin
    insert into public.given_up select unnest(p_ids);
    return query select * from penstock.kept_end_attempts(
        p_ids, p_attempts, p_leases, p_outcomes, p_details, p_retry_after, p_moment
    );
end
$do$;
"""


async def _run_unbegun(url: str, sql: asyncpg.Connection[Any], tmp_path: Path, sabotage: Sabotage | None = None) -> list[str]:
    """Freeze a worker between its claim of jobs and their start, resume it when they are archived, and return what is wrong."""
    history = tmp_path / "history.jsonl"
    history.touch()
    environment = {
        **os.environ,
        **ENVIRONMENT,
        # The call that waits at the gate is answered while the process is frozen.
        "PENSTOCK_COMMAND_TIMEOUT": "300",
        "PENSTOCK_DATABASE_URL": url,
        "CHAOS_HISTORY": str(history),
        "CHAOS_SABOTAGE": "" if sabotage is None else sabotage.worker,
    }
    command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.workload:app", "-t", "once"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)

    def starts() -> Counter[str]:
        return Counter(event.id for event in read(history) if event.kind == "started")

    async with Penstock(url) as app:
        database = await app.database()
        if sabotage is not None:
            await sabotage.prepare(app)
        await sql.execute(GATED)
        frozen, other = start(), None
        try:
            await eventually(lambda: _workers(app, 1), "the first worker")
            begun = await app.enqueue_many("once", [{"sleep_s": 600, "failures": 0}] * 5)
            await eventually(lambda: len(starts()) == 5, "the start of the first jobs")
            await sql.execute("select pg_advisory_lock(14)")
            await sql.execute("insert into public.gated values ($1)", frozen.pid)
            unbegun = await app.enqueue_many("once", [{"sleep_s": 0, "failures": 0}] * 20)
            claimed = "select count(*) = 20 from penstock.queued_jobs where status = 'in-progress' and not begun"
            await eventually(lambda: database.fetchval(claimed), "the claim")
            at_gate = "select exists (select from pg_locks where locktype = 'advisory' and objid = 14 and not granted)"
            await eventually(lambda: database.fetchval(at_gate), "the call that is to record their start")
            frozen.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)
            other = start()
            receipts = [*begun, *unbegun]

            async def archived() -> bool:
                return all([(await app.find(receipt.id)).status.finished for receipt in receipts])

            await eventually(archived, "that other workers have recovered and run the jobs")
            # The call is answered now. While its heartbeats wait, the process learns from nothing else that it lost the jobs.
            async with sql.transaction():
                await sql.execute("lock table penstock.workers in share mode")
                await sql.execute("select pg_advisory_unlock(14)")
                frozen.send_signal(signal.SIGCONT)
                given_up = "select count(distinct id) = 20 from public.given_up where id = any ($1)"
                ids = [receipt.id for receipt in unbegun]

                async def decided() -> bool:
                    return max(starts().values()) > 1 or await database.fetchval(given_up, ids)

                await eventually(decided, "that the resumed worker starts the jobs, or gives them up")
            await eventually(lambda: _workers(app, 2), "the return of the frozen worker")
            last = await app.enqueue_many("once", [{"sleep_s": 0, "failures": 0}] * 50)
            for receipt in last:
                await app.wait(receipt.id)
            found = [f"P3: once {id} was started {times} times" for id, times in starts().items() if times != 1]
            # Only jobs that had begun are lost.
            wanted = [Status.FAILED] * len(begun) + [Status.SUCCEEDED] * len(unbegun)
            if (statuses := [(await app.find(receipt.id)).status for receipt in receipts]) != wanted:
                found.append(f"the jobs are {statuses}")
            return found
        finally:
            for worker in filter(None, (frozen, other)):
                worker.kill()
                worker.wait()


@pytest.mark.soak
async def test_what_a_frozen_worker_had_not_begun_is_started_elsewhere_and_only_there(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    assert await _run_unbegun(url, sql, tmp_path) == []


@pytest.mark.soak
async def test_a_frozen_worker_that_starts_what_others_have_run_is_found_out(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    sabotage = SABOTAGES["start without its fences"]
    found = await _run_unbegun(url, sql, tmp_path, sabotage)
    assert [each for each in found if re.match(sabotage.expected, each)], found
