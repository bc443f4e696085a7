"""The throttle: Spark waits while other processes use the machine, so that workers come first."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import psutil

_BUSY = 50.0
_LOOK_S = 1.0


def throttle(timeout: timedelta, busy: Callable[[float], float] = psutil.cpu_percent) -> bool:
    """Wait until the machine's processors are less than half busy.

    Args:
        timeout: How long to wait at most.
        busy: Measures the load of the processors over a number of seconds, in percent.

    Returns:
        False when they remained busy for all of `timeout`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        if busy(min(_LOOK_S, left)) < _BUSY:
            return True
    return False
