"""A suspect gets a worker to itself soon, however busy the workers are, and however much they have claimed ahead (P9)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Job, NewJob, Penstock, Settings
from penstock.testing import running_worker
from penstock.worker import isolation, lanes
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
Handler: TypeAlias = Callable[[Job[dict[str, Any]]], Awaitable[None]]
Declare: TypeAlias = Callable[[Penstock, Handler], None]
WORKERS, PLACES = 4, 4
QUICK, SLOW = 3_000, 3_000
# Slow jobs last for so many looks at the database. Those take longer when the machine is busy, as the steps of the isolation do.
SLOW_LOOKS, LOOK_S = 14, 0.05
# In a round the workers run as many slow jobs as they have places.
ROUNDS = 8
FIRST_WAIT_S = 0.2


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers end sooner here than those for which the waits are meant, and a worker claims ahead on a slow machine too."""
    monkeypatch.setattr(isolation, "FIRST_WAIT_S", FIRST_WAIT_S)
    monkeypatch.setattr(isolation, "SESSION_S", FIRST_WAIT_S)
    monkeypatch.setattr(lanes, "LOOKAHEAD_S", 5.0)


class Fleet:
    """Workers in this process, each an application of its own, and what they ran."""

    def __init__(self, url: str) -> None:
        self.started: list[int] = []
        self.order: dict[str, list[int]] = defaultdict(list)
        self.beside: set[UUID] | None = None
        self.gate = asyncio.Event()
        self._url = url
        self._stack = AsyncExitStack()
        self._looked = asyncio.Event()

    async def __aenter__(self) -> Fleet:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._looking.cancel()
        await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self) -> None:
        async with Penstock(self._url) as app:
            database = await app.database()
            while True:
                await database.fetch("select 1")
                await asyncio.sleep(LOOK_S)
                looked, self._looked = self._looked, asyncio.Event()
                looked.set()

    async def start(self, declare: Declare, workers: int = WORKERS) -> Penstock:
        """Start workers with a handler that lasts for as many looks as a job says; -1: until the gate is open."""
        settings = Settings(concurrency=PLACES, maintenance_interval=0.2, poll_interval=0.2, claim_limit=100)
        apps = [await self._stack.enter_async_context(Penstock(self._url, settings=settings)) for _ in range(workers)]
        for app in apps:
            declare(app, self._handler(set()))
            await self._stack.enter_async_context(running_worker(app, at_once=True))
        return apps[0]

    def _handler(self, running: set[UUID]) -> Handler:
        async def run(job: Job[dict[str, Any]]) -> None:
            self.started.append(job.data["n"])
            self.order[str(job.key)].append(job.data["n"])
            if job.data.get("suspect"):
                self.beside = set(running)
            running.add(job.id)
            try:
                if job.data["looks"] < 0:
                    await self.gate.wait()
                for _ in range(job.data["looks"]):
                    await self._looked.wait()
            finally:
                running.discard(job.id)

        return run


@pytest.fixture
async def fleet(url: str) -> AsyncIterator[Fleet]:
    async with Fleet(url) as fleet:
        yield fleet


async def slow_jobs(sql: Sql) -> list[int]:
    """How many of the slow jobs each worker has."""
    rows = await sql.fetch(
        "select count(*) as jobs from penstock.queued_jobs as job join penstock.leases as lease on lease.id = job.lease"
        " where job.status = 'in-progress' and (job.data ->> 'n')::integer >= $1 group by lease.worker",
        QUICK,
    )
    return [row["jobs"] for row in rows]


async def claimed_ahead(sql: Sql) -> bool:
    """Whether all workers are full of slow jobs, and some have claimed many more."""
    jobs = await slow_jobs(sql)
    return len(jobs) == WORKERS and min(jobs) >= PLACES and max(jobs) > 3 * PLACES


async def suspect(sql: Sql, id: UUID) -> None:
    """Set a deferred job apart, as its second crash does."""
    await sql.execute(
        "update penstock.queued_jobs set crashes = 2, run_after = penstock.isolation_time(), updated_at = now() where id = $1", id
    )


async def over(sql: Sql, id: UUID) -> bool:
    return bool(await sql.fetchval("select exists (select from penstock.archived_jobs where id = $1)", id))


