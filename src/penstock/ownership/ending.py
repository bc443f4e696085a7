"""What still ends in slots that were lost, while the same process may get them back."""

from __future__ import annotations

import asyncio
import time


class Ending:
    """Cancelled tasks by slot, each until it is done or its time is over."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], tuple[int, float]] = {}

    def add(self, task: asyncio.Task[None], slot: int, within: float) -> None:
        """Count a task for at most so many seconds: others, too, get a slot whose handlers do not end."""
        self._tasks[task] = (slot, time.monotonic() + within)
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    def holds(self, slot: int) -> bool:
        """Whether something of a slot still ends."""
        now = time.monotonic()
        return any(of == slot and now < until for of, until in self._tasks.values())
