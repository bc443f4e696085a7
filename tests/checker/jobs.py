"""The checker of jobs: the end of each job follows from its options and from what its workers did (P1 to P5, P9, P10)."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.checker import noted as notes
from tests.checker.history import SLACK_S, THAW_S, Absences, Event, Gone, Run, by_id, lose, runs_of
from tests.checker.noted import Noted

EMPTYING_S = 5.0
"""Seconds for which a worker that is to run a job alone waits for its other jobs to end (see `penstock.worker.isolation`)."""

LOSSES_OF_A_KILLER = 3
"""A job is quarantined that was lost with two workers among other jobs, and with the third one alone."""

BEGUN_S = 5.0
"""So long after the mark that it is begun a job of an at_most_once type has started, if nothing happens to its worker."""


@dataclass(frozen=True, slots=True)
class Final:
    """The row of a job at the end of the run; `at` is when the job finished, on the clock of the events.

    `attempt` is the number of the attempt that was the last; `worker` the process that settled it ("": not known).
    """

    id: str
    name: str
    status: str
    attempt: int
    finished: bool
    at: float = 0.0
    worker: str = ""
    reason: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The options of a job type that the checker needs."""

    at_most_once: bool = False
    concurrency: int | None = None
    max_attempts: int = 5


@dataclass(frozen=True, slots=True)
class Planned:
    """The options of a job: when it expires, if it does, and whether its failure is final."""

    expires_at: float = float("inf")
    may_fail_for_good: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """A recorded history, with the faults that happened during it.

    Args:
        events: The recorded events.
        final: All rows of queued_jobs and archived_jobs after the queue was drained.
        rules: The options of each type.
        gone: When worker processes were killed or suspended.
        cut: When worker processes could not reach the database, for whatever reason: their results may have been lost.
        blocked: When the event loops of workers were blocked.
        away: When the database was away, until workers have had the time to find it again.
        planned: The options of jobs, by id; a job that is not here has none.
        healed_within: Seconds within which the jobs of a worker that is gone must run again or be finished. Types with a
            concurrency limit are left out: their jobs also wait for each other.
        safe_silence_s: A worker that was suspended for less than this keeps its jobs.
        thaw_s: Seconds for which a worker that has returned may continue with jobs that it lost.
        noted: What the database did, if that was noted. Its `worker` is the dequeuer that sends a job, not the service.
        places: The largest number of jobs that a worker marks as begun before they have started.
        withdrawn: The ids of jobs whose transaction was rolled back.
    """

    events: Sequence[Event]
    final: Sequence[Final]
    rules: Mapping[str, Rules]
    gone: Sequence[Gone] = ()
    cut: Sequence[Gone] = ()
    blocked: Sequence[Gone] = ()
    away: Sequence[tuple[float, float]] = ()
    planned: Mapping[str, Planned] | None = None
    healed_within: float = float("inf")
    safe_silence_s: float = 0.0
    thaw_s: float = THAW_S
    noted: Sequence[Noted] = ()
    places: int = 10
    withdrawn: Collection[str] = ()


def check_jobs(history: History) -> list[str]:
    """The violations of the promises, as text."""
    deadly = _deadly(history)
    absences = Absences(deadly, history.thaw_s, history.away)
    excused = Absences([*deadly, *history.cut], history.thaw_s, history.away)
    runs = _runs(history)
    of_job = by_id(runs)
    rows = {row.id: row for row in history.final}
    events: dict[str, list[Event]] = defaultdict(list)
    for event in history.events:
        events[event.id].append(event)

    # A worker whose event loop is blocked does not start the jobs that it has marked as begun.
    unstarted = Absences([*deadly, *history.cut, *history.blocked], history.thaw_s, history.away)

    violations = list(_presence(history, of_job))
    for row in history.final:
        own = of_job.get(row.id, [])
        rules = history.rules[row.name]
        if rules.at_most_once and len(own) > 1:
            violations.append(f"P3: {row.name} {row.id} was started {len(own)} times")
        violations += _overlaps(row, own, excused)
        if row.finished:
            violations += _after_the_end(row, own, absences, rules)
            planned = (history.planned or {}).get(row.id, Planned())
            violations += _ending(row, own, rules, planned, events[row.id], excused)
            if row.status == "failed" and not own:
                violations += _never_started(row, rules, events[row.id], unstarted)
    violations += _over_limit(runs, history.rules)
    for id, seconds in healing(history).items():
        row_of = rows.get(id)
        if seconds > history.healed_within and (
            history.noted or row_of is None or history.rules[row_of.name].concurrency is None
        ):
            violations.append(f"P9: {id} of a worker that was gone was without one for {seconds:.1f} s")
    violations += _unstarted(history, of_job, events)
    violations += _convictions(history.final, of_job, runs)
    if history.noted:
        everybody = [Gone("", begin, end) for begin, end in history.away]
        violations += notes.check_deaths(history.noted, [*history.gone, *history.cut, *everybody])
        violations += notes.check_told(runs, history.noted, [*history.gone, *history.cut, *history.blocked, *everybody])
        violations += notes.check_begun(runs, history.noted, [*history.gone, *history.cut, *history.blocked, *everybody])
        committed: dict[str, float] = {}
        for event in history.events:
            if event.kind == "enqueued":
                committed.setdefault(event.id, event.at)
        violations += notes.check_lines(history.noted, history.away, committed)
    return violations


