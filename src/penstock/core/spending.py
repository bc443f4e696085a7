"""What reading costs the database, for whom it may be too much.

What is dear is read seldom. How dear it is does not follow from the time that it took, which beside a full machine is the time
for which it waited: see `penstock.postgres.counting`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Spent:
    """What statements cost the database.

    Attributes:
        statements: How many there were.
        cost_s: Seconds of a processor: as long as they took, but no longer than what they have read can take, so that the time
            for which they waited, for a processor, a disk or a lock, is not counted.
        ended: Whether no more are counted: tasks that were started meanwhile go on.
    """

    statements: int = 0
    cost_s: float = 0.0
    ended: bool = False

    def add(self, cost_s: float) -> None:
        """Add a statement."""
        self.statements += 1
        self.cost_s += cost_s

    def of(self, took_s: float) -> float:
        """The cost of what took so long: that of its statements, or all of its time when none was counted."""
        return self.cost_s if self.statements else took_s


_spent: ContextVar[Spent | None] = ContextVar("penstock_spent", default=None)


@contextmanager
def spending() -> Iterator[Spent]:
    """Count what the statements of this task cost in the block. Each takes a transaction then, so this is for what is rare."""
    spent = Spent()
    token = _spent.set(spent)
    try:
        yield spent
    finally:
        spent.ended = True
        _spent.reset(token)


def spent_here() -> Spent | None:
    """What counts the statements of this task; None: they are not counted."""
    spent = _spent.get()
    return None if spent is None or spent.ended else spent
