"""Notifications: one direct connection of a process that listens, and comes back when it is lost.

A notification is a hint. Whoever relies on it also polls, so nothing here must be delivered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import asyncpg
import structlog

from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.postgres.database import Database
from penstock.waiting import happens

log = structlog.get_logger("penstock.listener")


class Listener:
    """Listens on channels until it is cancelled.

    Args:
        database: Where.
        channels: Names of channels.
        heard: Called on the loop with each payload, and with "connected" whenever listening began (anew), since
            something may have been missed before.
    """

    def __init__(self, database: Database, channels: list[str], heard: Callable[[str], None]) -> None:
        self._database = database
        self._channels = channels
        self._heard = heard

    async def run(self) -> None:
        """Listen, for ever; reconnect with pauses of 0.1 s growing to 5 s."""
        pause = 0.1
        while True:
            try:
                connection = await self._database.connect()
            except (DatabaseUnavailable, PenstockError) as error:
                log.warning("listen_failed", error=error.message, retry_in_s=round(pause, 2))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 5.0)
                continue
            try:
                await self._listen(connection)
                pause = 0.1
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                # Also when it is refused at once, as by a standby: not in a tight loop.
                log.warning("listen_lost", error=str(error), retry_in_s=round(pause, 2))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 5.0)
            finally:
                connection.terminate()

    async def _listen(self, connection: asyncpg.Connection[Any]) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        for channel in self._channels:
            await connection.add_listener(channel, self._received)
        self._heard("connected")
        while not lost.is_set():
            if not await happens(lost, 30):
                # A connection can die without a word (a firewall, a pulled cable): ask now and then.
                await connection.fetchval("select 1", timeout=10)

    def _received(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._heard(str(payload))
