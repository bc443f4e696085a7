"""Waiting for work: for an event with a time limit, and in a loop that looks at intervals."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from penstock.core.checks import check_span

T = TypeVar("T")
ANNOUNCE_EVERY_S = 10.0
"""For how long an announcement is taken as valid. The database keeps it for 30 s."""
_SHORTEST_WAIT_S = 0.002
_FIRST_BACK_OFF_S = 0.05
_LONGEST_WAIT_S = 30.0


async def wait_for_event(event: asyncio.Event, within: float) -> bool:
    """Wait for an event, at most `within` seconds. Returns whether it happened.

    `asyncio.wait_for` is not used, because up to Python 3.11 it can swallow the cancellation of the waiting task.
    """
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return False
    return True


def idle_seconds(idle_timeout: timedelta | None) -> float | None:
    """An idle timeout in seconds. Raises `InvalidInput` when it is not a positive timedelta."""
    if idle_timeout is None:
        return None
    check_span("idle_timeout", idle_timeout)
    return idle_timeout.total_seconds()


class IdleLimit:
    """Ends an iteration that has nothing to return for a while.

    The time begins when a look at the database, made for this item, has found nothing: opening and a slow database do not count.
    Requests of several tasks or threads take turns, so that each of them has its own time.

    Args:
        idle_s: Longest time without an item in seconds; None: the iteration does not end.
    """

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = idle_s
        self._limit: asyncio.Timeout | None = None
        self._turn = asyncio.Lock()

    @property
    def asked(self) -> bool:
        """Whether an item is requested whose time has not begun."""
        return self._limit is not None and self._limit.when() is None

    def found_nothing(self) -> None:
        """A look found nothing: the time begins, unless it has begun."""
        if self._limit is not None and self._idle_s is not None and self.asked:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._idle_s)

    def expired(self) -> bool:
        """Whether the time for the current item is over, so that the iteration ends."""
        return self._limit is not None and self._limit.expired()

    async def next(self, request: Callable[[], Awaitable[T]]) -> T:
        """The next item of the iteration. Raises `StopAsyncIteration` when it does not come in time."""
        async with self._turn:
            if self._idle_s is None:
                return await request()
            try:
                async with asyncio.timeout(None) as limit:
                    self._limit = limit
                    return await request()
            except TimeoutError:
                if limit.expired():
                    raise StopAsyncIteration from None
                raise
            finally:
                self._limit = None


class Polling:
    """Decides when a loop that looks for work looks again.

    Under load it looks at once. When it found nothing it looks again and again for a short while, since work often comes in
    bursts; then it announces that it is idle, looks once more for what came in between, and waits to be woken. Announcements are
    valid for a while only, and notifications can be lost, so it also looks, and announces itself, at intervals.

    Each round of the loop calls `begin`, looks, and then one of `found`, `rest` and `back_off`.

    Args:
        poll_s: Longest wait of an idle loop in seconds, less a jitter.
        quiet_s: How long after the last find the loop looks without being announced.
        first_pauses_s: The first pauses after an announcement: a commit at the same moment may not have caused a notification.
        announce_every_s: How long an announcement is valid; 0: until the first wait that ends by itself.
        clock: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        poll_s: float,
        *,
        quiet_s: float = 0.0,
        first_pauses_s: Sequence[float] = (),
        announce_every_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_s = poll_s
        self._quiet_s = quiet_s
        self._first_pauses_s = first_pauses_s
        self._announce_every_s = announce_every_s
        self._rests = 0  # since the announcement
        self._announced_at = 0.0
        self._clock = clock
        self._woken = asyncio.Event()
        self._found_at = clock()
        self._announced = False
        self._failures = 0

    def wake(self) -> None:
        """There may be something: look."""
        self._woken.set()

    def begin(self) -> None:
        """Before a look: what wakes the loop from now on may have come too late for this look."""
        self._woken.clear()

    def found(self) -> None:
        """The look found something, so that the announcement is over."""
        self._found_at = self._clock()
        self._announced = False
        self._failures = 0

    def announce_again(self) -> None:
        """What is announced has changed: announce it before the next rest, and look at once."""
        self._announced = False
        self.wake()

    async def rest(
        self, announce: Callable[[], Awaitable[None]] | None = None, due_in_s: float | None = None, at_most_s: float | None = None
    ) -> None:
        """The look found nothing: return when the next one is due.

        Args:
            announce: Announces that the loop is idle. None: it is announced otherwise.
            due_in_s: When there will be something, as far as that is known.
            at_most_s: Longest wait.
        """
        self._failures = 0
        if self._announced and 0 < 2 * self._announce_every_s <= self._clock() - self._announced_at:
            # It was woken again and again, for nothing.
            self._announced = False
        if announce is not None and not self._announced:
            quiet_for_s = self._clock() - self._found_at
            if quiet_for_s < self._quiet_s:
                await self.wait(0.002 + quiet_for_s / 8)
                return
            await announce()
            # And look once more, since something may have come in between.
            self._announced, self._announced_at, self._rests = True, self._clock(), 0
            return
        first = self._rests < len(self._first_pauses_s)
        pause = self._first_pauses_s[self._rests] if first else self._pause()
        self._rests += 1
        if at_most_s is not None:
            pause = min(pause, at_most_s)
        if due_in_s is not None and due_in_s < pause:
            await self.wait(max(due_in_s, _SHORTEST_WAIT_S))
        elif not await self.wait(pause) and not first and self._clock() - self._announced_at >= self._announce_every_s:
            self._announced = False

    async def wait(self, seconds: float) -> bool:
        """Wait until woken, at most so long. Returns whether it was woken."""
        return await wait_for_event(self._woken, seconds)

    async def back_off(self) -> None:
        """The look failed: wait, twice as long after each failure in a row, up to the pause of an idle loop."""
        self._announced = False
        pause = min(_FIRST_BACK_OFF_S * 2.0 ** min(self._failures, 20) * random.uniform(0.7, 1.0), self._pause())
        self._failures += 1
        await asyncio.sleep(pause)

    def _pause(self) -> float:
        return min(self.poll_s, _LONGEST_WAIT_S) * random.uniform(0.7, 1.0)
