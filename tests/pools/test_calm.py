"""P8 by the order of events: while slots move from one worker to another, work on the other slots continues without a pause.

The handlers of the moving slots keep the handover open; they end only when every key of the other slots has run many more jobs.
If those slots paused until the end of the rebalance, neither would ever continue, and the test would fail.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg

from penstock import Job, Penstock
from penstock.groups.assignors import slot_of
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"
SLOTS = 16
EACH = 25


def keys_by_slot() -> dict[int, str]:
    """A key for each slot."""
    keys: dict[int, str] = {}
    number = 0
    while len(keys) < SLOTS:
        keys.setdefault(slot_of(f"key{number}", SLOTS), f"key{number}")
        number += 1
    return keys


class History:
    """The starts of jobs in the order in which they happened, and a gate before which the handlers of some keys wait."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.at_gate: set[str] = set()

    async def handle(self, job: Job[int]) -> None:
        key = str(job.key)
        self.starts.append((key, job.data))
        if (gate := self.gates.get(key)) is not None:
            self.at_gate.add(key)
            await gate.wait()
        await asyncio.sleep(0.001)

    def hold(self, keys: set[str]) -> asyncio.Event:
        """Let the next handlers of these keys wait until the event is set."""
        gate = asyncio.Event()
        self.at_gate.clear()
        self.gates = dict.fromkeys(keys, gate)
        return gate

    def count(self) -> dict[str, int]:
        counts: dict[str, int] = defaultdict(int)
        for key, _ in self.starts:
            counts[key] += 1
        return counts


async def test_slots_that_stay_go_on_while_others_move(app: Penstock, sql: Sql) -> None:
    history = History()
    pool = app.pool("work", slots=SLOTS, time_limit=timedelta(minutes=4))
    pool.job(history.handle)
    app.context.settings = app.settings.model_copy(
        update={"handover_grace": timedelta(minutes=3), "shutdown_grace": timedelta(minutes=3)}
    )
    keys = keys_by_slot()
    # A joiner takes the highest slots of the fullest member.
    going = {keys[slot] for slot in range(SLOTS // 2, SLOTS)}
    staying = set(keys.values()) - going

    async def feed() -> None:
        """Keep some jobs waiting for every key, those that are held too."""
        enqueued = 0
        while True:
            done = history.count()
            if min(done[key] for key in staying) + 100 > enqueued:
                await pool.enqueue_many([(key, n) for n in range(enqueued, enqueued + 50) for key in keys.values()])
                enqueued += 50
            await asyncio.sleep(0.01)

    async def owners() -> dict[int, tuple[str | None, str | None, int]]:
        return {slot.slot: (slot.owner, slot.target, slot.epoch) for slot in await pool.slots()}

    async def moving() -> bool:
        return sum(owner != target for owner, target, _ in (await owners()).values()) == SLOTS // 2

    async def others_go_on(stay: set[str]) -> None:
        before = history.count()
        await eventually(
            lambda: all(history.count()[key] >= before[key] + EACH for key in stay),
            "25 more jobs of each key that stays, in the middle of the rebalance", timeout=60,
        )  # fmt: skip

    async with Workers(app) as working:
        first = working.workers[0][0]
        feeding = asyncio.create_task(feed())
        try:
            await eventually(lambda: len(history.count()) == SLOTS, "every key")
            before = await owners()
            gate = history.hold(going)
            await eventually(lambda: history.at_gate == going, "handlers that hold their slots")

            second = await working.add()
            await eventually(moving, "the rebalance")
            await others_go_on(staying)
            assert await moving(), "the hand-over was to be under way all the time"
            gate.set()
            history.gates = {}
            await eventually(lambda: settled(pool), "the end of the rebalance")
            after = await owners()
            assert {slot: after[slot] for slot in range(SLOTS // 2)} == {slot: before[slot] for slot in range(SLOTS // 2)}
            assert all(after[slot][2] == before[slot][2] + 1 for slot in range(SLOTS // 2, SLOTS))

            # The same at a leave: what the one that stays has had all along goes on.
            gate = history.hold(going)
            await eventually(lambda: history.at_gate == going, "handlers that hold their slots")
            leaving = asyncio.create_task(working.remove(second))
            await eventually(lambda: second.stopping, "the leave")
            await others_go_on(staying)
            assert not leaving.done()
            assert {slot: owner for slot, (owner, _, _) in (await owners()).items() if slot >= SLOTS // 2} == {
                slot: after[slot][0] for slot in range(SLOTS // 2, SLOTS)
            }
            gate.set()
            history.gates = {}
            await leaving
            await eventually(lambda: settled(pool), "the end of the rebalance")
            last = await owners()
            assert {slot: last[slot] for slot in range(SLOTS // 2)} == {slot: before[slot] for slot in range(SLOTS // 2)}
            assert first in [worker for worker, _ in working.workers]
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    # Nothing of the keys that stayed was handed back or run again, and all keys kept their order.
    for key in keys.values():
        order = [n for k, n in history.starts if k == key]
        if key in staying:
            assert order == list(range(len(order)))
        assert list(dict.fromkeys(order)) == list(range(max(order) + 1))
    assert await sql.fetchval("select count(*) from penstock.archived_jobs where attempt > 1 or errors is not null") == 0


async def settled(pool: Any) -> bool:
    return all(slot.owner == slot.target and slot.owner is not None for slot in await pool.slots())
