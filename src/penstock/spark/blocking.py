"""Calls to the database from Spark's Python processes, which run no event loop: a small pool and a private loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.spark.connections import APPLICATION, Connections
from penstock.spark.processes import spare_modules

T = TypeVar("T")
_RETRY_FOR_S = 60.0


class Blocking:
    """A database for code without an event loop.

    Args:
        url: URL of the database.
    """

    def __init__(self, url: str) -> None:
        spare_modules()
        settings = Settings.read().model_copy(update={"pool_size": 1, "command_timeout": timedelta(minutes=5)})
        self.database = Database(url, settings, APPLICATION)
        self._runner = asyncio.Runner()
        self._notified: dict[str, asyncio.Event] = {}
        self._listeners: list[asyncio.Task[None]] = []
        self._runner.run(self.database.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._runner.run(work)

    def keep_trying(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work that may be repeated. While the database is away (a restart, a failover), wait for it for at most a minute."""

        async def bounded() -> T:
            async with asyncio.timeout(_RETRY_FOR_S):
                return await self.database.retrying(work)

        try:
            return self._runner.run(bounded())
        except TimeoutError:
            # One more attempt raises the error that says why.
            return self._runner.run(work())

    def listen(self, channel: str) -> asyncio.Event:
        """Listen on a channel from now on. The event is cleared, and is set at the next notification.

        The first call for a channel opens a connection, which stays until `close`. Call this from a coroutine that `run` or
        `keep_trying` runs; between two such calls the loop does not run, and a notification is seen at the next one.
        """
        if channel not in self._notified:
            notified = self._notified[channel] = asyncio.Event()
            listener = Listener(self.database, [channel], lambda _: notified.set())
            self._listeners.append(asyncio.create_task(listener.run(), name=f"penstock-spark-{channel}"))
        self._notified[channel].clear()
        return self._notified[channel]

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._close())
        self._runner.close()

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        self._listeners.clear()
        self._notified.clear()
        await self.database.close()


DATABASES = Connections(Blocking, lambda _: True, Blocking.close)
"""Databases that Spark's Python processes keep from one task to the next. They replace broken connections themselves."""
