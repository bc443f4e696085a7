"""Penstock beside the bare SQL: enqueueing in bulk, draining, and the time from enqueue to start.

Everything is compared within the same run, since machines are noisy.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import uuid_utils.compat
import uvloop

from benchmarks.report import percentile
from penstock import Penstock
from penstock.testing import TemporaryDatabases

ROUNDS = 3
PACE = 2_000
BARE_INSERT = """
    insert into bare (id, name, seq, run_after, created_at, updated_at, attempt, max_attempts, data)
    select id, 'noop', nextval('penstock.job_seq'), now(), now(), now(), 5, 5, data
    from unnest($1::uuid[], $2::jsonb[]) as given (id, data)
"""


class Bench:
    """The measurements and their rows."""

    def __init__(self, databases: TemporaryDatabases, jobs: int) -> None:
        self.databases = databases
        self.jobs = jobs
        self.rows: list[tuple[str, str, str]] = []

    def note(self, what: str, value: str, compared: str = "") -> None:
        """Keep a row of the result."""
        self.rows.append((what, value, compared))

    def run(self, measure: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        """Run one measurement on a database of its own."""
        with self.databases.database() as url:
            uvloop.run(measure(url))

    async def enqueue(self, url: str) -> None:
        """Bulk enqueue beside the bare insert, alternating, medians of nine."""
        connection = await asyncpg.connect(url)
        await connection.execute("create table bare (like penstock.queued_jobs including all)")
        data = [f'{{"n":{n}}}' for n in range(self.jobs)]
        bare, ours = [], []
        async with Penstock(url) as app:
            noop = app.job_type("noop")
            await noop.enqueue_many([])
            payloads = [{"n": n} for n in range(self.jobs)]
            for _ in range(9):
                ids = [uuid_utils.compat.uuid7() for _ in range(self.jobs)]
                await connection.execute("truncate bare")
                started = time.perf_counter()
                for at in range(0, self.jobs, 10_000):
                    await connection.execute(BARE_INSERT, ids[at : at + 10_000], data[at : at + 10_000])
                bare.append(self.jobs / (time.perf_counter() - started))
                await connection.execute("truncate penstock.queued_jobs")
                started = time.perf_counter()
                for at in range(0, self.jobs, 10_000):
                    await connection.execute(
                        "select count(*) from penstock.enqueue_many('noop', $2::jsonb[], $1::uuid[])",
                        ids[at : at + 10_000],
                        data[at : at + 10_000],
                    )
                in_sql = self.jobs / (time.perf_counter() - started)
                await connection.execute("truncate penstock.queued_jobs")
                started = time.perf_counter()
                await noop.enqueue_many(payloads)
                ours.append((in_sql, self.jobs / (time.perf_counter() - started)))
        base = statistics.median(bare)
        in_sql = statistics.median(sql for sql, _ in ours)
        in_python = statistics.median(python for _, python in ours)
        self.note("bare insert ... unnest", f"{base:,.0f} jobs/s", "1.00")
        self.note("penstock.enqueue_many in SQL", f"{in_sql:,.0f} jobs/s", f"{in_sql / base:.2f} of the bare insert")
        self.note(
            "enqueue_many in Python, payloads as dicts", f"{in_python:,.0f} jobs/s", f"{in_python / base:.2f} of the bare insert"
        )
        await connection.close()

    async def drain(self, url: str) -> None:
        """One worker process beside the bare loop of claim and settle, alternating, medians of three."""
        connection = await asyncpg.connect(url)
        bare, ours, logs, commits, memory = [], [], [], [], []
        async with Penstock(url) as app:
            noop = app.job_type("noop")
            payloads = [{"n": n} for n in range(self.jobs)]
            for _ in range(ROUNDS):
                await noop.enqueue_many(payloads)
                bare.append(await self._bare_loop(connection))
                await connection.execute("vacuum penstock.queued_jobs")

                await noop.enqueue_many(payloads)
                wal_before, commits_before = await self._written(connection)
                seen = await self.worker(url, self.jobs)
                ours.append(self.jobs / seen["seconds"])
                memory.append(seen["rss_mb"])
                wal_after, commits_after = await self._written(connection)
                logs.append((wal_after - wal_before) / self.jobs)
                commits.append((commits_after - commits_before) / self.jobs)
                if left := await connection.fetchval("select count(*) from penstock.queued_jobs"):
                    raise RuntimeError(f"{left} jobs are not settled")
                await connection.execute("vacuum penstock.queued_jobs")
        base, rate = statistics.median(bare), statistics.median(ours)
        self.note("bare loop of claim and settle, batches of 500", f"{base:,.0f} jobs/s", "1.00")
        self.note("drain, one worker process", f"{rate:,.0f} jobs/s", f"{rate / base:.2f} of the bare loop")
        self.note("write-ahead log of claim and settle", f"{statistics.median(logs):,.0f} bytes/job")
        self.note("commits of claim and settle", f"{statistics.median(commits):.4f} per job")
        self.note("memory of the worker", f"{max(memory):.0f} MB")
        await connection.close()

    async def latency(self, url: str) -> None:
        """From the call of enqueue to the start of the handler, idle; and in an open loop at 2,000 jobs a second.

        In the open loop a job is stamped with the time when it was due, so that a sender that falls behind hides nothing.
        """
        async with Penstock(url) as app:
            stamped = app.job_type("stamped", int)
            await stamped.enqueue_many([])
            count = 200
            worker = await self.start_worker(url, count)
            for _ in range(count):
                await stamped.enqueue(time.time_ns())
                await asyncio.sleep(0.25)
            waits = (await self.result(worker))["waits_ms"]
            self.note("enqueue to start, idle", f"p50 {percentile(waits, 50):.1f} ms, p99 {percentile(waits, 99):.1f} ms")

            count = 20_000
            worker = await self.start_worker(url, count)
            started, sent = time.time_ns(), 0
            while sent < count:
                due = min(count, (time.time_ns() - started) * PACE // 10**9)
                if due > sent:
                    await stamped.enqueue_many([started + n * 10**9 // PACE for n in range(sent, due)])
                    sent = due
                await asyncio.sleep(0.001)
            waits = (await self.result(worker))["waits_ms"]
            self.note(
                f"due to start at {PACE:,} jobs/s", f"p50 {percentile(waits, 50):.1f} ms, p99 {percentile(waits, 99):.1f} ms"
            )

    async def _written(self, connection: asyncpg.Connection[Any]) -> tuple[int, int]:
        """Bytes of write-ahead log and commits so far."""
        row = await connection.fetchrow(
            "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint as bytes, xact_commit as commits"
            " from pg_stat_database where datname = current_database()"
        )
        assert row is not None
        return row["bytes"], row["commits"]

    async def _bare_loop(self, connection: asyncpg.Connection[Any]) -> float:
        marks: dict[str, dict[str, int]] = {}
        done = 0
        started = time.perf_counter()
        while rows := await connection.fetch(
            "select id, attempt, lease, seq from penstock.claim('bench', '{noop}', 500, $1::jsonb)", json.dumps(marks)
        ):
            marks = {"noop": {"0": rows[-1]["seq"]}}
            await connection.execute(
                "select penstock.settle($1, $2::smallint[], $3::bigint[])",
                [r["id"] for r in rows],
                [r["attempt"] for r in rows],
                [r["lease"] for r in rows],
            )
            done += len(rows)
        return done / (time.perf_counter() - started)

    async def worker(self, url: str, jobs: int) -> dict[str, Any]:
        """Run a worker process until that many jobs have run; returns what it saw."""
        return await self.result(await self.start_worker(url, jobs))

    async def start_worker(self, url: str, jobs: int) -> asyncio.subprocess.Process:
        """Start a worker process that ends when that many jobs have run."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.app", str(jobs),
            env={**os.environ, "PENSTOCK_DATABASE_URL": url},
            stdout=subprocess.PIPE,
            limit=2**24,
        )  # fmt: skip
        assert process.stdout is not None
        while b"ready" not in await asyncio.wait_for(process.stdout.readline(), 60):
            pass
        return process

    async def result(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """What a worker process saw, at its end."""
        output, _ = await asyncio.wait_for(process.communicate(), 1_200)
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result
