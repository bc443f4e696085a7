"""Tasks that are still ending in slots that this process has lost and may take again."""

from __future__ import annotations

import asyncio
import time


class DrainingTasks:
    """Cancelled tasks by slot, each until it is done or its time limit has passed."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], tuple[int, float]] = {}

    def add(self, task: asyncio.Task[None], slot: int, within: float) -> None:
        """Count a task for at most `within` seconds: other members, too, get a slot whose handlers do not end."""
        self._tasks[task] = (slot, time.monotonic() + within)
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    def holds(self, slot: int) -> bool:
        """Whether a task of the slot is still ending."""
        now = time.monotonic()
        return any(of == slot and now < until for of, until in self._tasks.values())
