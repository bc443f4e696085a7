"""Spark's Python processes, in which the data source runs."""

from __future__ import annotations

import gc
import os
from functools import cache

_OF_SPARK = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_WORKER_FACTORY_SOCK_DIR")
"""Environment variables that Spark's Python processes have, one of them each."""


@cache
def spare_modules() -> None:
    """In a process of Spark: let the garbage collector no longer go through what has been imported so far.

    Spark collects garbage after every task and every step of planning. With the modules of Arrow and Penstock that takes longer
    than most of these steps themselves. Other processes are left alone: what they have at this time may become garbage.
    """
    if any(name in os.environ for name in _OF_SPARK):
        gc.freeze()
