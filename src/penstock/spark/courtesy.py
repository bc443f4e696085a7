"""Stepping back behind whatever else a machine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import psutil

_BUSY = 50.0
_LOOK_S = 1.0


def let_others_go_first(patience: timedelta, busy: Callable[[float], float] = psutil.cpu_percent) -> bool:
    """Wait until the machine's processors are less than half busy.

    Args:
        patience: The longest wait.
        busy: How busy they are in the seconds that follow, in percent; it takes that long to say so.

    Returns:
        False when it was not so within `patience`.
    """
    deadline = time.monotonic() + patience.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        if busy(min(_LOOK_S, left)) < _BUSY:
            return True
    return False
