"""A value that is dear to read: read for all who ask at the same time, and kept for a while.

A client that may read statistics may ask as often as the network allows; the database counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_KEPT_S = 5.0
# Reading takes at most this share of the time: what takes a second is kept for twenty.
_SHARE = 20.0


class Kept(Generic[T]):
    """The latest reading, some seconds old at most, or twenty times as old as a reading takes.

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
                self._value = await self._read()
                took = time.monotonic() - now
                self._may_read_at = now + took + _SHARE * took
                self._good_until = now + took + max(self._kept_s, _SHARE * took)
            return self._value
