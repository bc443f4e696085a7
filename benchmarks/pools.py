"""Measurements of pools: python -m benchmarks.pools

Keyed beside unkeyed throughput; a noisy key beside quiet ones; what a join and a leave cost; how many slots move; heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any

import asyncpg
import structlog
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.environments import ON_DISK
from penstock import Job, NewJob, Penstock
from penstock.ownership.assign import Candidate, jump, sticky
from penstock.testing import TemporaryDatabases
from penstock.worker import Worker

Row = tuple[str, str, str]


class Bench:
    """The measurements and their rows."""

    def __init__(self, databases: TemporaryDatabases, jobs: int) -> None:
        self.databases = databases
        self.jobs = jobs
        self.rows: list[Row] = []
        self.unkeyed = 0.0

    def run(self, measure: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run one measurement on a database of its own."""
        with self.databases.database() as url:
            uvloop.run(measure(url, *arguments))

    async def drain(self, url: str, keys: int | None) -> None:
        """Jobs a second of one worker process, by number of keys; None: a plain queue."""
        app = Penstock(url)
        count, first, done = 0, 0.0, asyncio.Event()

        async def handle(job: Job[Any]) -> None:
            nonlocal count, first
            first = first or time.perf_counter()
            count += 1
            if count == self.jobs:
                done.set()

        if keys is None:
            queue = app.job("work")(handle)
            async with app:
                await queue.enqueue_many([NewJob(n, key=f"key{n}") for n in range(self.jobs)])
        else:
            pool = app.pool("work")
            pool.handler(handle)
            await pool.enqueue_many([(f"key{n % keys}", n) for n in range(self.jobs)])
        async with app, _Working(app):
            await done.wait()
        rate = self.jobs / (time.perf_counter() - first)
        if keys is None:
            self.unkeyed = rate
            self.rows.append(("drain, plain queue", f"{rate:,.0f} jobs/s", "1.00"))
        else:
            self.rows.append(
                (f"drain, pool with {keys:,} keys", f"{rate:,.0f} jobs/s", f"{rate / self.unkeyed:.2f} of the queue")
            )

    async def fairness(self, url: str, noisy: bool) -> None:
        """Waits of 1,000 quiet keys, 100 jobs a second, with and without one key that has 50,000 jobs waiting."""
        app = Penstock(url)
        waits: list[float] = []
        pool = app.pool("work")

        @pool.handler
        async def handle(job: Job[int]) -> None:
            if job.data:
                waits.append((time.time_ns() - job.data) / 1e6)
            await asyncio.sleep(0.002)

        chance = random.Random(4)
        async with app, _Working(app):
            if noisy:
                await pool.enqueue_many([("noisy", 0)] * 50_000)
            started, sent = time.perf_counter(), 0
            while sent < 2_000:
                due = min(2_000, int((time.perf_counter() - started) * 100))
                if due > sent:
                    await pool.enqueue_many([(f"quiet{chance.randrange(1000)}", time.time_ns()) for _ in range(due - sent)])
                    sent = due
                await asyncio.sleep(0.002)
            while len(waits) < sent:
                await asyncio.sleep(0.01)
        waits.sort()
        what = "quiet keys beside a noisy one with 50,000 jobs" if noisy else "quiet keys alone"
        self.rows.append((what, f"p50 {waits[1000]:.1f} ms, p99 {waits[1980]:.1f} ms", ""))

    async def rebalance(self, url: str) -> None:
        """The longest time between two runs of a key at a join and a leave: keys whose slot stayed, and that moved."""
        app = Penstock(url)
        pool = app.pool("work")
        last: dict[str, float] = {}
        longest: dict[str, float] = {}

        @pool.handler
        async def handle(job: Job[int]) -> None:
            now = time.perf_counter()
            key = str(job.key)
            longest[key] = max(longest.get(key, 0.0), now - last.get(key, now))
            last[key] = now
            await asyncio.sleep(0.001)

        keys = [f"key{n}" for n in range(128)]

        async def gaps(what: str, change: Callable[[], Coroutine[Any, Any, Any]] | None) -> None:
            before = {slot.slot: slot.owner for slot in await pool.slots()}
            longest.clear()
            await asyncio.sleep(1.5)
            if change is not None:
                await change()
            await asyncio.sleep(1.5)
            after = {slot.slot: slot.owner for slot in await pool.slots()}
            moved = [longest[key] * 1e3 for key in longest if before[pool.slot_of(key)] != after[pool.slot_of(key)]]
            stayed = [longest[key] * 1e3 for key in longest if before[pool.slot_of(key)] == after[pool.slot_of(key)]]
            slots = sum(before[slot] != after[slot] for slot in before)
            text = f"longest gap of a key: unmoved {max(stayed):.0f} ms"
            self.rows.append((what, text + (f", moved {max(moved):.0f} ms" if moved else ""), f"{slots} of 256 slots moved"))

        async with app, _Working(app) as working:
            await working.add()

            async def feed() -> None:
                while True:
                    await pool.enqueue_many([(key, 1) for key in keys])
                    await asyncio.sleep(0.02)

            feeding = asyncio.create_task(feed())
            await asyncio.sleep(1)
            await gaps("no change, 2 workers", None)
            await gaps("a third worker joins", working.add)
            await gaps("it leaves", working.remove)
            feeding.cancel()

    async def heartbeats(self, url: str) -> None:
        """What ten thousand idle members cost."""
        app = Penstock(url)
        async with app:
            await app.pool("work").declare()
        connection = await asyncpg.connect(url)
        await connection.execute(
            "insert into penstock.members (group_name, id, session, age, joined_at, seen_at, dead_after)"
            " select 'work', 'm' || n, md5(n::text)::uuid, n, now(), now(), '10 s' from generate_series(1, 10000) as n"
        )
        await connection.execute("update penstock.groups set members = 10000")
        await connection.execute("vacuum analyze penstock.members")
        call = "select * from penstock.member_heartbeat('work', 'm' || $1::integer, md5($1::text)::uuid)"
        before = await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
        started = time.perf_counter()
        async with connection.transaction():
            for n in range(1, 3001):
                await connection.fetch(call, n)
        took = time.perf_counter() - started
        wal = await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn") - before
        started = time.perf_counter()
        for _ in range(20):
            await connection.fetchval("select penstock.evict('work')")
        looked = (time.perf_counter() - started) / 20
        await connection.close()
        share = took / 3000 * 10_000 / 5
        self.rows.append(
            (
                "a heartbeat among 10,000 members, without its commit",
                f"{took / 3000 * 1e3:.2f} ms, {wal / 3000:,.0f} bytes of log",
                f"{share:.2f} connections busy",
            )
        )
        self.rows.append(("a look for silent members among 10,000", f"{looked * 1e3:.1f} ms", "about 4 a second in a group"))

    def moves(self) -> None:
        """How many of 256 slots move when members join and leave, on average."""
        chance = random.Random(4)
        for name, assignor in (("sticky", sticky), ("jump", jump)):
            moved, least, changes = 0, 0.0, 0
            members = [Candidate(f"m{n}") for n in range(10)]
            target = assignor(members, range(256), {})
            for n in range(200):
                if (chance.random() < 0.5 and len(members) > 5) or len(members) == 20:
                    members.pop(chance.randrange(len(members)))
                    least += 256 / (len(members) + 1)
                else:
                    members.append(Candidate(f"n{n}"))
                    least += 256 / len(members)
                before, target = target, assignor(members, range(256), target)
                moved += sum(before[slot] != target[slot] for slot in target)
                changes += 1
            self.rows.append(
                (
                    f"slots moved by a join or leave, {name}",
                    f"{moved / changes:.1f} of 256",
                    f"{moved / least:.2f} of the optimum",
                )
            )


