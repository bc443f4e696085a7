"""Trials of standing jobs and events that may end their workers: `tables/0032b_crashes_of_standing.sql` says why.

In a process there is one trial at a time, over all its pools and consumers, so that what ends the process is among those on
trial. The number of suspects in a trial doubles from one to the next as long as they survive; a process that was ended begins
with one.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from penstock.ownership.member import monotonic
from penstock.postgres.database import Database

SUSPECT = 2
_FIRST_S = 0.5
_LONGEST_S = 300.0


def trial_s(crashes: int) -> float:
    """How long a suspect is on trial: longer with each crash, since it may take its time before it ends its worker."""
    return min(_FIRST_S * 2.0 ** min(crashes - SUSPECT, 10), _LONGEST_S)


class Trials:
    """The trials of one process."""

    _of: ClassVar[WeakKeyDictionary[Database, Trials]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._holder: object | None = None
        self._most = 1
        self.until = 0.0

    @classmethod
    def of(cls, database: Database) -> Trials:
        """Those of the process that uses this database."""
        if (found := cls._of.get(database)) is None:
            found = cls._of[database] = cls()
        return found

    def begin(self, holder: object) -> int:
        """How many suspects may be on trial now; 0 while a trial of another pool is under way."""
        if self._holder is not None:
            return 0
        self._holder = holder
        return self._most

    def last(self, seconds: float) -> None:
        """Say how long the trial that has begun takes."""
        self.until = monotonic() + seconds

    def left_s(self, holder: object) -> float | None:
        """Seconds until the trial of a pool is over; None: none of its is under way."""
        return max(self.until - monotonic(), 0.0) if self._holder is holder else None

    def end(self, holder: object, *, survived: bool) -> None:
        """End the trial of a pool."""
        if self._holder is holder:
            self._holder = None
            if survived:
                self._most *= 2

    def none_left(self, holder: object) -> None:
        """A pool has no suspects any more: the next ones, who come from another process, begin with one."""
        if self._holder is None or self._holder is holder:
            self._holder, self._most = None, 1
