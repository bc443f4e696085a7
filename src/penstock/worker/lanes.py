"""Lanes: the places for the handlers that run in the same way, and the claimed jobs that wait for one of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from penstock.jobs.worked import WorkedType
from penstock.settings import Settings

J = TypeVar("J")
LOOKAHEAD_S = 0.1
_MEASURED_EVERY_S = 0.05


class Lane(Generic[J]):
    """The places for handlers of one kind, or for the batches of one type.

    The counts are changed by the executor, directly: a call for each job would cost measurable time.

    Args:
        places: Number of jobs that run at once.
        most_ahead: The largest number of jobs to claim beyond the places that are free.

    Attributes:
        busy: Number of places that are taken.
        done: Number of places that became free since the rate was measured.
        waiting: The claimed jobs that wait for a place, in order.
    """

    __slots__ = ("_measured_at", "_most_ahead", "_rate", "busy", "done", "places", "waiting")

    def __init__(self, places: int, most_ahead: int) -> None:
        self.places = places
        self.busy = 0
        self.done = 0
        self.waiting: deque[J] = deque()
        self._most_ahead = most_ahead
        self._rate = 0.0
        self._measured_at = time.monotonic()

    def room(self) -> int:
        """How many more jobs it can start soon: free places, and the jobs that it finishes in a tenth of a second."""
        self._measure()
        ahead = min(int(self._rate * LOOKAHEAD_S), self._most_ahead)
        have = self.busy + len(self.waiting)
        room = self.places + ahead - have
        # Many small claims cost more than a few large ones: while enough jobs wait here, claim only when half of them are done.
        return room if have == 0 or room * 2 >= ahead else 0

    def _measure(self) -> None:
        now = time.monotonic()
        passed_s = now - self._measured_at
        if passed_s >= _MEASURED_EVERY_S:
            self._rate = 0.5 * self._rate + 0.5 * self.done / passed_s
            self._measured_at, self.done = now, 0


def lanes_of(types: Mapping[str, WorkedType], settings: Settings) -> dict[str, Lane[Any]]:
    """The lanes of a worker by name: one for each kind of handler, and one for each type with a batch handler."""
    places = {"async": settings.concurrency, "thread": settings.threads, "process": settings.processes_for_handlers}
    for worked in types.values():
        if worked.batch is not None:
            # One batch gathers while another one runs.
            places[worked.lane] = 2 * worked.batch.max_batch_size
    return {name: Lane(number, settings.claim_limit) for name, number in places.items()}
