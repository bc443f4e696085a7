"""What a long line and a long transaction cost: a million jobs waiting for later or ready, and vacuum held off.

Rates with and without are taken in turn, and their medians compared.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from datetime import timedelta

import asyncpg

from benchmarks.measurements import Bench
from penstock import NewJob, Penstock
from penstock.jobs.job_type import JobType

_ROUNDS = 3
_PACE = 2_000


class Backlog:
    """The measurements; they write their rows to a `Bench`.

    Args:
        bench: The run.
        waiting: Jobs in the long line.
        hold_s: Seconds for which a transaction is held open while jobs pass at 2,000/s, before the rate is taken.
    """

    def __init__(self, bench: Bench, waiting: int, hold_s: float) -> None:
        self._bench = bench
        self._waiting = waiting
        self._hold_s = hold_s

    async def deferred(self, url: str) -> None:
        """The drain with and without a million jobs for later beside it."""
        with self._bench.databases.database() as empty_url:
            async with Penstock(url) as app, Penstock(empty_url) as empty:
                crowded, alone = app.job_type("noop"), empty.job_type("noop")
                await self._fill(crowded, timedelta(days=1))
                with_them, without = [], []
                for _ in range(_ROUNDS):
                    without.append(await self._drained(alone, empty_url))
                    with_them.append(await self._drained(crowded, url))
        rate = statistics.median(with_them)
        self._bench.note(
            f"drain beside {self._waiting:,} jobs for later",
            f"{rate:,.0f} jobs/s",
            f"{rate / statistics.median(without):.2f} of without",
        )

    async def ready(self, url: str) -> None:
        """A worker that gets through a million jobs that wait for it."""
        async with Penstock(url) as app:
            await self._fill(app.job_type("noop"), None)
            seen = await self._bench.worker(url, self._waiting)
        self._bench.note(f"drain of {self._waiting:,} jobs", f"{self._waiting / seen['seconds']:,.0f} jobs/s")
        self._bench.note(f"memory of the worker with {self._waiting:,} jobs waiting, at most", f"{seen['rss_mb']:.0f} MB")

    async def held(self, url: str) -> None:
        """The drain while a transaction is held open, and vacuum can remove nothing; in turn with one in another database.

        A snapshot holds back vacuum in its own database alone.
        """
        with self._bench.databases.database() as free_url:
            async with Penstock(url) as app, Penstock(free_url) as free_app:
                noop, free = app.job_type("noop"), free_app.job_type("noop")
                await self._drained(noop, url)
                await self._drained(free, free_url)
                holder = await asyncpg.connect(url)
                transaction = holder.transaction(isolation="repeatable_read")
                await transaction.start()
                await holder.fetch("select pg_current_xact_id()")
                passed = await self._pass(noop, url)
                held, without = [], []
                for _ in range(_ROUNDS):
                    without.append(await self._drained(free, free_url))
                    held.append(await self._drained(noop, url))
                await transaction.rollback()
                await holder.close()
        rate = statistics.median(held)
        self._bench.note(
            f"drain with a transaction held open for {self._hold_s:,.0f} s, in which {passed:,} jobs passed",
            f"{rate:,.0f} jobs/s",
            f"{rate / statistics.median(without):.2f} of without",
        )

    async def _fill(self, noop: JobType[object], run_after: timedelta | None) -> None:
        for start in range(0, self._waiting, 50_000):
            count = min(50_000, self._waiting - start)
            await noop.enqueue_many([NewJob({"n": start + n}, run_after=run_after) for n in range(count)])

    async def _drained(self, noop: JobType[object], url: str) -> float:
        await noop.enqueue_many([{"n": n} for n in range(self._bench.jobs)])
        return self._bench.jobs / float((await self._bench.worker(url, self._bench.jobs))["seconds"])

    async def _pass(self, noop: JobType[object], url: str) -> int:
        count = int(self._hold_s * _PACE)
        worker = await self._bench.start_worker(url, count)
        started = time.perf_counter()
        sent = 0
        while sent < count:
            due = min(count, int((time.perf_counter() - started) * _PACE))
            if due > sent:
                await noop.enqueue_many([{"n": n} for n in range(sent, due)])
                sent = due
            await asyncio.sleep(0.01)
        await self._bench.result(worker)
        return count
