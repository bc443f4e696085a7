"""The checker of jobs passes a queue that keeps its promises, and rejects by name each way of breaking one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.checker.history import Event, Gone, runs_of
from tests.checker.jobs import Final, History, check_jobs
from tests.checker.unit.checked_histories import CHANCE, END, HEALED_WITHIN, RULES, JobWorld, assert_rejected


@given(CHANCE)
@settings(max_examples=60)
def test_a_queue_that_keeps_its_promises_passes(chance: Random) -> None:
    assert check_jobs(JobWorld(chance).history(60)) == []


def history_of(*events: Event, final: list[Final], gone: tuple[Gone, ...] = ()) -> History:
    return History(events, final, RULES, gone)


def ran(id: str, begin: float, end: float, attempt: int = 3, worker: str = "w", outcome: str = "succeeded") -> list[Event]:
    return [Event("started", id, "plain", begin, attempt, worker), Event("ended", id, "plain", end, attempt, worker, outcome)]


def test_a_worker_that_was_stopped_for_a_moment_and_settled_lost_nothing() -> None:
    final = [Final("a", "plain", "succeeded", 3, True, 4.1, "w")]
    assert check_jobs(history_of(*ran("a", 1, 4), final=final, gone=(Gone("w", 2.0, 3.0),))) == []


def test_the_run_of_a_worker_that_was_stopped_for_long_ended_for_the_limit() -> None:
    events = [
        replace(event, name="limited") for n in range(2) for event in ran(f"a{n}", 1, 20.2, worker="lost", outcome="failed")
    ]
    events += [replace(event, name="limited") for n in range(2) for event in ran(f"a{n}", 8, 9, attempt=2)]
    final = [Final(f"a{n}", "limited", "succeeded", 2, True, 9.1) for n in range(2)]
    assert check_jobs(history_of(*events, final=final, gone=(Gone("lost", 2.0, 20.0),))) == []
    violations = check_jobs(history_of(*events, final=final))
    assert_rejected(violations, "P5")
    assert_rejected(violations, "P4")


def test_a_failure_whose_worker_was_gone_before_it_could_say_so_uses_up_no_attempt() -> None:
    """The worker `w` is killed after the handler has failed, and before its result is written."""
    failing = [ran("a", 2 * n, 2 * n + 1, attempt=n, outcome="failed") for n in range(1, RULES["plain"].max_attempts + 1)]
    lost = [replace(event, worker="killed") for event in failing.pop()]
    last = ran("a", 30, 31, attempt=RULES["plain"].max_attempts + 1)
    events = [event for run in [*failing, lost, last] for event in run]
    final = [Final("a", "plain", "succeeded", RULES["plain"].max_attempts + 1, True, 31.1, "w")]
    killed = Gone("killed", lost[-1].at + 0.2)
    assert check_jobs(history_of(*events, final=final, gone=(killed,))) == []
    assert_rejected(check_jobs(history_of(*events, final=final)), "P2")


# -- mutations: each takes a history that is right and breaks one promise; None: this history gives no occasion


def changed(history: History, row: Final, **to: object) -> History:
    return replace(history, final=[replace(each, **to) if each is row else each for each in history.final])


def added(history: History, *events: Event) -> History:
    return replace(history, events=sorted([*history.events, *events], key=lambda event: event.at))


def a_row(history: History, chance: Random, **like: object) -> Final | None:
    rows = [row for row in history.final if all(getattr(row, name) == value for name, value in like.items())]
    return chance.choice(rows) if rows else None


def a_success(history: History, chance: Random) -> tuple[Final, Event, Event] | None:
    """A job that was run once, with success; its row, its start and its end."""
    found = []
    for row in history.final:
        own = [event for event in history.events if event.id == row.id and event.kind in ("started", "ended")]
        if row.status == "succeeded" and [event.kind for event in own] == ["started", "ended"]:
            found.append((row, own[0], own[1]))
    return chance.choice(found) if found else None


def job_is_lost(history: History, chance: Random) -> History | None:
    row = a_row(history, chance)
    return row and replace(history, final=[each for each in history.final if each is not row])


def job_is_there_twice(history: History, chance: Random) -> History | None:
    row = a_row(history, chance)
    return row and replace(history, final=[*history.final, row])


def job_is_stuck(history: History, chance: Random) -> History | None:
    row = a_row(history, chance)
    return row and changed(history, row, status="in-progress", finished=False)


def payload_is_another(history: History, chance: Random) -> History | None:
    row = a_row(history, chance)
    return row and changed(history, row, value="another")


def once_is_started_twice(history: History, chance: Random) -> History | None:
    found = a_success(replace(history, final=[row for row in history.final if row.name == "once"]), chance)
    if found is None:
        return None
    _, start, end = found
    return added(history, replace(start, at=end.at + 20, attempt=0), replace(end, at=end.at + 21, attempt=0))


def result_is_of_another_attempt(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    return found and changed(history, found[0], attempt=found[0].attempt + 7)


def settled_before_the_end(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    return found and changed(history, found[0], at=found[2].at - 0.2)


def settled_by_another(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    return found and changed(history, found[0], worker="another")


def stale_result_counts(history: History, chance: Random) -> History | None:
    """Another worker had the job when the result of the first, which had been gone, took effect."""
    found = a_success(history, chance)
    if found is None:
        return None
    row, start, end = found
    taken = replace(start, at=(start.at + end.at) / 2, attempt=start.attempt + 1, worker="other")
    lost = Gone(start.worker, start.at + 1e-6, taken.at + 1e-6)
    return replace(changed(added(history, taken), row, at=end.at + 1.0), gone=[*history.gone, lost])


def two_live_workers_run_it(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    if found is None:
        return None
    _, start, end = found
    at = (start.at + end.at) / 2
    other = replace(start, at=at, attempt=start.attempt + 1, worker="other")
    return added(history, other, replace(end, at=at + 1e-6, attempt=other.attempt, worker="other", outcome="failed"))


def attempt_number_is_given_twice(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    return found and added(history, replace(found[1], at=found[1].at - 1e-6, worker="other"))


def runs_again_after_success(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    if found is None:
        return None
    row, start, end = found
    again = [replace(start, at=end.at + 2, attempt=start.attempt - 1, worker="v")]
    again += [replace(end, at=end.at + 3, attempt=start.attempt - 1, worker="v")]
    if any(gone.worker == start.worker for gone in history.gone):
        return None
    return changed(added(history, *again), row, at=end.at + 3.1, attempt=start.attempt - 1, worker="v")


def runs_after_it_was_archived(history: History, chance: Random) -> History | None:
    row = a_row(history, chance, status="expired") or a_row(history, chance, status="cancelled")
    return row and added(history, Event("started", row.id, row.name, row.at + 1, 9, "w"), ended(row, row.at + 2, 9, "failed"))


def ended(row: Final, at: float, attempt: int, outcome: str) -> Event:
    return Event("ended", row.id, row.name, at, attempt, "w", outcome)


def over_the_limit_and_never_ends(history: History, chance: Random) -> History | None:
    row = a_row(history, chance, name="limited")
    return row and added(history, *[Event("started", f"x{n}", "limited", 1e6, 3, "w") for n in range(3)])


def failed_and_never_started(history: History, chance: Random) -> History | None:
    row = a_row(history, chance, status="cancelled") or a_row(history, chance, status="expired")
    started = {event.id for event in history.events if event.kind == "started"}
    return None if row is None or row.id in started else changed(history, row, status="failed")


def failed_with_attempts_left(history: History, chance: Random) -> History | None:
    for row in history.final:
        own = [event for event in history.events if event.id == row.id and event.kind == "started"]
        ends = [event for event in history.events if event.id == row.id and event.outcome == "failed"]
        if row.name != "once" and row.status == "succeeded" and len(own) == 2 and len(ends) == 1 and own[-1].at > ends[0].at:
            events = [event for event in history.events if event.id != row.id or event.at <= ends[0].at]
            return replace(changed(history, row, status="failed", attempt=2, at=ends[0].at + 0.1), events=events)
    return None


def failed_though_it_succeeded(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    # One that is gone, or was just before, may have lost its result.
    if found is None or any(gone.worker == found[1].worker for gone in history.gone):
        return None
    return changed(history, found[0], status="failed")


def cancelled_without_a_caller(history: History, chance: Random) -> History | None:
    row = a_row(history, chance, status="succeeded")
    return row and changed(history, row, status="cancelled")


def expired_without_expiry(history: History, chance: Random) -> History | None:
    rows = [row for row in history.final if row.id not in (history.planned or {}) and row.status == "succeeded"]
    return changed(history, chance.choice(rows), status="expired") if rows else None


def cancelled_and_yet_succeeded(history: History, chance: Random) -> History | None:
    found = a_success(history, chance)
    return found and added(history, Event("cancelled", found[0].id, found[0].name, found[1].at - 1e-6))


def started_and_in_no_table(history: History, chance: Random) -> History | None:
    return added(history, Event("started", "unowned", "plain", 1e6, 3, "w"))


def work_of_the_dead_waits(history: History, chance: Random) -> History | None:
    runs = [run for run in runs_of(history.events) if run.name != "limited" and run.end == END]
    killed = [run for run in runs if any(gone.worker == run.worker and gone.back == END for gone in history.gone)]
    if not killed:
        return None
    run = chance.choice(killed)
    id = run.id
    row = next(row for row in history.final if row.id == id)
    events = [event for event in history.events if event.id != id or event.at <= run.begin]
    return replace(changed(history, row, at=1e6, status="failed"), events=events, healed_within=HEALED_WITHIN)


JOB_MUTATIONS: dict[Callable[[History, Random], History | None], str] = {
    job_is_lost: "P1",
    job_is_there_twice: "P10",
    job_is_stuck: "P2",
    payload_is_another: "P1",
    once_is_started_twice: "P3",
    result_is_of_another_attempt: "P4",
    settled_before_the_end: "P4",
    settled_by_another: "P4",
    stale_result_counts: "P4",
    two_live_workers_run_it: "P4",
    attempt_number_is_given_twice: "P4",
    runs_again_after_success: "P4",
    runs_after_it_was_archived: "P2",
    over_the_limit_and_never_ends: "P5",
    failed_and_never_started: "P2",
    failed_with_attempts_left: "P2",
    failed_though_it_succeeded: "P2",
    cancelled_without_a_caller: "P2",
    expired_without_expiry: "P2",
    cancelled_and_yet_succeeded: "P2",
    started_and_in_no_table: "P1",
    work_of_the_dead_waits: "P9",
}


@pytest.mark.parametrize("mutation", JOB_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_queue_that_breaks_a_promise_is_rejected(mutation: Callable[[History, Random], History | None]) -> None:
    occasions = 0

    @given(CHANCE)
    @settings(max_examples=25)
    def rejected(chance: Random) -> None:
        nonlocal occasions
        broken = mutation(JobWorld(chance).history(60), chance)
        if broken is not None:
            occasions += 1
            assert_rejected(check_jobs(broken), JOB_MUTATIONS[mutation])

    rejected()
    assert occasions >= 3, "hardly any history gave an occasion"
