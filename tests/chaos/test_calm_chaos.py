"""A join, a leave and a crash move the fewest slots that balance needs; other slots continue (P8): processes under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from penstock import NewJob, Penstock
from tests.chaos.pools_chaos import ENVIRONMENT
from tests.chaos.queue_chaos import new_id, seeded
from tests.checker.history import read, runs_of
from tests.checker.tables import pid_of
from tests.waiting import eventually

SLOTS = 16
KEYS = [f"k{n}" for n in range(48)]
NOTE_MOVES = """
create table public.chaos_moves (slot integer, before text, after text);
create function public.chaos_note() returns trigger language plpgsql security definer as $do$
begin
    insert into public.chaos_moves values (new.slot, old.owner, new.owner);
    return null;
end
$do$;
create trigger chaos_note after update on penstock.slots for each row
when (new.group_name = 'keyed' and (new.owner is distinct from old.owner or new.epoch <> old.epoch))
execute function public.chaos_note();
"""


@pytest.mark.chaos
async def test_joins_leaves_and_deaths_move_the_fewest_slots_and_the_others_go_on(url: str, tmp_path: Path) -> None:
    violations = await run_calm(url, tmp_path)
    assert violations == [], "\n".join(violations[:20])


@pytest.mark.chaos
@pytest.mark.soak
@pytest.mark.parametrize(
    ("sabotage", "violation"),
    [("slots_dealt_in_turn", "P8: a join: .* slots moved"), ("all_slots_revoked", "P8: .* were released and taken again")],
)
async def test_a_rebalance_without_calm_is_found_out(url: str, tmp_path: Path, sabotage: str, violation: str) -> None:
    violations = await run_calm(url, tmp_path, sabotage)
    assert any(re.match(violation, each) for each in violations), violations


async def run_calm(url: str, tmp_path: Path, sabotage: str = "") -> list[str]:
    """Let workers join, leave and die under load. Returns the violations."""
    violations: list[str] = []
    chance = seeded()
    history = tmp_path / "history.jsonl"
    history.touch()
    environment = {**os.environ, **ENVIRONMENT, "PENSTOCK_DATABASE_URL": url, "CHAOS_HISTORY": str(history)}
    environment |= {"PENSTOCK_HANDOVER_GRACE": "30", "CHAOS_SABOTAGE": sabotage}
    workers: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        command = [sys.executable, "-m", "penstock", "worker", "tests.chaos.pool_workload:app", "--concurrency", "8"]
        workers.append(subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL))

    async with Penstock(url) as app:
        database = await app.database()
        pool = app.pool("keyed", slots=SLOTS)
        numbers = dict.fromkeys(KEYS, 0)

        async def feed() -> None:
            """Enqueue a job for each key repeatedly, so that every slot has work."""
            while True:
                batch = []
                for key in KEYS:
                    data = {"n": numbers[key], "sleep_s": chance.choice([0, 0.01, 0.05]), "failures": 0}
                    numbers[key] += 1
                    batch.append(NewJob(data, id=new_id(chance), key=key))
                await app.enqueue_many("keyed", batch)
                # A pause of the load: there is nothing to wait for.
                await asyncio.sleep(0.3)

        async def owners() -> dict[int, str | None]:
            """The owner of each slot, once no slot moves and each worker is a member."""

            async def rested() -> dict[int, str | None] | None:
                slots = await pool.slots()
                members = {slot.owner for slot in slots}
                at_rest = len(members) == len(workers) and all(slot.owner and slot.owner == slot.target for slot in slots)
                return {slot.slot: slot.owner for slot in slots} if at_rest else None

            found: dict[int, str | None] = await eventually(rested, "the slots to come to rest", timeout=60)
            return found

        async def change(what: str, act: object, must_move: object) -> None:
            """Make a change, and compare the slots that moved with those that had to move."""
            before = await owners()
            await database.fetch("truncate public.chaos_moves")
            began = time.monotonic()
            act()  # type: ignore[operator]
            after = await owners()
            moved = {slot for slot in before if before[slot] != after[slot]}
            noted = {row["slot"] for row in await database.fetch("select distinct slot from public.chaos_moves")}
            if noted != moved:
                violations.append(f"P8: {what}: slots {noted - moved} were released and taken again by the same owner")
            if wrong := must_move(before, moved):  # type: ignore[operator]
                violations.append(f"P8: {what}: {wrong}")
            # Slots that stay continue: a job of each of their keys runs after the change, and no job was interrupted.
            staying = [key for key in KEYS if pool.slot_of(key) not in moved]
            rested = time.monotonic()

            def all_ran() -> bool:
                ran = {run.name.partition("/")[0] for run in runs_of(read(history)) if run.begin > rested}
                return set(staying) <= ran

            await eventually(all_ran, f"{what}: a job of each key that stayed")
            runs = [run for run in runs_of(read(history)) if run.name.partition("/")[0] in staying]
            times = Counter(run.id for run in runs)
            for run in runs:
                if run.begin > began and times[run.id] != 1:
                    violations.append(f"P8: {what}: {run.name} of a slot that stayed was run again")
                if run.begin > began and run.outcome not in ("", "succeeded"):
                    violations.append(f"P8: {what}: {run.name} of a slot that stayed was {run.outcome}")

        for _ in range(3):
            start()
        await eventually(lambda: _declared(app), "the pool", timeout=60)
        connection = await database.connect()
        await connection.execute(NOTE_MOVES)
        await connection.close()
        feeding = asyncio.create_task(feed())
        try:

            def a_fair_share(before: dict[int, str | None], moved: set[int]) -> str:
                share = SLOTS // 4
                return "" if len(moved) == share else f"{len(moved)} slots moved, the share of the fourth worker is {share}"

            await change("a join", start, a_fair_share)

            def end(how: signal.Signals) -> set[int]:
                ended = workers.pop(0)
                ended.send_signal(how)
                ended.wait(60)
                gone.append(str(ended.pid))
                return set()

            gone: list[str] = []

            def its_own(before: dict[int, str | None], moved: set[int]) -> str:
                had = {slot for slot, owner in before.items() if owner and pid_of(owner) == gone[-1]}
                return "" if moved == had else f"its slots were {had}, moved were {moved}"

            await change("a leave", lambda: end(signal.SIGTERM), its_own)
            await change("a death", lambda: end(signal.SIGKILL), its_own)
            return violations
        finally:
            feeding.cancel()
            for worker in workers:
                worker.kill()
                worker.wait()


async def _declared(app: Penstock) -> bool:
    return any(record.name == "keyed" for record in await app.job_types())
