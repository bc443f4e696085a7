"""The history checker: holds what was promised against what was recorded.

Handlers and the test record events, each with a time of one monotonic clock (all processes are on one machine). At the end the
tables say what became of each job. The checker knows nothing of how Penstock works.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a job: `kind` is enqueued (acknowledged), started or ended."""

    kind: str
    id: str
    name: str
    at: float
    attempts: int = 0
    worker: str = ""
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Final:
    """A job as a table has it at the end; `at` is when it finished, on the clock of the events."""

    id: str
    name: str
    status: str
    attempts: int
    finished: bool
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for a job type."""

    at_most_once: bool = False
    concurrency: int | None = None


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


def check(
    events: list[Event],
    final: list[Final],
    rules: dict[str, Rules],
    killed: dict[str, float],
    *,
    healed_within: float = float("inf"),
) -> list[str]:
    """The violations of the promises, in words; none is what everybody hopes for.

    Args:
        events: The recorded history.
        final: All rows of queued_jobs and archived_jobs after the queue was drained.
        rules: What holds for each type.
        killed: When which worker process was killed.
        healed_within: Seconds in which what a killed worker ran has to run again, or to be over. Types with a concurrency
            are left out: their jobs also wait for each other.
    """
    violations: list[str] = []
    rows = Counter(row.id for row in final)
    by_id = {row.id: row for row in final}
    starts: dict[str, list[Event]] = defaultdict(list)
    ends: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == "enqueued" and event.id not in rows:
            violations.append(f"P1: {event.name} {event.id} was acknowledged and is in no table")
        elif event.kind == "started":
            starts[event.id].append(event)
        elif event.kind == "ended":
            ends[event.id].append(event)

    for id, count in rows.items():
        if count > 1:
            violations.append(f"P10: {id} is there {count} times")
    for row in final:
        if not row.finished:
            violations.append(f"P2: {row.name} {row.id} is {row.status} after the drain")
        if rules[row.name].at_most_once and len(starts[row.id]) > 1:
            violations.append(f"P3: {row.name} {row.id} was started {len(starts[row.id])} times")
        if row.status == "succeeded":
            good = {event.attempts for event in ends[row.id] if event.outcome == "succeeded"}
            if row.attempts not in good:
                violations.append(
                    f"P4: {row.name} {row.id} succeeded with attempt number {row.attempts}, but runs say {sorted(good)}"
                )
        numbers = [event.attempts for event in starts[row.id]]
        if len(numbers) != len(set(numbers)):
            violations.append(f"P4: {row.name} {row.id} was started twice with the same attempt number: {numbers}")
    for id in starts:
        if id not in by_id:
            violations.append(f"P1: {id} was started and is in no table")

    violations += _over_limit(starts, ends, rules, killed)
    for id, seconds in healing(events, final, killed).items():
        if seconds > healed_within and rules[starts[id][0].name].concurrency is None:
            violations.append(f"P9: {id} of a killed worker was without one for {seconds:.1f} s")
    return violations


def healing(events: list[Event], final: list[Final], killed: dict[str, float]) -> dict[str, float]:
    """For each job that ran on a worker when that was killed: seconds until it ran again or was over."""
    by_id: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        by_id[event.id].append(event)
    over = {row.id: row.at for row in final if row.finished}
    waited: dict[str, float] = {}
    for id, own in by_id.items():
        for place, start in enumerate(own):
            death = killed.get(start.worker)
            if start.kind != "started" or death is None:
                continue
            later = own[place + 1 :]
            if any(event.kind == "ended" and event.worker == start.worker for event in later):
                continue
            again = [event.at for event in later if event.kind == "started"] + ([over[id]] if id in over else [])
            waited[id] = max(waited.get(id, 0.0), min(again, default=float("inf")) - death)
    return waited


def _over_limit(
    starts: dict[str, list[Event]], ends: dict[str, list[Event]], rules: dict[str, Rules], killed: dict[str, float]
) -> list[str]:
    """Where more jobs of a type ran at once than its concurrency admits. The run of a killed worker ended with it."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for id, begun in starts.items():
        for start in begun:
            if rules[start.name].concurrency is None:
                continue
            finish = next((end.at for end in ends[id] if end.attempts == start.attempts and end.worker == start.worker), None)
            finish = finish if finish is not None else killed.get(start.worker, start.at)
            changes[start.name] += [(start.at, 1), (finish, -1)]
    violations = []
    for name, moments in changes.items():
        running = highest = 0
        for _, change in sorted(moments):
            running += change
            highest = max(highest, running)
        limit = rules[name].concurrency
        if limit is not None and highest > limit:
            violations.append(f"P5: {highest} jobs of {name} ran at once, its concurrency is {limit}")
    return violations
