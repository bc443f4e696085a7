"""A budget of work: how much is enqueued follows from the places there are, and not from how fast a machine can enqueue."""

from __future__ import annotations

import time


class Budget:
    """The handlers' time that is enqueued for some places, which have to be able to do it.

    Args:
        per_s: Seconds of work for each second since the first question.
        ahead_s: Seconds of work that may be enqueued at once.
    """

    def __init__(self, per_s: float, ahead_s: float) -> None:
        self._per_s = per_s
        self._ahead_s = ahead_s
        self._began: float | None = None
        self._spent_s = 0.0

    def admits(self, work_s: float) -> bool:
        """Whether there is as much left; then it is spent."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if self._spent_s + work_s > self._ahead_s + self._per_s * (now - self._began):
            return False
        self._spent_s += work_s
        return True
