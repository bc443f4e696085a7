"""How a worker was told to stop, and how long it waits for running handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from penstock.worker.roles import WorkerExecutor

_FOR_EVER_S = 1e7
_LEAVE_S = 15.0
_LEAVE_AT_ONCE_S = 2.0


class Shutdown:
    """The shutdown of one worker.

    Args:
        grace_s: Seconds that handlers have to finish.
    """

    def __init__(self, grace_s: float) -> None:
        self.requested = asyncio.Event()
        self._grace_s = grace_s
        self._retiring = False
        self._limited = asyncio.Event()
        self._at_once = asyncio.Event()

    def stop(self) -> None:
        """Stop in an orderly way; a second call stops at once, without waiting for handlers."""
        if self._retiring and not self._limited.is_set():
            self._limited.set()
            return
        if self.requested.is_set():
            self._at_once.set()
        self.requested.set()

    def retire(self) -> None:
        """Stop, and let running handlers take as long as they need; after a further `stop` they have the grace period."""
        if not self.requested.is_set():
            self._retiring = True
            self.requested.set()

    @property
    def grace_s(self) -> float:
        """Seconds that handlers in pools and consumers have to finish."""
        return _FOR_EVER_S if self._retiring else self._grace_s

    @property
    def leave_s(self) -> float:
        """Seconds for settling the results and for removing the worker's row."""
        return _LEAVE_AT_ONCE_S if self._at_once.is_set() else _LEAVE_S

    async def finished(self, executor: WorkerExecutor, members: Sequence[asyncio.Task[None]]) -> None:
        """Wait until jobs, events and runs of schedules are done and all slots are released, or the time is over."""
        if self._retiring:
            await _first_of(self._done(executor, members, None), self._limited.wait())
        await _first_of(self._done(executor, members, self._grace_s), self._at_once.wait())

    async def _done(self, executor: WorkerExecutor, members: Sequence[asyncio.Task[None]], seconds: float | None) -> None:
        await asyncio.gather(executor.finished(seconds), asyncio.wait(members, timeout=seconds))


async def _first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
