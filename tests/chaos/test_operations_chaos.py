"""Operations on all jobs that match, killed at every step: each job is changed once.

The processes that advance the operation are killed with SIGKILL at random moments, and the connections of others are cut by the
database in the middle of a batch. In the run with a sabotage, a batch does not note how far it came.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Erasure, JobFilter, NewEvent, NewJob, Penstock
from penstock.testing import TemporaryDatabases
from tests.chaos.sabotage import Edit, Sabotage
from tests.chaos.seeking import found_out
from tests.checker.operations import check_cancel, check_replay
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

JOBS = 3_000
MOST_KILLS = 20
PERSON, NEIGHBOUR = "anna", "bert"
SLOW = Edit("advance_operation", r"perform pg_current_xact_id\(\);", "perform pg_current_xact_id(); perform pg_sleep(0.02);")
AFTER = Edit("advance_operation", r"returning \* into operation;", "returning * into operation; perform pg_sleep(0.01);")
# A replay that forgets the place which it has reached, and is forced, repeats jobs.
FORGETFUL = Sabotage(
    r"job \S+ has ([2-9]|\d\d+) replays",
    (
        Edit("replay_matching", r"p_force => false", "p_force => true"),
        Edit(
            "do_batch",
            r"operation\.at_id := looked\[cardinality\(looked\)\];",
            "operation.at_id := case when random() < 0.5 then looked[cardinality(looked)] else operation.at_id end;",
        ),
    ),
)
ADVANCE = """
import asyncio, sys, asyncpg
async def main():
    connection = await asyncpg.connect(sys.argv[1])
    while True:
        await connection.fetchrow("select * from penstock.advance_operation(100)")
