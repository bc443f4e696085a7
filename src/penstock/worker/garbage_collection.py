"""The garbage collector in a process that does nothing but run jobs.

A batch of jobs is thousands of objects that live until it is settled. The collector's default looks at the youngest objects after
700 new ones, and so looks at the same jobs over and over: a third of the processor time of a worker of short keyed jobs.
"""

from __future__ import annotations

import gc

_YOUNG = 20_000


def collect_seldom() -> None:
    """Look for garbage once in 20,000 new objects, and never among what has been loaded so far. For a process of one's own."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)