def _deadly(history: History) -> list[Gone]:
    return [gone for gone in history.gone if gone.back - gone.at >= history.safe_silence_s]


def _runs(history: History) -> list[Run]:
    """All runs, with the times at which they were lost."""
    runs = runs_of(history.events)
    counted = {row.id: row.attempt for row in history.final if row.status == "succeeded"}
    lose(runs, Absences(_deadly(history), history.thaw_s, history.away), counted)
    notes.take_away((run for run in runs if counted.get(run.id) != run.attempt), history.noted)
    return runs


def _presence(history: History, of_job: Mapping[str, Sequence[Run]]) -> Iterable[str]:
    rows = Counter(row.id for row in history.final)
    values = {row.id: row.value for row in history.final}
    for event in history.events:
        if event.kind != "enqueued":
            continue
        if event.id not in rows:
            yield f"P1: {event.name} {event.id} was acknowledged and is in no table"
        elif event.value and values[event.id] and values[event.id] != event.value:
            yield f"P1: {event.name} {event.id} has another payload than was enqueued"
    for id in history.withdrawn:
        if id in of_job:
            yield f"P1: {id} was started, though the transaction that enqueued it was rolled back"
        elif id in rows:
            yield f"P1: {id} is there, though the transaction that enqueued it was rolled back"
    for id, runs in of_job.items():
        if id not in rows:
            yield f"P1: {id} was started and is in no table"
        elif any(run.value and values[id] and run.value != values[id] for run in runs):
            yield f"P1: {id} ran with another payload than it has"
    for id, count in rows.items():
        if count > 1:
            yield f"P10: {id} is there {count} times"
    for row in history.final:
        if not row.finished:
            yield f"P2: {row.name} {row.id} is {row.status} after the drain"


def _overlaps(row: Final, runs: Sequence[Run], excused: Absences) -> Iterable[str]:
    """One job runs on one worker at a time, each attempt once, and not again after it succeeded."""
    # An interrupted job was released, which uses no attempt.
    numbers = [run.attempt for run in runs if run.outcome != "interrupted"]
    if len(numbers) != len(set(numbers)):
        yield f"P4: {row.name} {row.id} was started twice with the same attempt number: {numbers}"
    longest = runs[0] if runs else None
    for before, after in itertools.pairwise(runs):
        assert longest is not None
        if before.until > longest.until:
            longest = before
        if after.begin < longest.until and not excused.thawing(after.worker, after.begin):
            yield (
                f"P4: {row.name} {row.id} began on {after.worker} at {after.begin:.3f} while it ran on {longest.worker}"
                f" until {longest.until:.3f}"
            )
        elif before.outcome == "succeeded" and not excused.between(before.worker, before.begin, after.begin):
            yield f"P4: {row.name} {row.id} ran again on {after.worker} after it succeeded on {before.worker}, never gone"


def _after_the_end(row: Final, runs: Sequence[Run], absences: Absences, rules: Rules) -> Iterable[str]:
    for run in runs:
        if run.begin > row.at + SLACK_S and (rules.at_most_once or not absences.thawing(run.worker, run.begin)):
            yield f"P2: {row.name} {row.id} began on {run.worker} {run.begin - row.at:.3f} s after it was {row.status}"


