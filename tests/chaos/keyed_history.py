"""The checker of what was promised of keys, beside that of `history`: order, one at a time, and recovery in time (P6, P9)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

from history import Event


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker process that did nothing from `at` on: killed, or stopped until `back` (and fenced then)."""

    worker: str
    at: float
    back: float = float("inf")


@dataclass(slots=True)
class Run:
    """One attempt as it was seen."""

    n: int
    attempts: int
    worker: str
    begin: float
    end: float
    outcome: str


def runs_by_key(events: list[Event], gone: list[Gone], succeeded: dict[str, int]) -> dict[str, list[Run]]:
    """The runs of each key in the order of their begin. A run whose worker was gone ended then, unless it counted after all."""
    runs: dict[str, list[Run]] = defaultdict(list)
    open_runs: dict[tuple[str, int, str], Run] = {}
    for event in events:
        key, _, n = event.name.rpartition("/")
        place = (event.id, event.attempts, event.worker)
        if event.kind == "started":
            run = Run(int(n), event.attempts, event.worker, event.at, float("inf"), "")
            open_runs[place] = run
            runs[key].append(run)
        elif event.kind == "ended" and (ended := open_runs.get(place)) is not None:
            ended.end, ended.outcome = event.at, event.outcome
    for key, each in runs.items():
        for run in each:
            counted = run.outcome == "succeeded" and succeeded.get(f"{key}/{run.n}") == run.attempts
            for absence in gone:
                if not counted and absence.worker == run.worker and run.begin <= absence.at < run.end:
                    # What it still did when it came back no longer counted.
                    run.end = absence.at
                    run.outcome = "lost"
    return runs


def check_keys(events: list[Event], gone: list[Gone], succeeded: dict[str, int], failed: set[str], within_s: float) -> list[str]:
    """The violations, in words.

    Args:
        events: The recorded history; the name of an event is "key/n", n counting up in the order of enqueueing.
        gone: When worker processes were killed or stopped.
        succeeded: Names of the jobs that were archived as succeeded, with the number of the attempt that did.
        failed: Names of jobs that were archived as failed.
        within_s: By when the work of a worker that is gone runs again.
    """
    violations = []
    for key, runs in runs_by_key(events, gone, succeeded).items():
        for before, after in itertools.pairwise(runs):
            if after.begin < before.end:
                violations.append(
                    f"P6: {key}/{after.n} began on {after.worker} at {after.begin:.3f} while {key}/{before.n} ran on"
                    f" {before.worker} until {before.end:.3f}"
                )
            elif before.outcome == "lost" and after.begin - before.end > within_s:
                violations.append(f"P9: {key} stood still for {after.begin - before.end:.1f} s after {before.worker} was gone")
        first_end: dict[int, float] = {}
        for run in runs:
            if run.outcome == "succeeded":
                first_end.setdefault(run.n, run.end)
        seen: set[int] = set()
        for run in runs:
            if run.n in seen:
                continue
            seen.add(run.n)
            for earlier in range(run.n):
                if f"{key}/{earlier}" in failed:
                    continue
                if first_end.get(earlier, float("inf")) > run.begin:
                    violations.append(f"P6: {key}/{run.n} first began at {run.begin:.3f}, before {key}/{earlier} was done")
                    break
    return violations


def check_standing(events: list[Event], gone: list[Gone], wanted: set[str], until: float, within_s: float) -> list[str]:
    """Where two runs of a standing job overlapped, where one was missing for too long, and where an old run's state came back.

    Args:
        events: The recorded history: began and stopped, with an id for each run; attempts: which run by the state it was given.
        gone: When worker processes were killed or stopped.
        wanted: The keys that were wanted from begin to end.
        until: When they were wanted no longer.
        within_s: For how long a key may have no run.
    """
    runs: dict[str, dict[str, Run]] = defaultdict(dict)
    for event in events:
        if event.kind == "began":
            runs[event.name][event.id] = Run(event.attempts, event.attempts, event.worker, event.at, until, "")
        elif event.kind == "stopped" and event.id in runs[event.name]:
            runs[event.name][event.id].end = event.at
    violations = [f"P2: the standing job {key} never ran" for key in sorted(wanted - set(runs))]
    for key, by_id in runs.items():
        each = sorted(by_id.values(), key=lambda run: run.begin)
        for run in each:
            for absence in gone:
                # One that goes on after it was stopped is still the right one; one that ends right away was fenced meanwhile.
                if absence.worker == run.worker and run.begin <= absence.at < run.end < absence.back + 1.0:
                    run.end = absence.at
        for before, after in itertools.pairwise(each):
            if after.begin < before.end:
                violations.append(
                    f"P6: {key} began on {after.worker} at {after.begin:.3f}, ran on {before.worker} until {before.end:.3f}"
                )
            elif after.n < before.n:
                # Every run hands on what it got plus one, or, when it could not, what it got.
                violations.append(f"P4: {key} got the state of run {after.n} on {after.worker} after run {before.n}")
            elif after.begin - before.end > within_s:
                violations.append(f"P9: {key} did not run for {after.begin - before.end:.1f} s")
    return violations
