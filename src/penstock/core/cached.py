"""A value that is dear to read: read for all who ask at the same time, and kept for a while.

A client that may read statistics may ask as often as the network allows; the database counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from penstock.core.spending import spending

T = TypeVar("T")
_KEPT_S = 5.0
# Reading takes at most this share of a processor of the database: what costs a second of it is kept for twenty. The time for
# which it waited for one is no cost, or the value would be old just when the machine is full.
_SHARE = 20.0


class Kept(Generic[T]):
    """The latest reading, some seconds old at most, or twenty times as old as a reading costs the database.

    Args:
        read: Reads it.
        kept_s: How long a reading is kept at least.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], *, kept_s: float = _KEPT_S) -> None:
        self._read = read
        self._kept_s = kept_s
        self._value: T | None = None
        self._good_until = self._may_read_at = 0.0
        self._reading = asyncio.Lock()

    async def __call__(self, lacks: Callable[[T], bool] = lambda value: False) -> T:
        """The value. Requests that come while it is read wait for that reading; a failed one is not kept.

        Args:
            lacks: Whether a value that is kept is too old for the caller, who knows of something that it lacks. It is read again
                then, within the same share of the time.
        """
        async with self._reading:
            now = time.monotonic()
            if self._value is None or now >= self._good_until or (now >= self._may_read_at and lacks(self._value)):
                with spending() as spent:
                    self._value = await self._read()
                done = time.monotonic()
                rests = _SHARE * spent.of(done - now)
                self._may_read_at = done + rests
                self._good_until = done + max(self._kept_s, rests)
            return self._value