asyncio.run(main())
"""


@asynccontextmanager
async def killed_again_and_again(url: str, sql: asyncpg.Connection[Any]) -> AsyncIterator[list[int]]:
    """Three processes that advance operations, one of which is killed, or cut off, after a batch."""
    random.seed(7)
    kills = [0]

    def launch() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", ADVANCE, url], stderr=subprocess.DEVNULL)

    processes = [launch() for _ in range(3)]

    async def kill() -> None:
        looked_at = 0
        while kills[0] < MOST_KILLS:
            # After a batch, so that the operation goes on however slowly processes start.
            if (now := await sql.fetchval("select sum(looked_at) from penstock.operations") or 0) == looked_at:
                await asyncio.sleep(0.01)
                continue
            looked_at = now
            # Some moment of the next batches.
            await asyncio.sleep(random.uniform(0.0, 0.1))
            if random.random() < 0.5:
                place = random.randrange(len(processes))
                os.kill(processes[place].pid, signal.SIGKILL)
                processes[place].wait()
                processes[place] = launch()
                kills[0] += 1
            else:
                kills[0] += await sql.fetchval(
                    "select count(*) from (select pg_terminate_backend(pid) from pg_stat_activity where state = 'active'"
                    " and query like '%advance_operation(100)%' and pid <> pg_backend_pid() limit 1) as cut"
                )
                for place, process in enumerate(processes):
                    if process.poll() is not None:
                        processes[place] = launch()

    killing = asyncio.create_task(kill())
    try:
        yield kills
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
        for process in processes:
            process.kill()
            process.wait()


async def run(url: str, app: Penstock, sql: asyncpg.Connection[Any], kind: str, sabotage: Sabotage | None = None) -> list[str]:
    """Run an operation through kills, and check it."""
    for part in (Sabotage("", (SLOW, AFTER)), sabotage):
        if part is not None:
            await part.prepare(app)
    await app.create_job_type("mail")
    await app.create_job_type("bill")
    matching = [str(receipt.id) for receipt in await app.enqueue_many("mail", [NewJob(n) for n in range(JOBS)])]
    others = [str(receipt.id) for receipt in await app.enqueue_many("bill", [NewJob(n) for n in range(JOBS // 10)])]
    if kind == "replay":
        await sql.execute("select penstock.quarantine(array(select id from penstock.queued_jobs), 'to be replayed')")
    killer = await asyncpg.connect(url)
    async with killed_again_and_again(url, killer) as kills:
        started = await app.operations.start("replay" if kind == "replay" else "cancel", JobFilter(name="mail"))

        async def ended() -> bool:
            return (await app.operations.find(started.id)).ended

        await eventually(ended, "the end of the operation", timeout=300)
    await killer.close()
    assert kills[0] > 0
    record = await app.operations.find(started.id)
    if kind == "replay":
        rows = await sql.fetch("select replay_of from penstock.queued_jobs where replay_of is not null")
        return check_replay(matching, [str(row[0]) for row in rows], record.done)
    rows = await sql.fetch("select id from penstock.archived_jobs where status = 'cancelled'")
    return check_cancel(matching, others, [str(row[0]) for row in rows], record.done)


@pytest.mark.parametrize("kind", ["cancel", "replay"])
async def test_each_job_is_changed_once_through_kills(url: str, app: Penstock, sql: asyncpg.Connection[Any], kind: str) -> None:
    assert await run(url, app, sql, kind) == []


async def test_an_erasure_through_kills_removes_the_person_and_nothing_of_the_neighbour(
    url: str, app: Penstock, sql: asyncpg.Connection[Any]
) -> None:
    await Sabotage("", (SLOW, AFTER)).prepare(app)
    await app.create_job_type("mail")
    orders = app.stream("orders", int, partitions=2, segment_events=200)
    jobs = [NewJob(n, key=PERSON if n % 3 == 0 else NEIGHBOUR) for n in range(JOBS)]
    await app.enqueue_many("mail", jobs)
    await sql.execute("select penstock.quarantine(array(select id from penstock.queued_jobs limit 1000), 'to be archived')")
    await orders.declare()
    for start in range(0, JOBS, 300):
        await orders.append_many([NewEvent(n, PERSON if n % 3 == 0 else NEIGHBOUR) for n in range(start, start + 300)])
        await sql.execute("select penstock.maintain_stream('orders')")
    before = await _of_both(sql, NEIGHBOUR)
    killer = await asyncpg.connect(url)
    async with killed_again_and_again(url, killer) as kills:
        started = await app.operations.erase(Erasure(key=PERSON))

        async def at_its_end() -> bool:
            return (await app.operations.find(started.id)).phase == "vacuum"

        await eventually(at_its_end, "the last phase of the erasure", timeout=300)
    await killer.close()
    assert kills[0] > 0
    assert await _of_both(sql, PERSON) == ([], [])
    assert await _of_both(sql, NEIGHBOUR) == before
    record = await app.operations.find(started.id)
    assert record.counts is not None
    assert record.counts["queued"] + record.counts["archived"] == record.counts["events"] == JOBS // 3
    assert sum(bounds.next for bounds in (await orders.bounds()).values()) == JOBS


async def _of_both(sql: asyncpg.Connection[Any], key: str) -> tuple[list[Any], list[Any]]:
    """The jobs and the events of a key."""
    jobs = await sql.fetch(
        "select id, data::text from penstock.queued_jobs where key = $1"
        " union all select id, data::text from penstock.archived_jobs where key = $1 order by 1",
        key,
    )
    events = await sql.fetch(
        "select partition, event.event_offset, event.data::text from generate_series(0, 1) as partition"
        " cross join penstock.read_events('orders', partition, 0, 100000) as event where event.key = $1 order by 1, 2",
        key,
    )
    return [tuple(row) for row in jobs], [tuple(row) for row in events]


@pytest.mark.soak
async def test_an_operation_that_forgets_its_place_is_found_out(databases: TemporaryDatabases, tmp_path: Path) -> None:
    async def one(folder: Path) -> list[str]:
        with databases.database() as url:
            sql = await asyncpg.connect(url)
            try:
                async with Penstock(url) as app:
                    return await run(url, app, sql, "replay", FORGETFUL)
            finally:
                sql.terminate()

    await found_out(FORGETFUL.expected, tmp_path, one)
