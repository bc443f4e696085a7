"""Transactions of callers that overlap others and end late, by a commit or a rollback; and one that stays open all the time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from penstock import PenstockError
from tests.chaos.seeking import end_if_cancelled

# Longer and shorter than the time after which a claim goes past numbers that are not committed yet (0.1 s).
HOLDS_S = (0.02, 0.05, 0.3, 1.0, 3.0)
# The last one: a connection that the crash of the server ended in the midst of a call.
LOST = (PenstockError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


@asynccontextmanager
async def held_snapshot(url: str, grows: str = "penstock.archived_jobs") -> AsyncIterator[None]:
    """Keep a transaction with a snapshot and a transaction id open: vacuum removes no row that died in the meantime.

    Args:
        url: Database.
        grows: A table that is empty before, and to which the run adds rows.
    """
    connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    try:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetch("select pg_current_xact_id(), pg_current_snapshot()")
        assert await connection.fetchval(f"select count(*) from {grows}") == 0
        yield
        assert await connection.fetchval(f"select count(*) from {grows}") == 0, "its snapshot is a later one"
    finally:
        await connection.close()


async def late_transaction(
    url: str,
    calls: Sequence[Callable[[asyncpg.Connection[Any]], Awaitable[Any]]],
    chance: random.Random,
    *,
    commits: bool,
    holds_s: Sequence[float] = HOLDS_S,
) -> bool | None:
    """Make the calls in one transaction, and end it after a while.

    Args:
        url: Database.
        calls: Calls with the connection.
        chance: Decides how long the transaction stays open after each call.
        commits: Whether it is committed; otherwise it is rolled back.
        holds_s: The times, in seconds, for which it stays open after a call.

    Returns:
        Whether it was committed; None: that is not known.
    """
    try:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(url)
    except LOST:
        end_if_cancelled()
        return False
    try:
        transaction = connection.transaction()
        await transaction.start()
        for call in calls:
            await call(connection)
            # The time for which the transaction is open is what is tested.
            await asyncio.sleep(chance.choice(holds_s))
        await (transaction.commit() if commits else transaction.rollback())
        return commits
    except LOST:
        end_if_cancelled()
        return None if commits else False
    finally:
        with suppress(*LOST):
            await connection.close(timeout=5)
