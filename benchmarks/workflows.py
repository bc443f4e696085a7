"""What workflows cost: a large job group beside a plain drain, the time from the last end to what follows, and a graph of jobs.

Rates are taken in turn with those of plain jobs, and their medians compared. Times between two jobs are the database's own.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import asyncpg

from benchmarks.measurements import Bench
from benchmarks.report import percentile
from penstock import NewJob, Penstock
from penstock.jobs.models import make_id

_ROUNDS = 3
_GROUPS = 200
_CHILDREN = 5
_MOST_EDGES = 3
_CLAIMS = 20
_CLAIM = "explain (analyze, buffers, timing off, format json) select count(*) from penstock.claim('bench', '{noop}', 100)"


class Workflows:
    """The measurements; they write their rows to a `Bench`.

    Args:
        bench: The run.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def group(self, url: str) -> None:
        """The drain of the children of one group, with the job that runs at its end, beside that of as many plain jobs."""
        jobs = self._bench.jobs
        plain, grouped = [], []
        with self._bench.databases.database() as plain_url:
            async with Penstock(url) as app, Penstock(plain_url) as beside:
                noop, alone = app.job_type("noop"), beside.job_type("noop")
                for number in range(_ROUNDS):
                    await alone.enqueue_many([{"n": n} for n in range(jobs + 1)])
                    plain.append(await self._drained(plain_url, jobs + 1))
                    async with app.job_group(f"group-{number}", then=noop) as group:
                        await noop.options(group=group).enqueue_many([{"n": n} for n in range(jobs)])
                    grouped.append(await self._drained(url, jobs + 1))
        rate, base = statistics.median(grouped), statistics.median(plain)
        ratios = sorted(one / other for one, other in zip(grouped, plain, strict=True))
        self._bench.note(
            f"drain of a group of {jobs:,}, with its then",
            f"{rate:,.0f} jobs/s",
            f"{rate / base:.2f} of plain jobs ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        )

    async def then(self, url: str) -> None:
        """From the end of the last child, or the seal, to the claim of the `then`: one group after the other, one worker."""
        async with Penstock(url) as app:
            noop = app.job_type("noop")
            await noop.enqueue_many([])
            worker = await self._bench.start_worker(url, _GROUPS * (_CHILDREN + 1))
            for number in range(_GROUPS):
                async with app.job_group(f"group-{number}", then=noop) as group:
                    await noop.options(group=group).enqueue_many([{"n": n} for n in range(_CHILDREN)])
                job = (await group.find()).then_job
                assert job is not None
                await app.wait(job)
            await self._bench.result(worker)
        waits = await self._waits(url)
        self._bench.note(
            "end of a group to the claim of its then",
            f"p50 {percentile(waits, 50):.1f} ms, p99 {percentile(waits, 99):.1f} ms",
        )

    async def graph(self, url: str) -> None:
        """A graph of random edges: each job waits for up to three of the ones before it."""
        jobs = max(100, self._bench.jobs // 10)
        chance = random.Random(7)
        ids = [make_id() for _ in range(jobs)]
        new = [
            NewJob(
                {"n": n},
                id=id,
                after=[ids[other] for other in chance.sample(range(n), min(n, chance.randint(0, _MOST_EDGES)))] or None,
            )
            for n, id in enumerate(ids)
        ]
        async with Penstock(url) as app:
            noop = app.job_type("noop")
            started = time.perf_counter()
            await noop.enqueue_many(new)
            enqueued = jobs / (time.perf_counter() - started)
            drained = await self._drained(url, jobs)
        connection = await asyncpg.connect(url)
        early = await connection.fetchval(
            "select count(*) from penstock.archived_jobs as job"
            " cross join lateral jsonb_array_elements_text(job.options -> 'after') as after (id)"
            " join penstock.archived_jobs as other on other.id = after.id::uuid where other.finished_at > job.started_at"
        )
        await connection.close()
        if early:
            raise RuntimeError(f"{early} jobs started before one for which they waited had ended")
        edges = sum(len(job.after or ()) for job in new if isinstance(job.after, list))
        self._bench.note(f"enqueue of a graph of {jobs:,} jobs, {edges:,} edges", f"{enqueued:,.0f} jobs/s")
        self._bench.note("its drain", f"{drained:,.0f} jobs/s")

    async def waiting(self, url: str) -> None:
        """The pages that a claim touches, and its plan, without and with ten times as many jobs that wait for others."""
        waiting = 10 * self._bench.jobs
        connection = await asyncpg.connect(url)
        async with Penstock(url) as app:
            noop = app.job_type("noop")
            await noop.enqueue_many([{"n": n} for n in range(10_000)])
            await connection.execute("vacuum analyze penstock.queued_jobs")
            before = await _claimed(connection)
            group = await app.job_group("never sealed").open()
            started = time.perf_counter()
            await noop.options(after=group).enqueue_many([{"n": n} for n in range(waiting)])
            rate = waiting / (time.perf_counter() - started)
            after = await _claimed(connection)
        await connection.close()
        self._bench.note(f"enqueue of {waiting:,} jobs that wait", f"{rate:,.0f} jobs/s")
        self._bench.note(f"pages of a claim beside {waiting:,} waiting jobs", f"{after:,.0f}", f"{after / before:.3f} of without")

    async def _drained(self, url: str, jobs: int) -> float:
        return jobs / float((await self._bench.worker(url, jobs))["seconds"])

    async def _waits(self, url: str) -> list[float]:
        connection = await asyncpg.connect(url)
        rows = await connection.fetch(
            "select extract(epoch from job.started_at - greatest(last.finished_at, job_group.sealed_at))::double precision as s"
            " from penstock.job_groups as job_group join penstock.archived_jobs as job on job.id = job_group.then_job"
            " cross join lateral (select max(child.finished_at) as finished_at from penstock.archived_jobs as child"
            " where child.workflow = job_group.id) as last"
        )
        await connection.close()
        if len(rows) != _GROUPS:
            raise RuntimeError(f"{len(rows)} of {_GROUPS} groups have run their then")
        return sorted(1000 * row["s"] for row in rows)


async def _claimed(connection: asyncpg.Connection[Any]) -> float:
    """The pages of a claim of 100 jobs, which is rolled back: the fewest of several.

    Each one leaves versions of its rows, for which later ones need further pages while another session has an older snapshot,
    such as the one that collects the statistics of a million new rows.
    """
    pages = []
    for _ in range(_CLAIMS):
        transaction = connection.transaction()
        await transaction.start()
        (plan,) = json.loads(await connection.fetchval(_CLAIM))
        pages.append(plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"])
        await transaction.rollback()
    return float(min(pages))