def _ending(
    row: Final, runs: Sequence[Run], rules: Rules, planned: Planned, events: Sequence[Event], excused: Absences
) -> Iterable[str]:
    """Whether the status follows from the options and the events."""
    what = f"{row.name} {row.id}"
    asked = [event.at for event in events if event.kind == "cancelling"]
    if row.status == "succeeded":
        yield from _success(row, runs)
    elif row.status == "failed":
        yield from _failure(row, runs, rules, planned, events, excused)
    elif row.status == "expired":
        if row.at < planned.expires_at - SLACK_S:
            yield f"P2: {what} was archived as expired before its time, or without one"
    elif row.status == "cancelled" and not any(at <= row.at + SLACK_S for at in asked):
        yield f"P2: {what} was archived as cancelled without a request"
    if row.status != "cancelled" and any(event.kind == "cancelled" for event in events):
        yield f"P2: {what} was said to be cancelled and is archived as {row.status}"
    if row.status != "failed" and row.status != "cancelled":
        failures = _failures(row, runs, excused)
        if failures >= rules.max_attempts or (rules.at_most_once and failures):
            yield f"P2: {what} failed {failures} times, has {rules.max_attempts} attempts, and is archived as {row.status}"


def _failures(row: Final, runs: Sequence[Run], excused: Absences) -> int:
    """The number of runs that failed and could report it: a job that is lost with its worker, or its result, uses no attempt."""
    until = [*(run.begin for run in runs[1:]), row.at]
    return sum(
        run.outcome == "failed" and run.lost_at is None and not excused.between(run.worker, run.end, end)
        for run, end in zip(runs, until, strict=False)
    )


def _success(row: Final, runs: Sequence[Run]) -> Iterable[str]:
    what = f"{row.name} {row.id}"
    good = [run for run in runs if run.attempt == row.attempt and run.outcome == "succeeded"]
    if not good:
        seen = sorted({run.attempt for run in runs if run.outcome == "succeeded"})
        yield f"P4: {what} succeeded with attempt number {row.attempt}, but runs say {seen}"
        return
    settled = good[-1]
    if row.worker and row.worker != settled.worker:
        yield f"P4: {what} was settled by {row.worker}, but attempt {row.attempt} ran on {settled.worker}"
    if row.at < settled.end - SLACK_S:
        yield f"P4: {what} was settled {settled.end - row.at:.3f} s before the end of attempt {row.attempt}, which it names"
    for other in runs:
        if settled.begin < other.begin < row.at - SLACK_S:
            yield f"P4: the result of {settled.worker} for {what} took effect although {other.worker} had started it meanwhile"


def _never_started(row: Final, rules: Rules, events: Sequence[Event], excused: Absences) -> Iterable[str]:
    """A job that failed without a start, unless its worker may have been lost between mark and handler."""
    begun = [event for event in events if event.kind == "begun"]
    if not rules.at_most_once or not begun or not _lost_after(begun[-1], row.worker, excused):
        yield f"P2: {row.name} {row.id} was archived as failed though it was never started"


def _lost_after(begun: Event, worker: str, excused: Absences) -> bool:
    """Whether its worker was gone soon after it had marked the job as begun."""
    return excused.between(begun.worker or worker, begun.at, begun.at + BEGUN_S)


def _unstarted(history: History, of_job: Mapping[str, Sequence[Run]], events: Mapping[str, Sequence[Event]]) -> Iterable[str]:
    """No more jobs are lost with a worker before their start than it has places."""
    marked = Counter(
        [event.worker for event in events[row.id] if event.kind == "begun"][-1]
        for row in history.final
        if row.status == "failed" and not of_job.get(row.id) and any(event.kind == "begun" for event in events[row.id])
    )
    for worker, jobs in marked.items():
        if jobs > history.places:
            yield f"P2: {jobs} jobs that {worker} had begun failed and never started, it has {history.places} places"


def _convictions(final: Sequence[Final], of_job: Mapping[str, Sequence[Run]], runs: Iterable[Run]) -> Iterable[str]:
    """A job is convicted only by workers that ran it alone and were lost: whatever ran beside it may have ended them."""
    of_worker: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        of_worker[run.worker].append(run)
    for row in final:
        lost = [run for run in of_job.get(row.id, ()) if run.lost_at is not None]
        if row.reason != "quarantined" or not lost:
            continue
        alone = sum(not any(_beside(run, other) for other in of_worker[run.worker]) for run in lost)
        if alone < LOSSES_OF_A_KILLER:
            yield (
                f"P9: {row.name} {row.id} was quarantined after {alone} losses of workers that ran nothing else,"
                f" it takes {LOSSES_OF_A_KILLER}"
            )


def _beside(run: Run, other: Run) -> bool:
    """Whether another run was under way on the worker of a run when that was lost."""
    lost_at = run.lost_at
    return other.id != run.id and lost_at is not None and other.begin < lost_at < other.end


