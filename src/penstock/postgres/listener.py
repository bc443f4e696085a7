"""The listener: one direct connection of a process for LISTEN, which is opened again when it is lost.

A notification is a hint. Its receivers also poll, so no notification has to be delivered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import asyncpg

from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification, parse
from penstock.postgres.translation import DRIVER_ERRORS

log = get_logger("penstock.listener")


class Listener:
    """Listens on channels until it is cancelled.

    Args:
        database: Database to listen on.
        channels: Names of channels.
        dispatch: Called on the loop with each notification, and with `CONNECTED` whenever listening begins, also after a break,
            since notifications may have been missed before. Usually `Notifications.dispatch`.
    """

    def __init__(self, database: Database, channels: list[str], dispatch: Callable[[Notification], None]) -> None:
        self._database = database
        self._wanted = Counter(channels)
        self._dispatch = dispatch
        self._stirred = asyncio.Event()

    def add(self, channel: str) -> None:
        """Listen on one more channel soon; `LISTENING` reports it. Call `remove` once for each `add`."""
        self._wanted[channel] += 1
        self._stirred.set()

    def remove(self, channel: str) -> None:
        """Take back one `add`."""
        self._wanted[channel] -= 1
        if self._wanted[channel] <= 0:
            del self._wanted[channel]
        self._stirred.set()

    async def run(self) -> None:
        """Listen until cancelled; reconnect with pauses of 0.1 s growing to 5 s."""
        pause = 0.1
        while True:
            try:
                connection = await self._database.connect()
            except (DatabaseUnavailable, PenstockError) as error:
                log.warning("listen_failed", error=error, retry_in_s=round(pause, 2))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 5.0)
                continue
            try:
                await self._listen(connection)
                pause = 0.1
            except DRIVER_ERRORS as error:
                # LISTEN can also be refused at once, for example by a standby: do not repeat it without a pause.
                log.warning("listen_lost", error=error, retry_in_s=round(pause, 2))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 5.0)
            finally:
                connection.terminate()

    async def _listen(self, connection: asyncpg.Connection[Any]) -> None:
        lost = False

        def losing(_: object) -> None:
            nonlocal lost
            lost = True
            self._stirred.set()

        connection.add_termination_listener(losing)
        listened: set[str] = set()
        await self._keep_up(connection, listened)
        self._dispatch(Notification(Kind.CONNECTED))
        while not lost:
            if not await wait_for_event(self._stirred, 30):
                # A connection can be lost silently (a firewall, a pulled cable): check it at intervals.
                await connection.fetchval("select 1", timeout=10)
            if not lost:
                for channel in await self._keep_up(connection, listened):
                    self._dispatch(Notification(Kind.LISTENING, channel))

    async def _keep_up(self, connection: asyncpg.Connection[Any], listened: set[str]) -> list[str]:
        """Listen on the channels that are wanted now, and on no others. Returns the new ones."""
        self._stirred.clear()
        new = [channel for channel in self._wanted if channel not in listened]
        for channel in new:
            await connection.add_listener(channel, self._received)
            listened.add(channel)
        for channel in [channel for channel in listened if channel not in self._wanted]:
            listened.discard(channel)
            await connection.remove_listener(channel, self._received)
        return new

    def _received(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        if (notification := parse(str(payload))) is None:
            log.debug("notification_not_understood")
        else:
            self._dispatch(notification)
