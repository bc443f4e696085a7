"""Leaders are killed, suspended and continued: each leadership has one writer, and there is always a next one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import Penstock
from tests.chaos.sabotage import Edit, Sabotage
from tests.waiting import eventually

pytestmark = pytest.mark.chaos
SCHEMA = """
create table public.steps (number bigint generated always as identity, pid integer, epoch bigint, at timestamptz);
create table public.refusals (pid integer, epoch bigint);
"""
# The worker also stops the task of a leader that was replaced. That is a second line of defence, in the process that may be late.
UNFENCED = Sabotage(
    r"\d+ wrote under the leadership \d+ after",
    (Edit("check_leader", r"and owner = p_fence ->> 'member' and epoch = \(p_fence ->> 'epoch'\)::bigint"),),
    worker="leadership_kept",
)


class Processes:
    """Processes that all could lead."""

    def __init__(self, url: str, sabotage: str = "") -> None:
        self.env = {**os.environ, "PENSTOCK_DATABASE_URL": url, "CHAOS_SABOTAGE": sabotage}
        self.all: dict[int, subprocess.Popen[bytes]] = {}

    def add(self) -> int:
        """Start one."""
        command = [sys.executable, "-m", "penstock", "worker", "tests.worker.leading_app:app"]
        process = subprocess.Popen(command, env=self.env, cwd=Path(__file__).parents[2])
        self.all[process.pid] = process
        return process.pid

    def close(self) -> None:
        """Kill all."""
        for process in self.all.values():
            process.kill()
            process.wait()


async def leader(sql: Any, other_than: int = 0) -> int:
    """The process that writes, when that is another one."""

    async def found() -> Any:
        row = await sql.fetchrow(
            "select pid, at > clock_timestamp() - interval '1 s' from public.steps order by number desc limit 1"
        )
        pid, recent = row or (0, False)
        return pid if recent and pid != other_than else None

    return int(await eventually(found, f"a leader other than {other_than}", 90))


def violations(steps: list[tuple[int, int]]) -> list[str]:
    """What is wrong with (pid, epoch) of all steps, in the order in which they were committed."""
    found = []
    for (pid, epoch), (next_pid, next_epoch) in pairwise(steps):
        if next_epoch < epoch:
            found.append(f"{next_pid} wrote under the leadership {next_epoch} after {pid} had written under {epoch}")
        elif next_epoch == epoch and next_pid != pid:
            found.append(f"{pid} and {next_pid} wrote under the same leadership {epoch}")
    return found


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [([(1, 1), (1, 1), (2, 2)], 0), ([(1, 1), (2, 2), (1, 1)], 1), ([(1, 1), (2, 1)], 1), ([], 0)],
)
def test_the_checker_sees_two_leaders(steps: list[tuple[int, int]], wrong: int) -> None:
    assert len(violations(steps)) == wrong


@asynccontextmanager
async def led(url: str, sql: Any, faults: Sequence[str], sabotage: str = "") -> AsyncIterator[None]:
    """Processes that could lead, of which each leader in turn was killed or suspended until another one led."""
    await sql.execute(SCHEMA)
    processes = Processes(url, sabotage)
    try:
        for _ in range(3):
            processes.add()
        leads = await leader(sql)
        for fault in faults:
            if fault == "kill":
                os.kill(leads, signal.SIGKILL)
                processes.all[leads].wait()
                processes.add()
                leads = await leader(sql, leads)
            else:
                os.kill(leads, signal.SIGSTOP)
                suspended, leads = leads, await leader(sql, leads)
                os.kill(suspended, signal.SIGCONT)
        yield
    finally:
        processes.close()


async def steps_of(sql: Any) -> list[tuple[int, int]]:
    return [tuple(step) for step in await sql.fetch("select pid, epoch from public.steps order by number")]


async def test_a_leader_that_is_killed_or_suspended_is_replaced_and_there_are_never_two(
    app: Penstock, url: str, sql: Any
) -> None:
    choose = random.Random(7)
    async with led(url, sql, ["kill" if choose.random() < 0.5 else "suspend" for _ in range(4)]):
        steps = await steps_of(sql)
        assert violations(steps) == []
        assert len({epoch for _, epoch in steps}) >= 5
        [record] = await app.leaders()
        assert record.epoch >= steps[-1][1] and record.failures == 0


@pytest.mark.soak
async def test_a_leadership_without_its_fence_is_found_out(app: Penstock, url: str, sql: Any) -> None:
    await app.migrate()
    await UNFENCED.prepare(app)
    async with led(url, sql, ["suspend"], UNFENCED.worker):

        async def seen() -> list[str]:
            return [each for each in violations(await steps_of(sql)) if re.match(UNFENCED.expected, each)]

        await eventually(seen, "the second leader")


@pytest.mark.soak
async def test_the_fence_alone_refuses_a_leader_that_was_replaced(url: str, sql: Any) -> None:
    async with led(url, sql, ["suspend"], UNFENCED.worker):
        await eventually(lambda: sql.fetchval("select count(*) from public.refusals"), "a refusal")
        assert violations(await steps_of(sql)) == []