def _failure(
    row: Final, runs: Sequence[Run], rules: Rules, planned: Planned, events: Sequence[Event], excused: Absences
) -> Iterable[str]:
    what = f"{row.name} {row.id}"
    if not runs:
        return
    # A result is lost with the worker that could not write it.
    if all(
        run.outcome == "succeeded" and run.lost_at is None and not excused.between(run.worker, run.begin, row.at) for run in runs
    ):
        yield f"P2: {what} was archived as failed though no run of it failed"
    last = runs[-1]
    if last.lost_at is None and row.at < last.end - SLACK_S:
        yield f"P4: {what} was archived as failed while it ran on {last.worker}"
    final = rules.at_most_once or planned.may_fail_for_good
    # Of a worker that was gone or cut off at the end of a run the database may have seen a loss where the run failed.
    failures = sum(
        run.outcome == "failed" and run.lost_at is None and not excused.between(run.worker, run.begin, run.end + BEGUN_S)
        for run in runs
    )
    quarantined = (
        row.reason == "quarantined"
        and any(run.lost_at is not None for run in runs)
        and row.attempt - failures >= LOSSES_OF_A_KILLER
    )
    # A job that was sent to a service under its number, or was about to be sent, and then lost, has used an attempt.
    seen = {run.attempt for run in runs}
    lost = {event.attempt for event in events if event.kind == "begun" and _lost_after(event, row.worker, excused)} - seen
    if len(runs) + len(lost) < rules.max_attempts and not final and not quarantined:
        yield f"P2: {what} was archived as failed after {len(runs)} of {rules.max_attempts} attempts"


def healing(history: History) -> dict[str, float]:
    """For each job that ran on a worker when the worker was killed: seconds until the job ran again or was finished.

    With notes of what the database did, the time ends when the job was queued again: how long it waits there depends on the jobs
    in front of it, which `checker.noted.check_lines` checks.

    A job that was lost twice is a suspect: it runs alone, and suspects take turns. Its time is that in which no other suspect
    ran, less `EMPTYING_S` for each suspect that did, in which a worker waits until it is empty or leaves it to another.
    """
    killed = {gone.worker: gone.at for gone in history.gone if gone.back == float("inf")}
    if history.noted:
        return notes.healing(killed, runs_of(history.events), history.noted, history.away)
    over = {row.id: row for row in history.final if row.finished}
    of_job = by_id(_runs(history))
    alone = [run for runs in of_job.values() for place, run in enumerate(runs) if _losses(runs[:place], run.attempt) >= 2]
    waited: dict[str, float] = {}
    for id, runs in of_job.items():
        for place, run in enumerate(runs):
            death = killed.get(run.worker)
            if death is None or run.end < float("inf"):
                continue
            again = runs[place + 1].begin if place + 1 < len(runs) else float("inf")
            number = runs[place + 1].attempt if place + 1 < len(runs) else run.attempt + 1
            if id in over:
                again = min(again, over[id].at)
            seconds = again - death
            if again < float("inf") and _losses(runs[: place + 1], number) >= 2:
                before = [other for other in alone if other.id != id and other.begin < again and _end(other, killed) > death]
                seconds -= _covered([(max(other.begin, death), min(_end(other, killed), again)) for other in before])
                seconds -= EMPTYING_S * len(before)
            waited[id] = max(waited.get(id, 0.0), seconds)
    return waited


def _losses(before: Sequence[Run], number: int) -> int:
    """How often a job was lost with its worker before the attempt of this number, started or not."""
    return number - 1 - sum(run.outcome == "failed" and run.lost_at is None for run in before)


def _end(run: Run, killed: Mapping[str, float]) -> float:
    return min(run.end, killed.get(run.worker, float("inf")))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The total length of the spans; overlaps count once."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def _over_limit(runs: Iterable[Run], rules: Mapping[str, Rules]) -> Iterable[str]:
    """Moments at which more jobs of a type ran than its concurrency admits. The run of a worker that was gone ended with it; any
    other run without an observed end lasts until the end."""
    changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for run in runs:
        if run.name in rules and rules[run.name].concurrency is not None:
            changes[run.name] += [(run.begin, 1), (run.until, -1)]
    for name, moments in changes.items():
        limit = rules[name].concurrency
        running = highest = 0
        for _, change in sorted(moments):
            running += change
            highest = max(highest, running)
        if limit is not None and highest > limit:
            yield f"P5: {highest} jobs of {name} ran at once, its concurrency is {limit}"
