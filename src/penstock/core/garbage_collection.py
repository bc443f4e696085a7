"""The garbage collector, where many objects are made that all live on.

A batch of jobs is thousands of objects that live until the batch is settled. By default the collector examines the youngest
objects after 700 new ones, and so examines the same jobs again and again, for a third of the processor time of a worker of short
keyed jobs.
"""

from __future__ import annotations

import gc

_YOUNG = 20_000


def collect_seldom() -> None:
    """Collect after 20,000 new objects, and never examine those that exist now. Only for a process that Penstock owns."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)


class CollectedLater:
    """Put off collections within a synchronous block that makes many objects which all live on.

    Each thousand of new objects would otherwise start collections, which examine all objects of the application and find nothing.
    A class, since a worker enters such a block in each iteration of its loop: a generator takes three times as long.
    """

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        self._enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._enabled:
            gc.enable()