class _Working:
    """Workers in this process."""

    def __init__(self, app: Penstock) -> None:
        self._app = app
        self._workers: list[tuple[Worker, asyncio.Task[None]]] = []

    async def __aenter__(self) -> _Working:
        await self.add()
        return self

    async def add(self) -> None:
        """One more."""
        worker = await self._app.worker()
        self._workers.append((worker, asyncio.create_task(worker.run())))
        await worker.started()

    async def remove(self) -> None:
        """The youngest leaves."""
        worker, task = self._workers.pop()
        worker.stop()
        await task

    async def __aexit__(self, *_: object) -> None:
        while self._workers:
            await self.remove()


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pools", description=__doc__)
    parser.add_argument("--jobs", type=int, default=50_000, help="jobs of a drain (50000)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    with TemporaryDatabases(parent=ON_DISK) as databases:
        bench = Bench(databases, arguments.jobs)
        for keys in (None, 1, 1_000, 100_000):
            bench.run(bench.drain, keys)
        bench.run(bench.fairness, False)
        bench.run(bench.fairness, True)
        bench.run(bench.rebalance)
        bench.run(bench.heartbeats)
        bench.moves()
    table = Table(box=None, pad_edge=False)
    for column in ("measured", "value", "compared"):
        table.add_column(column)
    for row in bench.rows:
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
