"""`penstock worker --autoscale` with real processes: scale-up under load; scale-down drains workers before it stops them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from tests.command_line import penstock
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
APP = """
import asyncio, os
from pathlib import Path
from penstock import Job, Penstock
app = Penstock()

@app.job("waits")
async def waits(job: Job[int]) -> None:
    Path(f"began-{job.data}").write_text(str(os.getpid()))
    while not Path(f"go-{job.data}").exists():
        await asyncio.sleep(0.05)
"""
# Handlers that note every begin and every end by themselves.
POOL = """
import asyncio, os
from pathlib import Path
from penstock import Job, Penstock
app = Penstock()
keyed = app.pool("keyed", slots=2)

@keyed.job
async def waits(job: Job[int]) -> None:
    with open(f"runs-{job.key}", "a") as runs:
        runs.write(f"{os.getpid()}\\n")
    while not Path("go").exists():
        await asyncio.sleep(0.05)
"""
# A grace that would end every handler, if it were the one that counts.
QUICK = {
    "PENSTOCK_AUTOSCALE_INTERVAL": "0.2",
    "PENSTOCK_AUTOSCALE_SETTLE": "1",
    "PENSTOCK_AUTOSCALE_COOLDOWN": "1",
    "PENSTOCK_SHUTDOWN_GRACE": "0.1",
    "PENSTOCK_HEARTBEAT_INTERVAL": "0.5",
    "PENSTOCK_CONCURRENCY": "1",
}


def began(folder: Path) -> dict[int, int]:
    """The process of each job that began."""
    found = {int(path.name[6:]): path.read_text() for path in folder.glob("began-*")}
    return {job: int(pid) for job, pid in found.items() if pid}


async def states(sql: Sql) -> dict[int, str]:
    return {row["pid"]: row["state"] for row in await sql.fetch("select pid, state from penstock.workers order by started_at")}


@pytest.mark.timeout(180)
async def test_workers_come_with_the_load_and_go_without_losing_what_they_have(url: str, sql: Sql, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app", "--autoscale", "1:3", "--wait", "0.3"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, **QUICK},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )

    def number(state: str, count: int) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return sum(one == state for one in (await states(sql)).values()) == count

        return check

    try:
        await eventually(number("running", 1), "the first worker", timeout=60)
        for job in range(3):
            await asyncio.to_thread(penstock, url, "enqueue", "waits", str(job))
        await eventually(lambda: len(set(began(tmp_path).values())) == 3, "three workers with a job each", timeout=90)
        oldest = next(iter(await states(sql)))
        mine = next(job for job, pid in began(tmp_path).items() if pid == oldest)
        # With one finished job and an empty queue fewer workers suffice, but the ones that could stop still run jobs.
        (tmp_path / f"go-{mine}").touch()

        async def leaving() -> int | None:
            return next((pid for pid, state in (await states(sql)).items() if state == "draining"), None)

        leaver = await eventually(leaving, "a worker that reports that it leaves", timeout=60)
        theirs = next(job for job, pid in began(tmp_path).items() if pid == leaver)
        assert leaver != oldest
        seen = await sql.fetchval("select seen_at from penstock.workers where pid = $1", leaver)
        await eventually(
            lambda: sql.fetchval("select count(*) from penstock.workers where pid = $1 and seen_at > $2", leaver, seen),
            "another heartbeat of it, long after the grace",
        )
        for job in range(3):
            (tmp_path / f"go-{job}").touch()
        await eventually(number("running", 1), "one worker again", timeout=60)
        # The last worker may have a result that it has not written yet.
        await eventually(
            lambda: sql.fetchval("select count(*) = 3 from penstock.archived_jobs"), "the end of all jobs", timeout=60
        )
        done = await sql.fetch("select data::int as job, status, attempt, errors, worker from penstock.archived_jobs")
        assert sorted((row["job"], row["status"], row["attempt"], row["errors"]) for row in done) == [
            (job, "succeeded", 1, None) for job in range(3)
        ]
        assert {row["job"]: int(row["worker"].split(".")[-2]) for row in done}[theirs] == leaver
        supervisor.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(supervisor.wait, 60) == 0
        assert await states(sql) == {}
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.timeout(180)
async def test_a_scale_up_of_a_pool_cuts_off_no_handler(url: str, sql: Sql, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(POOL)
    given = {**QUICK, "PENSTOCK_CONCURRENCY": "4", "PENSTOCK_HANDOVER_GRACE": "0.05"}

    # The four places of the first worker go to two keys of each slot.
    of_slot: list[list[str]] = [[], []]
    async with Penstock(url) as app:
        pool = app.pool("keyed", int, slots=2)
        for key in (f"key-{n}" for n in range(100)):
            of_slot[pool.slot_of(key)].append(key)
        keys = of_slot[0][:2] + of_slot[1][:6]
        await pool.enqueue_many([(key, 1) for key in keys])

    def runs() -> dict[str, list[str]]:
        return {path.name[5:]: path.read_text().split() for path in tmp_path.glob("runs-*")}

    supervisor = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", "shop:app", "--autoscale", "1:2", "--wait", "0.3"],
        env={**os.environ, "PENSTOCK_DATABASE_URL": url, **given}, cwd=tmp_path, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await eventually(lambda: len(runs()) == 4, "the places of the first worker", timeout=60)
        wanted = "select exists (select from penstock.slots where group_name = 'keyed' and target is distinct from owner)"
        await eventually(lambda: sql.fetchval(wanted), "a slot that is to move to a second worker", timeout=90)
        # Handlers of both slots run on the first worker, and still do long after the grace.
        for _ in range(2):
            seen = await sql.fetchval("select max(seen_at) from penstock.workers")
            await eventually(
                lambda seen=seen: sql.fetchval("select count(*) = 2 from penstock.workers where seen_at > $1", seen),
                "a heartbeat of both workers",
            )
        (tmp_path / "go").touch()
        await eventually(
            lambda: sql.fetchval("select count(*) = $1 from penstock.archived_jobs", len(keys)), "the end of all jobs", timeout=60
        )
        assert {key: len(pids) for key, pids in runs().items()} == dict.fromkeys(keys, 1), "each handler ran once, to its end"
        done = await sql.fetch("select status, attempt, errors from penstock.archived_jobs")
        assert {(row["status"], row["attempt"], row["errors"]) for row in done} == {("succeeded", 1, None)}
    finally:
        supervisor.terminate()
        supervisor.wait(60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--autoscale", "3:1"], "no range"),
        (["--autoscale", "0:4"], "no range"),
        (["--autoscale", "many"], "no range"),
        (["--autoscale", "1:4", "--processes", "2"], "neither"),
    ],
)
def test_a_bad_range_is_refused(url: str, arguments: list[str], message: str) -> None:
    refused = penstock(url, "worker", "examples.pools.fibonacci:app", *arguments)
    assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr


def test_advice_is_there_as_json(url: str) -> None:
    penstock(url, "types", "create", "work")
    assert [one["name"] for one in json.loads(penstock(url, "scale", "advise", "--json").stdout)] == ["work"]
