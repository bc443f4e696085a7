"""A process that is suspended in the midst of a transaction of several statements does not hold its locks for as long."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import psutil
import pytest

from penstock.groups import rebalance
from penstock.groups.assignors import Candidate
from penstock.postgres.database import Database
from penstock.settings import Settings
from tests.waiting import eventually

DEAD_AFTER = timedelta(seconds=2)
SESSION = UUID(int=7)
LOST = 17

# Each change of a group as a process of its own makes it, suspended by itself when it has locked the group.
CHANGES = {
    "join": 'rebalance.join(database, "g", "late", SESSION, DEAD_AFTER, {}, None)',
    "leave": 'rebalance.leave(database, "g", "first", SESSION, None)',
    "evict": "evicted(database)",
    "rebalance": 'rebalance.rebalance(database, "g", None)',
    "metadata": 'rebalance.set_metadata(database, "g", "first", {"a": 1}, None)',
    "drain": 'rebalance.drain(database, "g", "first", None)',
}
SUSPENDED = """
import asyncio, os, signal, sys
from datetime import timedelta
from uuid import UUID

from penstock import DatabaseUnavailable
from penstock.groups import queries, rebalance
from penstock.postgres.database import Database
from penstock.settings import Settings

DEAD_AFTER, SESSION = timedelta(seconds=2), UUID(int=7)
members = queries.members


async def suspended(transaction, group):
    os.kill(os.getpid(), signal.SIGSTOP)
    return await members(transaction, group)


async def evicted(database):
    # No member is evicted at the first look.
    while not await rebalance.evict(database, "g", None):
        await asyncio.sleep(0.1)


async def main():
    database = Database(sys.argv[1], Settings(dead_after=DEAD_AFTER, heartbeat_interval=DEAD_AFTER / 4))
    await database.open()
    queries.members = suspended
    try:
        await {change}
    except DatabaseUnavailable:
        # The connection is lost, and the next call gets a new one.
        await database.fetch("select 1")
        sys.exit(17)
    finally:
        await database.close()


asyncio.run(main())
"""


@pytest.mark.parametrize("change", CHANGES)
async def test_a_suspended_process_does_not_keep_a_group_locked(url: str, sql: asyncpg.Connection[Any], change: str) -> None:
    await sql.execute("select penstock.declare_group('g', 4)")
    await sql.execute("select penstock.join_group('g', 'first', $1, $2)", SESSION, DEAD_AFTER)
    if change == "evict":
        await sql.execute("update penstock.members set seen_at = now() - interval '1 hour'")
    with subprocess.Popen([sys.executable, "-c", SUSPENDED.replace("{change}", CHANGES[change]), url]) as process:
        try:
            await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "the suspension", timeout=60)
            # It has locked the group, and the lock is free before the process continues.
            async with asyncio.timeout(60), sql.transaction():
                await sql.execute("select penstock.lock_group('g')")
        finally:
            process.send_signal(signal.SIGCONT)
        assert await asyncio.to_thread(process.wait, 60) == LOST


async def test_a_rule_may_take_longer_than_a_transaction_may_idle(url: str, sql: asyncpg.Connection[Any]) -> None:
    await sql.execute("select penstock.declare_group('g', 1, 'custom')")
    await sql.execute("select penstock.join_group('g', 'first', $1, $2)", SESSION, timedelta(minutes=1))
    await sql.execute(
        "insert into penstock.slots (group_name, slot, key, changed_at)"
        " select 'g', n, 'k' || n, now() from generate_series(1, 120) as n"
    )

    def slow(key: str, workers: Sequence[Candidate]) -> int:
        time.sleep(0.05)
        return 0

    database = Database(url, Settings(dead_after=timedelta(seconds=4), heartbeat_interval=timedelta(seconds=1)))
    await database.open()
    try:
        assert await rebalance.rebalance(database, "g", slow) == 120
    finally:
        await database.close()
