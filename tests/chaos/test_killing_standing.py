"""A standing job or an event that crashes its worker does not crash worker after worker: it is found and quarantined."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import NewEvent, Penstock
from penstock.testing import consumed
from tests.chaos.sabotage import Edit, Sabotage
from tests.waiting import eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

MOST_DEATHS = 14
# When the event comes first in the only partition: two losses make a suspect, and three more are its own.
MOST_DEATHS_BY_FIRST_EVENT = 5
KEYS = {f"t{n}" for n in range(20)}
UNLIMITED = Sabotage(
    r"[0-9]+ workers have ended, and the killer is not quarantined",
    (Edit("lose_standing", r"tried_with = 1 and crashes_alone >= 2", "false"),),
)
UNLIMITED_EVENTS = Sabotage(
    r"[0-9]+ workers have ended, and the partition is not quarantined",
    (Edit("lose_partitions", r"reached\.crashes >= 3 and reached\.crashed_at = reached\.next_offset", "false"),),
)
ASIDE = "select partition, pause_reason from penstock.group_offsets where quarantined"


@asynccontextmanager
async def fleet(url: str, log: Path, workers: int, *, dead_after_s: float = 2.0) -> AsyncIterator[Callable[[], int]]:
    """Workers that are started again when they end; yields how many have ended."""
    output = log.open("ab")
    command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.killing_standing_app:app"]
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "KILLING_DEAD_AFTER": str(dead_after_s)}
    processes: list[subprocess.Popen[bytes]] = []
    deaths = 0

    def launch() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=output, stderr=output)

    async def watch() -> None:
        nonlocal deaths
        while True:
            for place, process in enumerate(processes):
                if process.poll() is not None:
                    deaths += 1
                    processes[place] = launch()
            await asyncio.sleep(0.1)

    processes += [launch() for _ in range(workers)]
    watching = asyncio.create_task(watch())
    try:
        yield lambda: deaths
    finally:
        watching.cancel()
        for process in processes:
            process.kill()
            process.wait()
        output.close()


async def violations(sql: asyncpg.Connection[Any], deaths: Callable[[], int]) -> list[str]:
    """Wait until a standing job is quarantined, or too many workers have ended, and return what is wrong."""

    async def over() -> bool:
        if deaths() > MOST_DEATHS:
            return True
        return bool(await sql.fetchval("select exists (select from penstock.standing_jobs where quarantined_at is not null)"))

    await eventually(over, "a quarantine", 240)
    rows = await sql.fetch("select key from penstock.standing_jobs where quarantined_at is not null")
    quarantined = {row["key"] for row in rows}
    found = [f"{key} is quarantined, and has ended no worker" for key in sorted(quarantined - {"killer"})]
    if deaths() > MOST_DEATHS:
        found.append(f"{deaths()} workers have ended, and the killer is {'' if 'killer' in quarantined else 'not '}quarantined")
    return found


async def with_killer(app: Penstock, how: str) -> Any:
    """A pool with a standing job that ends its workers, beside many that do not."""
    pool = app.pool("tenants", slots=16)
    await pool.reconcile({key: {} for key in KEYS} | {"killer": {"does": how}})
    return pool


@pytest.mark.parametrize("how", ["exit", "segfault"])
async def test_a_standing_job_that_ends_its_workers_is_quarantined_and_the_others_run(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path, how: str
) -> None:
    async with Penstock(url) as app:
        pool = await with_killer(app, how)
        async with fleet(url, tmp_path / "workers.log", 2) as deaths:
            assert await violations(sql, deaths) == []
            assert await sql.fetchval("select error ->> 'type' from penstock.standing_jobs where key = 'killer'") == "Quarantined"
            ended = deaths()

            async def others_run() -> bool:
                rows = await sql.fetch("select key from penstock.standing_jobs where running_by is not null")
                return {row["key"] for row in rows} == KEYS

            await eventually(others_run, "all the others", 120)
            assert deaths() == ended
            # With a harmless payload it runs.
            assert await pool.start("killer", {}, replace=True) == "replaced"
            again = "select running_by is not null and crashes = 0 from penstock.standing_jobs where key = 'killer'"
            await eventually(lambda: sql.fetchval(again), "the run of what was mended")


async def test_a_standing_job_that_is_never_quarantined_is_found_out(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    async with Penstock(url) as app:
        await UNLIMITED.prepare(app)
        await with_killer(app, "exit")
        async with fleet(url, tmp_path / "workers.log", 2) as deaths:
            found = await violations(sql, deaths)
    assert [each for each in found if re.match(UNLIMITED.expected, each)], found


@pytest.mark.parametrize("how", ["exit", "segfault"])
async def test_an_event_that_ends_its_workers_is_set_aside_and_the_others_are_handled(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path, how: str
) -> None:
    await sql.execute("create table public.seen (partition integer, n integer)")
    async with Penstock(url) as app:
        events = app.stream("events", partitions=4)
        await events.append_many([NewEvent({"n": n, "does": how if n == 150 else None}, key=f"k{n % 40}") for n in range(300)])
        killer = await sql.fetchrow(
            "select partition, event_offset from generate_series(0, 3) as partition"
            " cross join lateral penstock.read_events('events', partition, 0, 1000) where data ->> 'n' = '150'"
        )
        async with fleet(url, tmp_path / "workers.log", 2) as deaths:
            await eventually(lambda: sql.fetchrow(ASIDE), "the quarantine of the partition", 240)
            [found] = await sql.fetch(ASIDE)
            assert found["partition"] == killer["partition"]
            assert found["pause_reason"].startswith(f"offset {killer['event_offset']}: Fail: it has crashed its workers")
            ended = deaths()
            assert ended <= 10

            async def others_done() -> bool:
                lags = {lag.partition: lag.lag for lag in await events.lag("readers")}
                return not any(lag for partition, lag in lags.items() if partition != killer["partition"])

            await eventually(others_done, "the other partitions", 120)
            assert deaths() == ended
            # Behind the event the group continues, and its trials end.
            move = "select penstock.seek_group('events', 'readers', array[$1::integer], array[$2::bigint])"
            await sql.execute(move, killer["partition"], killer["event_offset"] + 1)
            await sql.execute("select penstock.resume_partitions('events', 'readers')")
            await consumed(events, "readers", timeout=timedelta(minutes=2))
            assert deaths() == ended
            seen = {row["n"] for row in await sql.fetch("select n from public.seen")}
            assert seen == set(range(300)) - {150}


async def _run_first_event(url: str, sql: asyncpg.Connection[Any], folder: Path, sabotage: Sabotage | None = None) -> list[str]:
    """Let an event that ends its workers come first in a stream of one partition, and return what is wrong."""
    await sql.execute("create table public.seen (partition integer, n integer)")
    async with Penstock(url) as app:
        if sabotage is not None:
            await sabotage.prepare(app)
        await app.stream("events", partitions=1).append_many(
            [NewEvent({"n": n, "does": None if n else "exit"}) for n in range(3)]
        )
        async with fleet(url, folder / "workers.log", 2, dead_after_s=1.0) as deaths:

            async def over() -> bool:
                return deaths() > MOST_DEATHS_BY_FIRST_EVENT or await sql.fetchrow(ASIDE) is not None

            await eventually(over, "the quarantine of the partition", 240)
            quarantined = await sql.fetchrow(ASIDE) is not None
            ended = deaths()
    found = [] if quarantined else [f"{ended} workers have ended, and the partition is not quarantined"]
    if await sql.fetchval("select count(*) from public.seen"):
        found.append("events behind the first one were handled")
    return found


async def test_an_event_that_comes_first_ends_five_workers_at_most(
    url: str, sql: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    assert await _run_first_event(url, sql, tmp_path) == []


async def test_an_event_that_is_never_set_aside_is_found_out(url: str, sql: asyncpg.Connection[Any], tmp_path: Path) -> None:
    found = await _run_first_event(url, sql, tmp_path, UNLIMITED_EVENTS)
    assert [each for each in found if re.match(UNLIMITED_EVENTS.expected, each)], found
