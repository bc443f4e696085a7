"""When something is read again: by what a reading costs the database, and by whether jobs have changed. No input or output.

A reading may take a four-hundredth of a core, all of its repetitions together. One that shows jobs follows them: it is read again
within two seconds when jobs have changed, and only half as often as it might when they have not, so that it has saved enough for
the next changes. When they change all the time, what is dear is read as often as its share allows.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 400.0
"""What costs a second is read every four hundred."""
SOONEST_S = 1.0
"""How old a reading is at least when jobs have changed since."""
LOOK_S = 1.0
"""How often it is asked whether jobs have changed."""
_LONGEST_S = 300.0
# So many readings may be made at once when as many were saved before.
_SAVED = 4


@dataclass(frozen=True, slots=True)
class Marks:
    """What tells that jobs have changed: see the function `job_marks` of the database.

    Attributes:
        numbers: They change with the jobs.
        snapshot: The transactions that had ended, as PostgreSQL writes a snapshot: `xmin:xmax:in progress`.
    """

    numbers: tuple[int, ...]
    snapshot: str


class Changes:
    """How often jobs have changed, as far as marks tell.

    Attributes:
        version: Another one after each change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._marks: Marks | None = None
        self._unsettled: frozenset[str] = frozenset()

    def note(self, marks: Marks) -> None:
        """Compare marks with those before.

        A mark may be seen before the transaction that made it ends. So the end of each transaction that was under way when there
        was a change counts as a change too.
        """
        before, self._marks = self._marks, marks
        if before is None:
            return
        under_way = frozenset(marks.snapshot.rpartition(":")[2].split(",")) - {""}
        if before.numbers != marks.numbers:
            self.version += 1
            self._unsettled |= under_way
        elif not self._unsettled <= under_way:
            self.version += 1
        self._unsettled &= under_way


class Pace:
    """When one reading is due again.

    Args:
        kept_s: How long it is kept at least when nothing tells of a change.
        follows: Whether it shows jobs, and is due when they have changed.
    """

    def __init__(self, kept_s: float, *, follows: bool) -> None:
        self._kept_s = kept_s
        self.follows = follows
        self._version = 0
        # Due at once, until it was read.
        self._due = self._soonest = self._paid_at = 0.0

    def done(self, now: float, cost_s: float, version: int) -> None:
        """It was read, at such a cost, when jobs had changed so often (`version`)."""
        lasts = min(SHARE * cost_s, _LONGEST_S)
        self._paid_at = max(self._paid_at, now) + lasts
        self._due = now + max(self._kept_s, 2 * lasts if self.follows else lasts)
        self._due = min(self._due, now + max(self._kept_s, _LONGEST_S))
        self._soonest = max(now + SOONEST_S, self._paid_at - _SAVED * lasts)
        self._version = version

    def now(self, now: float) -> None:
        """It is due now, whatever it costs: a user has changed what it shows."""
        self._due = min(self._due, now)

    def due(self, version: int) -> float:
        """When it is due, if jobs have changed so often."""
        return min(self._due, self._soonest) if self.follows and version != self._version else self._due
