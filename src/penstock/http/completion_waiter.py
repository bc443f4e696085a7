"""Waiting for jobs or messages to finish: one look-up for all that are waited for in this process, not one for each.

`?wait=` and publishers that wait for outcomes use it. While no request waits, it asks the database nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import PenstockError
from penstock.jobs import http_queries
from penstock.postgres.database import Database
from penstock.topics import queries as topics

log = get_logger("penstock.http")
_SHORTEST_S, _LONGEST_S = 0.02, 0.5


class CompletionWaiter:
    """Tells when something is finished.

    Args:
        database: Database to look in.
        stopping: Set when the server stops; every wait ends then.
        look: Finds out which of some ids are not finished.
    """

    def __init__(
        self,
        database: Database,
        stopping: asyncio.Event,
        look: Callable[[Database, list[UUID]], Awaitable[Container[UUID]]],
    ) -> None:
        self._database = database
        self._unfinished = look
        self._stopping = stopping
        self._waiting: dict[UUID, set[asyncio.Event]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = _SHORTEST_S

    async def finished(self, id: UUID, within: float) -> None:
        """Return when it is finished, when `within` seconds are over, or at shutdown."""
        if self._stopping.is_set():
            return
        event = asyncio.Event()
        self._waiting.setdefault(id, set()).add(event)
        self._pause = _SHORTEST_S
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="penstock-completion-waiter")
        try:
            await wait_for_event(event, within)
        finally:
            events = self._waiting.get(id)
            if events is not None:
                events.discard(event)
                if not events:
                    self._waiting.pop(id, None)

    def stop(self) -> None:
        """End all waits."""
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def _look(self) -> None:
        while self._waiting:
            ids = list(self._waiting)
            try:
                there = await self._unfinished(self._database, ids)
            except PenstockError as error:
                log.warning("completion_look_failed", error=error)
            else:
                for id in ids:
                    if id not in there:
                        for event in self._waiting.pop(id, ()):
                            event.set()
            # Short at first, for requests that wait for quick jobs; longer while nothing new is waited for.
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 1.2, _LONGEST_S)


class JobWaiter(CompletionWaiter):
    """Waits for jobs."""

    def __init__(self, database: Database, stopping: asyncio.Event) -> None:
        super().__init__(database, stopping, http_queries.attempts_of)


class MessageWaiter(CompletionWaiter):
    """Waits until every receiver of a message has settled its copy."""

    def __init__(self, database: Database, stopping: asyncio.Event) -> None:
        super().__init__(database, stopping, topics.unfinished)
