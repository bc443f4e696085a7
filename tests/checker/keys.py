"""The checker of keys: order, one at a time, one owner at a time, recovery in time; and of standing jobs (P4, P6, P9)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.checker.history import SLACK_S, THAW_S, Absences, Event, Gone, Run, by_id, lose, runs_of
from tests.checker.noted import ALONE_S, overlap


@dataclass(frozen=True, slots=True)
class Placed:
    """The enqueue of a job of a key: its place in its transaction, when that began, and when its commit was acknowledged."""

    transaction: int
    place: int
    begun: float
    committed: float

    def before(self, other: Placed) -> bool:
        """Whether this job has to start first. Jobs of overlapping transactions may start in either order."""
        if self.transaction == other.transaction:
            return self.place < other.place
        return self.committed < other.begun


@dataclass(frozen=True, slots=True)
class Ended:
    """The archived state of a job of a key."""

    status: str
    attempt: int
    at: float


def check_keys(
    events: Sequence[Event],
    placed: Mapping[str, Placed],
    ended: Mapping[str, Ended],
    gone: Sequence[Gone],
    *,
    within_s: float,
    cut: Sequence[Gone] = (),
    safe_silence_s: float = 0.0,
    thaw_s: float = THAW_S,
) -> list[str]:
    """The violations, as text.

    Args:
        events: The recorded history; the name of an event is "key/n", which the other arguments call id.
        placed: The enqueue of each job, by name.
        ended: The archived state of each job, by name.
        gone: When worker processes were killed or suspended.
        within_s: Seconds within which the work of a worker that is gone must run again. A job that was lost twice is a suspect
            and runs alone within `ALONE_S`, less twice the time in which other suspects ran: an owner works normally for as long.
        cut: When worker processes could not reach the database: what they did may not have been settled.
        safe_silence_s: A worker that was suspended for less than this keeps its keys.
        thaw_s: Seconds for which a worker that has returned may continue with a key that it lost.
    """
    runs = runs_of(events)
    deadly = [each for each in gone if each.back - each.at >= safe_silence_s]
    absences, excused = Absences(deadly, thaw_s), Absences([*deadly, *cut], thaw_s)
    names = {run.id: run.name for run in runs}
    counted = {id: ended[name].attempt for id, name in names.items() if name in ended and ended[name].status == "succeeded"}
    lose(runs, absences, counted)
    by_key: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_key[run.name.rpartition("/")[0]].append(run)
    alone = [run for own in by_id(runs).values() for place, run in enumerate(own) if _lost_twice(own[:place], run)]
    violations = []
    for key, own in by_key.items():
        violations += _one_at_a_time(key, own, absences, excused)
        violations += _goes_on(key, own, alone, within_s)
        violations += _order(own, placed, ended)
    return violations


def _lost_twice(before: Sequence[Run], run: Run) -> bool:
    """Whether two of the attempts before this one, of which not all were started, were lost with their workers."""
    return run.attempt - 1 - sum(each.outcome == "failed" and each.lost_at is None for each in before) >= 2


def _goes_on(key: str, runs: Sequence[Run], alone: Sequence[Run], within_s: float) -> list[str]:
    violations = []
    latest = runs[0]
    for after in runs[1:]:
        lost_at = latest.lost_at
        if lost_at is not None and after.begin > latest.until:
            waited, most = after.begin - lost_at, within_s
            if after in alone:
                others = [(run.begin, run.until) for run in alone if run.id != after.id]
                waited, most = waited - 2 * overlap(others, lost_at, after.begin), ALONE_S
            if waited > most:
                violations.append(f"P9: {key} did not run for {waited:.1f} s after {latest.worker} was gone")
        latest = max(latest, after, key=lambda run: run.until)
    return violations


def _one_at_a_time(key: str, runs: Sequence[Run], absences: Absences, excused: Absences) -> list[str]:
    violations = []
    latest = runs[0]
    for after in runs[1:]:
        if after.begin < latest.until and not absences.thawing(after.worker, after.begin):
            violations.append(
                f"P6: {after.name} began on {after.worker} at {after.begin:.3f} while {latest.name} ran on {latest.worker}"
                f" until {latest.until:.3f}"
            )
        # Of two overlapping runs the next run must not overlap the one that lasts longer.
        latest = max(latest, after, key=lambda run: run.until)
    for id, own in by_id(runs).items():
        for before, again in itertools.pairwise(own):
            if before.outcome == "succeeded" and not excused.between(before.worker, before.begin, again.begin):
                violations.append(
                    f"P4: {before.name} ({id}) ran again after it succeeded on {before.worker}, which was never gone"
                )
    return violations


def _order(runs: Sequence[Run], placed: Mapping[str, Placed], ended: Mapping[str, Ended]) -> list[str]:
    """A job that was enqueued earlier ends before a job that was enqueued later begins."""
    begun: dict[str, float] = {}
    done: dict[str, float] = {}
    for run in runs:
        begun.setdefault(run.name, run.begin)
        # The result of a lost run was refused, whenever it came.
        if run.outcome == "succeeded" and run.lost_at is None:
            done.setdefault(run.name, run.end)
        elif ended.get(run.name, Ended("", 0, 0.0)).status in ("failed", "cancelled"):
            done[run.name] = run.until
    for name, how in ended.items():
        if name in placed and name not in done and how.status in ("expired", "cancelled"):
            done[name] = float("-inf")
    violations = []
    mine = sorted((name for name in begun if name in placed), key=lambda name: begun[name])
    waiting = [name for name in mine if done.get(name, float("inf")) > begun[mine[0]]]
    for later in mine:
        for earlier in waiting:
            if placed[earlier].before(placed[later]) and done.get(earlier, float("inf")) > begun[later] + 1e-9:
                violations.append(f"P6: {later} first began at {begun[later]:.3f}, before {earlier}, enqueued earlier, was done")
                break
        waiting = [name for name in waiting if done.get(name, float("inf")) > begun[later]]
    return violations


def check_standing(
    events: Sequence[Event], gone: Sequence[Gone], wanted: set[str], until: float, *, within_s: float, thaw_s: float = THAW_S
) -> list[str]:
    """Overlapping runs of a standing job, gaps between runs that are too long, and states of older runs that returned.

    Args:
        events: The recorded history: began and stopped, with an id for each run; attempt: the number of the run in its state.
        gone: When worker processes were killed or suspended.
        wanted: The keys whose standing jobs were wanted during the whole run.
        until: The time at which they were stopped.
        within_s: Seconds for which a key may have no run.
        thaw_s: Seconds for which a worker that has returned may continue with a key that it lost.
    """
    runs: dict[str, dict[str, Run]] = defaultdict(dict)
    for event in events:
        if event.kind == "began":
            runs[event.name][event.id] = Run(event.id, event.name, event.attempt, event.worker, event.at, until)
        elif event.kind == "stopped" and event.id in runs[event.name]:
            runs[event.name][event.id].end = event.at
    absences = Absences(gone, thaw_s)
    violations = [f"P2: the standing job {key} never ran" for key in sorted(wanted - set(runs))]
    for key, own in runs.items():
        each = sorted(own.values(), key=lambda run: run.begin)
        for run in each:
            # A run that continues after a suspension may still own the key; a run that ends at once was fenced meanwhile.
            run.lost_at = absences.during(run.worker, run.begin, run.end)
        for before, after in itertools.pairwise(each):
            if after.begin < before.until:
                violations.append(
                    f"P6: {key} began on {after.worker} at {after.begin:.3f}, ran on {before.worker} until {before.until:.3f}"
                )
            elif after.attempt < before.attempt:
                # Every run passes on the number that it received plus one, or, when it could not, the number that it received.
                violations.append(f"P4: {key} got the state of run {after.attempt} on {after.worker} after run {before.attempt}")
            elif after.begin - before.until > within_s:
                violations.append(f"P9: {key} did not run for {after.begin - before.until:.1f} s")
        if each[-1].until < until - within_s - SLACK_S and key in wanted:
            violations.append(f"P9: {key} did not run for the last {until - each[-1].until:.1f} s")
    return violations
