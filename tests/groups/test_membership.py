"""What a membership says of itself while the database lets it wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg

from penstock import Penstock
from penstock.groups.membership import Membership
from penstock.groups.queries import declare_group
from penstock.settings import Settings
from tests.activity import seen_now
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
_WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


class Work:
    """Works on all slots that it gets, and drains them at once."""

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}

    def gained(self, slot: int, epoch: int) -> None:
        self.slots[slot] = epoch

    async def revoke(self, slot: int, epoch: int) -> bool:
        self.lost(slot, epoch)
        return True

    def lost(self, slot: int, epoch: int) -> None:
        self.slots.pop(slot, None)

    def draining(self, slot: int) -> bool:
        return False


async def join(app: Penstock, slots: int, settings: Settings | None = None) -> tuple[Membership, Work]:
    """A member that has joined a group of its own, and does not run yet."""
    database = await app.database()
    await declare_group(database, "group", slots, "sticky")
    work = Work()
    membership = Membership(database, "group", "one", work, settings or Settings())
    await membership.join()
    return membership, work


@asynccontextmanager
async def running(membership: Membership) -> AsyncIterator[None]:
    task = asyncio.create_task(membership.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_member_is_not_settled_while_it_takes_slots(app: Penstock, sql: Sql) -> None:
    membership, work = await join(app, 4)
    transaction = sql.transaction()
    await transaction.start()
    # Heartbeats read these rows: what waits is the call that takes slots.
    await sql.execute("select from penstock.slots for share")
    async with running(membership):

        async def waits() -> bool:
            return membership.settled or await seen_now(sql, _WAITING) > 0

        await eventually(waits, "a call that takes slots", 30)
        assert not membership.settled
        await transaction.commit()
        await eventually(lambda: membership.settled, "slots that were taken", 30)
        assert sorted(work.slots) == [0, 1, 2, 3]


async def test_a_member_that_the_database_does_not_answer_is_not_settled(app: Penstock, sql: Sql) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.2), dead_after=timedelta(seconds=2))
    membership, work = await join(app, 2, settings)
    async with running(membership):
        await eventually(lambda: membership.settled, "slots that were taken", 30)
        async with sql.transaction():
            await sql.execute("lock table penstock.members in access exclusive mode")
            await eventually(lambda: not work.slots, "slots that the member does not dare to work on", 30)
            assert not membership.settled
        await eventually(lambda: membership.settled, "slots that were taken", 30)
        assert sorted(work.slots) == [0, 1]
