"""Measurements of pools: python -m benchmarks.pools

Keyed beside unkeyed throughput; a noisy key beside quiet ones; what a join and a leave cost; how many slots move; heartbeats.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
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
from penstock.core.garbage_collection import collect_seldom
from penstock.groups.assignors import Candidate, jump, sticky
from penstock.testing import TemporaryDatabases
from penstock.worker import Worker

Row = tuple[str, str, str]
ROUNDS = 3


class Bench:
    """The measurements and their rows."""

    def __init__(self, databases: TemporaryDatabases, jobs: int, seconds: float) -> None:
        self.databases = databases
        self.jobs = jobs
        self.rows: list[Row] = []
        self.seconds = seconds
        self.rates: dict[int | None, list[float]] = {}
        self.quiet_p99 = 0.0

    def run(self, measure: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run one measurement on a database of its own."""
        with self.databases.database() as url:
            uvloop.run(measure(url, *arguments))

    async def drain(self, url: str, keys: int | None) -> None:
        """Jobs a second of one worker process, by number of keys; None: a plain queue. Called in turn, round after round."""
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
            pool.job(handle)
            await pool.enqueue_many([(f"key{n % keys}", n) for n in range(self.jobs)])
        async with app, _Working(app):
            await done.wait()
        self.rates.setdefault(keys, []).append(self.jobs / (time.perf_counter() - first))

    def drained(self) -> None:
        """The medians of the drains."""
        unkeyed = statistics.median(self.rates[None])
        for keys, rates in self.rates.items():
            what = "drain, plain queue" if keys is None else f"drain, pool with {keys:,} keys"
            rate = statistics.median(rates)
            self.rows.append((what, f"{rate:,.0f} jobs/s", f"{rate / unkeyed:.2f} of the queue"))

    async def fairness(self, url: str, noisy_share: float) -> None:
        """Waits of 999 quiet keys in an open loop, 100 jobs a second, beside a noisy key with a share of the whole flow.

        A job's wait is counted from when it was due, so that a sender that falls behind hides nothing.
        """
        app = Penstock(url)
        waits: list[float] = []
        noisy_waits: list[float] = []
        pool = app.pool("work")

        @pool.job
        async def handle(job: Job[int]) -> None:
            (noisy_waits if job.key == "noisy" else waits).append((time.time_ns() - job.data) / 1e6)

        chance = random.Random(4)
        jobs = int(100 * self.seconds)
        rate = 100 / (1 - noisy_share)
        async with app, _Working(app):
            started, sent, quiet = time.time_ns(), 0, 0
            while quiet < jobs:
                batch = []
                while (due := started + int(sent / rate * 1e9)) <= time.time_ns() and quiet < jobs:
                    noisy = chance.random() < noisy_share
                    quiet += not noisy
                    batch.append(("noisy" if noisy else f"quiet{chance.randrange(999)}", due))
                    sent += 1
                if batch:
                    await pool.enqueue_many(batch)
                await asyncio.sleep(0.001)
            while len(waits) < quiet:
                await asyncio.sleep(0.01)
        waits.sort()
        p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
        what = (
            f"quiet keys, open loop, beside one with {noisy_share:.0%} of {rate:,.0f} jobs/s"
            if noisy_share
            else "quiet keys alone, open loop"
        )
        compared = f"{p99 / self.quiet_p99:.2f} of the p99 alone" if noisy_share else ""
        if not noisy_share:
            self.quiet_p99 = p99
        self.rows.append((what, f"p50 {p50:.1f} ms, p99 {p99:.1f} ms", compared))

    async def rebalance(self, url: str) -> None:
        """The longest time between the end of a job and the start of the next of its key, at a join and a leave.

        Every key has jobs waiting all the time, and the same worker process runs all workers: what a pause of a slot would add
        is beside the ordinary distance without a change. For slots that moved it is the time from the end of the drain to the
        first start on the new owner.
        """
        app = Penstock(url)
        pool = app.pool("work")
        last: dict[str, float] = {}
        gaps: dict[str, list[float]] = {}

        @pool.job
        async def handle(job: Job[int]) -> None:
            key = str(job.key)
            now = time.perf_counter()
            gaps.setdefault(key, []).append(now - last.get(key, now))
            await asyncio.sleep(0.2)
            last[key] = time.perf_counter()

        keys = [f"key{n}" for n in range(256)]
        # A place for each, so that none waits for anything but its slot.
        app.context.settings = app.settings.model_copy(update={"concurrency": 400})

        async def owners() -> dict[int, str | None]:
            return {slot.slot: slot.owner for slot in await pool.slots()}

        async def rested() -> None:
            while any(slot.owner != slot.target or slot.owner is None for slot in await pool.slots()):
                await asyncio.sleep(0.005)

        async def measure(what: str, change: Callable[[], Coroutine[Any, Any, Any]] | None) -> None:
            before = await owners()
            gaps.clear()
            await asyncio.sleep(2)
            started = time.perf_counter()
            if change is not None:
                await change()
                await rested()
            took = time.perf_counter() - started
            await asyncio.sleep(2)
            after = await owners()
            stayed: list[float] = []
            moved: list[float] = []
            for key, each in gaps.items():
                slot = pool.slot_of(key)
                (stayed if before[slot] == after[slot] else moved).append(max(each) * 1e3)
            text = f"unmoved p50 {_middle(stayed):.1f}, max {max(stayed):.1f} ms"
            text += f"; moved p50 {_middle(moved):.1f}, max {max(moved):.1f} ms" if moved else ""
            slots = sum(before[slot] != after[slot] for slot in before)
            done = f", all done in {took * 1e3:.0f} ms" if change is not None else ""
            self.rows.append((f"longest pause of a key: {what}", text, f"{slots} of 256 slots moved{done}"))

        await pool.enqueue_many([(key, n) for n in range(100) for key in keys])
        async with app, _Working(app) as working:
            await working.add()
            await rested()
            await asyncio.sleep(0.5)
            await measure("no change, 2 workers", None)
            await measure("a third joins", working.add)
            await measure("it leaves", working.remove)
            await app.pause("work")

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


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


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
    parser.add_argument("--seconds", type=float, default=20, help="how long the flow of the fairness measurement lasts (20)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    collect_seldom()
    with TemporaryDatabases(parent=ON_DISK) as databases:
        bench = Bench(databases, arguments.jobs, arguments.seconds)
        for _ in range(ROUNDS):
            for keys in (None, 1, 1_000, 100_000):
                bench.run(bench.drain, keys)
        bench.drained()
        bench.run(bench.fairness, 0.0)
        bench.run(bench.fairness, 0.9)
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
