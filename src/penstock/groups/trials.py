"""Trials of standing jobs and events that may crash their workers: `tables/0005_pools.sql` says why.

A process runs one trial at a time, over all its pools and consumers, so that the cause of a crash is among the suspects on trial.
The number of suspects in a trial doubles from one to the next as long as they survive. It begins with one in a process that has
crashed, and for suspects that have crashed more often than those before.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

from penstock.groups.membership import monotonic
from penstock.postgres.database import Database

SUSPECT = 2
FIRST_S = 0.5
_LONGEST_S = 300.0


def trial_s(crashes: int) -> float:
    """How long a suspect is on trial: longer with each crash, since it may run for a while before it crashes its worker."""
    return min(FIRST_S * 2.0 ** min(crashes - SUSPECT, 10), _LONGEST_S)


class Trials:
    """The trials of one process."""

    _of: ClassVar[WeakKeyDictionary[Database, Trials]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._holder: object | None = None
        self._most = 1
        self._crashes = SUSPECT
        self.until = 0.0

    @classmethod
    def of(cls, database: Database) -> Trials:
        """The trials of the process that uses this database."""
        if (found := cls._of.get(database)) is None:
            found = cls._of[database] = cls()
        return found

    def begin(self, holder: object, crashes: int | None = None) -> int:
        """Begin a trial, of suspects with so many crashes; None: the holder itself decides how many suspects are on trial.

        Returns how many may be on trial now; 0 while a trial of another holder is under way.
        """
        if self._holder is not None:
            return 0
        self._holder = holder
        if crashes is not None and crashes != self._crashes:
            self._crashes, self._most = crashes, 1
        return self._most

    def last(self, seconds: float) -> None:
        """Set how long the trial that has begun takes."""
        self.until = monotonic() + seconds

    def left_s(self, holder: object) -> float | None:
        """Seconds until the trial of a holder is over; None: it has no trial under way."""
        return max(self.until - monotonic(), 0.0) if self._holder is holder else None

    def end(self, holder: object, *, survived: bool) -> None:
        """End the trial of a holder."""
        if self._holder is holder:
            self._holder = None
            if survived:
                self._most *= 2

    def none_left(self, holder: object) -> None:
        """Reset the number of suspects: the holder has none left, and the next ones, from another process, begin with one."""
        if self._holder is None or self._holder is holder:
            self._holder, self._most, self._crashes = None, 1, SUSPECT
