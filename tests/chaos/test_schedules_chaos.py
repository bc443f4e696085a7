"""Workers that are killed between a slot of a schedule and its run: each slot has one run, and none is lost."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.chaos.seeking import found_out
from tests.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
_DEATHS = 10
_EVERY = timedelta(milliseconds=100)
_FIRST = datetime(2026, 1, 1, tzinfo=UTC)


def violations_of_slots(slots: Iterable[datetime], next_at: datetime) -> list[str]:
    """What is wrong with the slots of all runs: each has one run, from the first slot to the one before the next due slot."""
    found = []
    for slot, following in pairwise([*sorted(slots), next_at]):
        if following == slot:
            found.append(f"the slot {slot} has more than one run")
        elif following != slot + _EVERY:
            found.append(f"slots between {slot} and {following} have no run")
    return found


@pytest.mark.parametrize(
    ("places", "next_place", "wrong"),
    [
        ([0, 1, 2], 3, ""),
        ([0, 1, 1], 2, "has more than one run"),
        ([0, 2], 3, "have no run"),
        ([0, 1], 3, "have no run"),
        ([0, 1], 1, "has more than one run"),
    ],
)
def test_the_checker_sees_lost_and_repeated_slots(places: list[int], next_place: int, wrong: str) -> None:
    found = violations_of_slots([_FIRST + _EVERY * place for place in places], _FIRST + _EVERY * next_place)
    assert len(found) == bool(wrong)
    assert all(wrong in each for each in found)


async def run(url: str, folder: Path, sabotage: str = "") -> list[str]:
    """Run a schedule through the deaths of its workers, and return what is wrong with its runs."""
    sql = await asyncpg.connect(url)
    try:
        return await run_on(sql, url, folder, sabotage)
    finally:
        sql.terminate()


async def run_on(sql: asyncpg.Connection[Any], url: str, folder: Path, sabotage: str) -> list[str]:
    await sql.execute("create table public.ran (slot timestamptz, id uuid)")
    deaths = launched = 0
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    log = (folder / "workers.log").open("ab")

    def launch() -> subprocess.Popen[bytes]:
        nonlocal launched
        launched += 1
        environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "SCHEDULE_SEED": f"{seed} {launched}"}
        environment["CHAOS_SABOTAGE"] = sabotage
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.schedule_app:app"]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log)

    workers = [launch() for _ in range(3)]

    async def enough() -> bool:
        nonlocal deaths
        for place, worker in enumerate(workers):
            if worker.poll() is not None:
                deaths += 1
                workers[place] = launch()
        return deaths >= _DEATHS

    try:
        await eventually(enough, f"{_DEATHS} deaths", timeout=200)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        log.close()
    async with Penstock(url) as app:
        [schedule] = await app.list_schedules()
    # The runs that are still open belong to dead workers.
    enqueued = await sql.fetch("select id, (data ->> 'at')::timestamptz as slot from penstock.queued_jobs")
    waiting = len(enqueued)
    enqueued += await sql.fetch("select id, (data ->> 'at')::timestamptz as slot from penstock.archived_jobs")
    assert schedule.next_at is not None
    found = violations_of_slots((row["slot"] for row in enqueued), schedule.next_at)
    assert len({row["slot"] for row in enqueued}) >= (1 if sabotage else _DEATHS)
    # A job that ran again after a crash ran for its own slot.
    of = {row["id"]: row["slot"] for row in enqueued}
    for row in await sql.fetch("select id, slot from public.ran"):
        if of.get(row["id"]) != row["slot"]:
            found.append(f"the job {row['id']} ran for {row['slot']}, and was enqueued for {of.get(row['id'])}")
    statuses = await sql.fetch("select distinct status::text, reason from penstock.archived_jobs")
    found += [f"runs {row['status']}: {row['reason']}" for row in statuses if tuple(row) != ("succeeded", None)]
    # Runs never overlap: a run is enqueued when the previous one is archived.
    if waiting > 1:
        found.append(f"{waiting} runs have not ended at once")
    return found


async def test_each_slot_has_one_run_whatever_is_killed_between_slot_and_run(url: str, tmp_path: Path) -> None:
    assert await run(url, tmp_path) == []


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sabotage", "expected"),
    [("slots_moved_first", "slots between .* have no run"), ("runs_with_ids_of_their_own", "the slot .* has more than one run")],
)
async def test_a_slot_and_its_run_in_two_transactions_are_found_out(
    databases: TemporaryDatabases, tmp_path: Path, sabotage: str, expected: str
) -> None:
    async def one(folder: Path) -> list[str]:
        with databases.database() as url:
            return await run(url, folder, sabotage)

    await found_out(expected, tmp_path, one)
