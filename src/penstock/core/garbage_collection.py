"""The garbage collector, where many objects are made that all live on.

A batch of jobs is thousands of objects that live until the batch is settled. By default the collector examines the youngest
objects after 700 new ones, and so examines the same jobs again and again, for a third of the processor time of a worker of short
keyed jobs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 20_000
_changing = threading.Lock()
_working = 0
_usual = (0, 0, 0)


def collect_seldom() -> None:
    """Collect after 20,000 new objects, and never examine those that exist now. Only for a process that Penstock owns."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 10)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect after 20,000 new objects while a worker runs, and as usual when the last one of the process has ended.

    What the worker makes for a job is in no cycle of references. A threshold that is higher, and one of 0, which switches the
    collector off, stay as they are.
    """
    global _working, _usual
    with _changing:
        _working += 1
        if _working == 1:
            _usual = gc.get_threshold()
            if 0 < _usual[0] < _YOUNG:
                gc.set_threshold(_YOUNG, *_usual[1:])
    try:
        yield
    finally:
        with _changing:
            _working -= 1
            if _working == 0 and gc.get_threshold() == (_YOUNG, *_usual[1:]):
                gc.set_threshold(*_usual)


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
