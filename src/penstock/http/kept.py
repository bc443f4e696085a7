"""A value that is dear to read: read for all who ask at the same time, and kept for a while.

Whoever may read statistics may ask as often as the network allows; the database counts once.
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
        self._good_until = 0.0
        self._reading = asyncio.Lock()

    async def __call__(self) -> T:
        """The value. Whoever comes while it is read waits for that reading; a failed one is not kept."""
        async with self._reading:
            if self._value is None or time.monotonic() >= self._good_until:
                started = time.monotonic()
                self._value = await self._read()
                now = time.monotonic()
                self._good_until = now + max(self._kept_s, _SHARE * (now - started))
            return self._value
