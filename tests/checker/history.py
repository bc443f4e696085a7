"""The events that chaos tests record, and the runs of a history.

Handlers and tests record events, each with a time of one monotonic clock (all processes are on one machine).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THAW_S = 1.0
"""For so long a worker that was stopped and is back may go on with what it lost, until it has noticed."""

SLACK_S = 0.1
"""By so much a time of the database may differ from one of a process."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a job. The outcome of an ended run is succeeded, failed, or interrupted (its worker stopped it).

    `kind` is enqueued (acknowledged), cancelling (asked for), cancelled (acknowledged), begun (its mark was written, see
    `begin_jobs`), started or ended; `attempt` is the number of the attempt, `value` the payload as text.
    """

    kind: str
    id: str
    name: str
    at: float
    attempt: int = 0
    worker: str = ""
    outcome: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker process that did nothing from `at` on: it was killed, or suspended until `back`."""

    worker: str
    at: float
    back: float = float("inf")


@dataclass(slots=True)
class Run:
    """One observed attempt; without an observed end it lasts until the end of the history."""

    id: str
    name: str
    attempt: int
    worker: str
    begin: float
    end: float = float("inf")
    outcome: str = ""
    value: str = ""
    lost_at: float | None = None
    """When its worker was gone in the midst of it."""

    @property
    def until(self) -> float:
        """When the run ended for other workers: when its worker was gone, if it was."""
        return self.end if self.lost_at is None else self.lost_at


@dataclass(slots=True)
class Absences:
    """When workers were gone, and when the database was away, which has the same effect on all workers.

    A span of `away` ends when workers have had the time to find the database again. Only then does a worker that has returned
    learn what it lost.
    """

    gone: Sequence[Gone]
    thaw_s: float = THAW_S
    away: Sequence[tuple[float, float]] = ()
    _by_worker: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    _deaths: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in self.gone:
            told = max(
                (end for begin, end in self.away if begin <= each.back + self.thaw_s and each.back <= end), default=each.back
            )
            self._by_worker.setdefault(each.worker, []).append((each.at, each.back, told + self.thaw_s))
            if each.back == float("inf"):
                self._deaths[each.worker] = each.at

    def during(self, worker: str, begin: float, end: float) -> float | None:
        """When the worker was gone between the two times, if it was, and had little time to work after its return."""
        for at, back, until in self._by_worker.get(worker, ()):
            # A process that was killed after its return did nothing from then on either.
            ended = end if back == float("inf") else min(end, self._deaths.get(worker, end))
            if begin <= at < ended <= until:
                return at
        for away, back in self.away:
            if begin < back and away < end <= back + self.thaw_s:
                return max(begin, away)
        return None

    def between(self, worker: str, begin: float, end: float) -> bool:
        """Whether the worker was gone during a part of this time."""
        return any(at < end and until > begin for at, _, until in self._spans(worker))

    def thawing(self, worker: str, at: float) -> bool:
        """Whether the worker had returned shortly before."""
        return any(back <= at <= until for _, back, until in self._spans(worker))

    def _spans(self, worker: str) -> list[tuple[float, float, float]]:
        return self._by_worker.get(worker, []) + [(at, back, back + self.thaw_s) for at, back in self.away]


def read(path: Path) -> list[Event]:
    """The events of a file with one JSON object a line; a torn last line of a killed process is left out."""
    events = []
    for line in path.read_text("utf-8").splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        events.append(Event(**fields))
    return sorted(events, key=lambda event: event.at)


def runs_of(events: Iterable[Event]) -> list[Run]:
    """All runs in the order of their begin."""
    runs: list[Run] = []
    open_runs: dict[tuple[str, int, str], Run] = {}
    for event in sorted(events, key=lambda event: event.at):
        place = (event.id, event.attempt, event.worker)
        if event.kind == "started":
            run = Run(event.id, event.name, event.attempt, event.worker, event.at, value=event.value)
            open_runs[place] = run
            runs.append(run)
        elif event.kind == "ended" and (ended := open_runs.pop(place, None)) is not None:
            ended.end, ended.outcome = event.at, event.outcome
    return runs


def by_id(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each job, in the order of their begin."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.id].append(run)
    return found


def lose(runs: Iterable[Run], absences: Absences, counted: dict[str, int]) -> None:
    """Mark the runs that ended with their worker.

    Args:
        runs: The runs.
        absences: When workers were gone.
        counted: The number of the attempt with which a job succeeded, by id: that run was not lost.
    """
    for run in runs:
        if run.outcome != "succeeded" or counted.get(run.id) != run.attempt:
            run.lost_at = absences.during(run.worker, run.begin, run.end)
