"""Whether a worker makes progress, as the endpoint of its process shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Progress:
    """How a worker advances.

    Attributes:
        idle_s: For how many seconds one of its claim loops, or the event loop, has made no progress.
        running: Whether it is registered and claims.
        stopping: Whether it has been told to stop.
        places: Of each kind of place those that are taken, and all.
    """

    idle_s: float
    running: bool
    stopping: bool
    places: dict[str, tuple[int, int]]


class Progressing(Protocol):
    """A worker, or what has one."""

    def progress(self) -> Progress:
        """How it advances. May be called from any thread."""