async def record_isolation(sql: Sql) -> None:
    """Record when each worker begins and ends to empty itself."""
    await sql.execute(
        """
        create table public.isolated (worker text, began timestamptz, ended timestamptz);
        create function public.note_isolated() returns trigger language plpgsql security definer as $do$
        begin
            if new.isolates then
                insert into public.isolated values (new.id, clock_timestamp());
            else
                update public.isolated set ended = clock_timestamp() where worker = new.id and ended is null;
            end if;
            return null;
        end
        $do$;
        create trigger note_isolated after update on penstock.workers for each row
        when (new.isolates <> old.isolates) execute function public.note_isolated();
        """
    )


def queue(app: Penstock, run: Handler) -> None:
    app.job("work")(run)


def pool(app: Penstock, run: Handler) -> None:
    app.pool("work", slots=16).job(run)


@pytest.mark.parametrize("declare", [queue, pool])
async def test_a_suspect_runs_alone_soon_beside_slow_jobs_that_were_claimed_ahead(
    fleet: Fleet, sql: Sql, declare: Declare
) -> None:
    app = await fleet.start(declare)
    keys = [f"k{n}" for n in range(10 * PLACES)] if declare is pool else [None]
    payloads = [{"n": n, "looks": 0 if n < QUICK else SLOW_LOOKS} for n in range(QUICK + SLOW)]
    await app.enqueue_many("work", [NewJob(payload, key=keys[n % len(keys)]) for n, payload in enumerate(payloads)])
    await eventually(lambda: claimed_ahead(sql), "slow jobs that are claimed ahead", timeout=60)
    payload = {"n": -1, "looks": 0, "suspect": True}
    new = NewJob(payload, key=keys[0] and "suspect", run_after=timedelta(hours=1))
    (receipt,) = await app.enqueue_many("work", [new])
    await suspect(sql, receipt.id)
    before = len(fleet.started)
    await eventually(lambda: over(sql, receipt.id), "the end of the suspect", timeout=120)
    meanwhile = [n for n in fleet.started[before : fleet.started.index(-1)] if n >= QUICK]
    assert fleet.beside == set(), "it ran beside others"
    assert len(meanwhile) <= ROUNDS * WORKERS * PLACES
    if declare is pool:
        assert all(ran == sorted(ran) for ran in fleet.order.values()), "a key lost its order"


async def test_workers_that_cannot_become_empty_do_not_each_begin_with_a_short_wait(fleet: Fleet, sql: Sql) -> None:
    await record_isolation(sql)
    app = await fleet.start(queue)
    await app.enqueue_many("work", [{"n": n, "looks": -1} for n in range(WORKERS * PLACES)])
    await eventually(lambda: len(fleet.started) == WORKERS * PLACES, "all places taken")
    receipt = await app.enqueue("work", {"n": -1, "looks": 0, "suspect": True}, run_after=timedelta(hours=1))
    await suspect(sql, receipt.id)
    tries = 6
    counted = "select count(*) from public.isolated where ended is not null"
    await eventually(lambda: sql.fetchval(f"{counted} having count(*) >= $1", tries), "the attempts", timeout=120)
    fleet.gate.set()
    await eventually(lambda: over(sql, receipt.id), "the end of the suspect")
    assert fleet.beside == set(), "it ran beside others"
    rows = await sql.fetch("select worker, began, ended from public.isolated order by began limit $1", tries)
    spent = [row["ended"] - row["began"] for row in rows]
    assert len({row["worker"] for row in rows}) > 1
    # Half of all the time, less the pauses between them, whichever worker made the attempts before.
    assert spent[-1] > (rows[-1]["ended"] - rows[0]["began"]) / 3, [each.total_seconds() for each in spent]


async def test_a_suspect_of_a_paused_type_keeps_no_worker_from_its_work(fleet: Fleet, sql: Sql) -> None:
    await record_isolation(sql)
    app = await fleet.start(queue, workers=1)
    await app.pause("work")
    receipt = await app.enqueue("work", {"n": -1, "looks": 0, "suspect": True}, run_after=timedelta(hours=1))
    await suspect(sql, receipt.id)
    assert await sql.fetchval("select penstock.has_isolated_jobs(array['work'])")
    assert await sql.fetchval("select penstock.next_alone(array['work'])") is None
    await app.resume("work")
    await eventually(lambda: over(sql, receipt.id), "the end of the suspect")
    assert await sql.fetchval("select count(*) from public.isolated") == 1
