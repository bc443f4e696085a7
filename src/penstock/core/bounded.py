"""A reading for which no caller waits longer than some seconds, whatever it waits for itself.

A time limit within a call of the database does not suffice: the call may first wait for a connection of the pool, and a call
that is cancelled tells the server so and waits for that, which a server that hangs, or a network that swallows all, never ends.
So the reading is a task of its own, which is left to end when it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

from penstock.errors import DatabaseUnavailable

T = TypeVar("T")


class Bounded(Generic[T]):
    """Reads once for all who ask at the same time.

    Args:
        read: Reads it from the database.
        within_s: Longest time that a caller waits, in seconds.
    """

    def __init__(self, read: Callable[[], Coroutine[Any, Any, T]], within_s: float) -> None:
        self._read = read
        self._within_s = within_s
        self._reading: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """What was read. Raises `DatabaseUnavailable` after the time limit, and what the reading raises.

        A reading that takes longer goes on, and the next caller waits for it too.
        """
        reading = self._reading
        if reading is None or reading.done():
            reading = self._reading = asyncio.create_task(self._read(), name="penstock-bounded-reading")
            reading.add_done_callback(seen)
        await asyncio.wait({reading}, timeout=self._within_s)
        if not reading.done():
            raise DatabaseUnavailable(f"the database has not answered for {self._within_s:g} s")
        return reading.result()

    def close(self) -> None:
        """Cancel a reading that goes on."""
        if self._reading is not None:
            self._reading.cancel()


def seen(reading: asyncio.Task[Any]) -> None:
    """Called when a reading ends: the error of one for which no caller waits any more is no news."""
    with suppress(asyncio.CancelledError):
        reading.exception()
