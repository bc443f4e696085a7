"""A process whose clock differs from that of the database, as `CHAOS_CLOCK_S` says in seconds. Apps of the chaos call `shift`."""

from __future__ import annotations

import os
import time
from typing import Any

import uuid_utils


def shift() -> None:
    """Shift the clock of this process, and the times in the ids that it makes."""
    ahead_s = float(os.environ.get("CHAOS_CLOCK_S", "0"))
    if not ahead_s:
        return
    real, real_ns, uuid7 = time.time, time.time_ns, uuid_utils.uuid7

    def id_now() -> Any:
        return uuid7(nanoseconds=time.time_ns())

    time.time = lambda: real() + ahead_s
    time.time_ns = lambda: real_ns() + int(ahead_s * 10**9)
    vars(uuid_utils)["uuid7"] = id_now
