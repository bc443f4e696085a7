"""The checker of workflows finds what it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.checker.workflows import (
    Archived,
    Group,
    NestedGroup,
    Planned,
    Retry,
    Run,
    Started,
    Step,
    check_groups,
    check_nested,
    check_retries,
    check_runs,
    check_workflows,
)

A, B = Planned("a"), Planned("b", ("a",))
ANY = Planned("b", ("a",), at_any_end=True)
GOOD = Archived("a", "succeeded", None, 1.0, 2.0)
BAD = Archived("a", "failed", None, 1.0, 2.0)
LATER = Archived("b", "succeeded", None, 3.0, 4.0)
NEVER = Archived("b", "cancelled", "dependency", None, 3.0)
GROUNDLESS = "P13: job b was cancelled although each job for which it waited ended as it was to"
BOTH = [Started("a", 1), Started("b", 1)]


@pytest.mark.parametrize(
    ("planned", "archived", "started", "waiting", "found"),
    [
        ([A, B], [GOOD, LATER], BOTH, [], []),
        ([A, B], [BAD, NEVER], BOTH[:1], [], []),
        ([A, ANY], [BAD, LATER], BOTH, [], []),
        ([A, B], [GOOD, Archived("b", "expired", None, None, 3.0, 2.5)], BOTH[:1], [], []),
        ([A], [Archived("a", "expired", None, None, 3.0, 2.5, (1.0,))], BOTH[:1], [], []),
        ([A], [Archived("a", "failed", "quarantined", None, 3.0)], [], [], []),
        # A worker that counts as dead begins an attempt of a job that has ended meanwhile.
        ([A, B], [replace(GOOD, attempt=2), LATER], [Started("a", 2), BOTH[1], BOTH[0]], [], []),
        ([A, B], [GOOD, LATER], [*BOTH, Started("b", 2)], [], []),
        ([A, B], [GOOD], BOTH[:1], ["b"], ["P13: job b still waits after the run"]),
        ([A, B], [GOOD], BOTH[:1], [], ["P1: job b is nowhere"]),
        ([A, B], [GOOD, LATER, LATER], BOTH, [], ["P14: job b ended 2 times"]),
        ([A, B], [GOOD, LATER], [*BOTH, Started("b", 1)], [], ["P14: attempt 1 of job b started 2 times"]),
        ([A, B], [BAD, LATER], BOTH, [], ["P13: job b ran although job a, which failed, was to succeed"]),
        ([A, B], [GOOD, NEVER], BOTH[:1], [], [GROUNDLESS]),
        ([A, ANY], [BAD, NEVER], BOTH[:1], [], [GROUNDLESS]),
        ([A, B], [BAD, NEVER], BOTH, [], ["P13: job b started and was cancelled because of a dependency"]),
        (
            [A, B], [GOOD, Archived("b", "succeeded", None, 1.5, 4.0)], BOTH, [],
            ["P13: job b ran 0.500 s before job a ended"],
        ),
        ([A, B], [GOOD, Archived("b", "cancelled", None, None, 3.0)], BOTH[:1], [], ["P2: job b was cancelled by nobody"]),
        ([A, B], [BAD, Archived("b", "cancelled", "group", None, 3.0)], BOTH[:1], [], ["P2: job b was cancelled by nobody"]),
        ([A, B], [GOOD, Archived("b", "cancelled", "purged", 2.5, 3.0)], BOTH, [], ["P2: job b was cancelled by nobody"]),
        (
            [A, B], [GOOD, Archived("b", "expired", None, None, 3.0)], BOTH[:1], [],
            ["P2: job b expired and had no time at which it expires"],
        ),
        ([A, B], [GOOD, Archived("b", "expired", None, None, 3.0, 3.5)], BOTH[:1], [], ["P2: job b expired before its time"]),
        ([A, B], [GOOD, LATER], BOTH[:1], [], ["P2: job b succeeded without a start"]),
        ([A, B], [GOOD, Archived("b", "succeeded", None, None, 4.0)], BOTH, [], ["P2: job b succeeded without a start"]),
        ([A, B], [GOOD, Archived("b", "failed", None, 3.0, 4.0)], BOTH[:1], [], ["P2: job b failed without a start"]),
        ([A, B], [GOOD, Archived("b", "failed", None, None, 4.0)], BOTH, [], ["P2: job b failed without a start"]),
        ([A], [Archived("a", "succeeded", "quarantined", None, 4.0)], [], [], ["P2: job a succeeded without a start"]),
        ([A], [Archived("a", "succeeded", None, 2.0, 1.0)], BOTH[:1], [], ["P2: job a ended before it started"]),
        (
            [A, B], [GOOD, replace(LATER, earlier=(1.5,))], [*BOTH, Started("b", 2)], [],
            ["P13: job b ran 0.500 s before job a ended"],
        ),
        (
            [A, B], [GOOD, LATER], [BOTH[1], BOTH[0], Started("b", 2)], [],
            ["P13: an attempt of job b began before job a had ended"],
        ),
        (
            [A, B], [replace(GOOD, attempt=2), LATER], [*BOTH, Started("a", 2)], [],
            ["P13: an attempt of job b began before job a had ended"],
        ),
        (
            [A, B], [BAD, replace(NEVER, finished_at=1.5)], BOTH[:1], [],
            ["P13: job b was cancelled before a job for which it waited had ended"],
        ),
        (
            [A, B], [BAD, replace(NEVER, status="expired", expires_at=2.0)], BOTH[:1], [],
            ["P13: job b expired because of a dependency"],
        ),
        (
            [A, B], [BAD, replace(NEVER, started_at=2.5)], BOTH[:1], [],
            ["P13: job b started and was cancelled because of a dependency"],
        ),
        (
            [A, B], [BAD, replace(NEVER, reason=None, earlier=(2.5,))], BOTH[:1], [],
            ["P2: job b was cancelled by nobody", "P13: job b ran although job a, which failed, was to succeed"],
        ),
        (
            [A, B], [GOOD, LATER], BOTH, ["b"],
            ["P13: job b still waits after the run", "P14: job b has ended and still waits"],
        ),
        ([A, B], [LATER], BOTH, ["a"], ["P13: job a still waits after the run", "P13: job b ran before job a had ended"]),
    ],
)  # fmt: skip
def test_each_broken_history_is_rejected(planned: Any, archived: Any, started: Any, waiting: Any, found: list[str]) -> None:
    assert check_workflows(planned, archived, started, waiting) == found


def test_a_cancellation_that_was_asked_for_is_accepted() -> None:
    ended = [GOOD, Archived("b", "cancelled", None, None, 3.0)]
    assert check_workflows([A, B], ended, BOTH[:1], cancelled=["b"]) == []
    assert check_groups([WHOLE], [replace(ended[1], id="a"), LATER], BOTH[1:], cancelled=["a"]) == []


STEPS = {"one": Step(1, ("a",)), "none": Step(0, (), ("one",)), "two": Step(1, ("b",), ("none",))}
RUN = Run("r", True, STEPS)


@pytest.mark.parametrize(
    ("runs", "archived", "found"),
    [
        ([RUN], [GOOD, LATER], []),
        ([RUN], [BAD, NEVER], []),
        ([], [], ["P14: run r is there 0 times"]),
        ([RUN, Run("r/2", True, {})], [GOOD, LATER], ["P14: run r is there 2 times"]),
        ([Run("r", False, STEPS)], [GOOD, LATER], ["P13: run r has not ended"]),
        ([Run("r", True, {**STEPS, "one": Step(2, ("a",))})], [GOOD, LATER], ["P14: step one of run r has 1 jobs, and not 2"]),
        ([RUN], [BAD, LATER], ["P13: job b ran although job a, which failed, was to succeed"]),
        ([RUN], [GOOD, Archived("b", "cancelled", "group", None, 3.0)], ["P2: job b was cancelled by nobody"]),
        (
            [Run("r", True, {"one": Step(1, ("a",)), "two": Step(1, ("a",))})],
            [GOOD],
            ["P14: job a stands in 2 places of run r"],
        ),
    ],
)
def test_each_broken_history_of_runs_is_rejected(runs: list[Run], archived: Any, found: list[str]) -> None:
    started = [each for each in BOTH if any(row.id == each.id and row.started_at for row in archived)]
    assert check_runs({"r": 2}, runs, archived, started) == found


# A run of a, and of b and c behind it, of which b failed; its retry has d instead of b.
ONE = Run("r", True, {"a": Step(1, ("a",)), "b": Step(1, ("b",), ("a",)), "c": Step(2, ("c", "e"), ("a",))})
ENDS = [GOOD, *(Archived(id, "succeeded", None, 3.0, 4.0) for id in "ce"), Archived("b", "failed", None, 3.0, 4.0)]
AGAIN = Archived("d", "succeeded", None, 5.0, 6.0)
FAILED, FROM_C = Retry("r~2", "r"), Retry("r~2", "r", "c")


def second(**jobs: str) -> Run:
    """The retry with these jobs of its steps, a letter each; of the others those of the first run."""
    return Run("r~2", True, {name: replace(step, jobs=tuple(jobs.get(name, step.jobs))) for name, step in ONE.steps.items()})


@pytest.mark.parametrize(
    ("retry", "run", "more", "found"),
    [
        (FAILED, second(b="d"), [], []),
        (FROM_C, second(b="d", c="fg"), "fg", []),
        (FAILED, None, [], ["P14: run r~2, a retry of r, is there 0 times"]),
        (FAILED, replace(second(b="d"), finished=False), [], ["P13: run r~2 has not ended"]),
        (FAILED, second(), [], ["P14: step b of run r~2 did not succeed, and is not run again"]),
        (FAILED, second(b="d", c="fg"), "fg", ["P14: step c of run r~2 succeeded before, and is run again"]),
        (FAILED, second(b="df"), "f", ["P14: step b of run r~2 has 2 jobs, and not 1"]),
        (FROM_C, second(b="d", c="f"), "f", ["P14: step c of run r~2 has 1 jobs, and not 2"]),
        (
            FROM_C, second(b="d"), [],
            ["P14: step c of run r~2 is behind the step from which it is retried, and is not run again"],
        ),
        (FAILED, second(b="h"), [], ["P1: job h is nowhere"]),
    ],
)  # fmt: skip
def test_each_broken_history_of_retries_is_rejected(retry: Retry, run: Run | None, more: Any, found: list[str]) -> None:
    archived = [*ENDS, AGAIN, *(replace(AGAIN, id=id) for id in more)]
    started = [Started(row.id, 1) for row in archived]
    assert check_retries([retry], [ONE, *([run] if run else [])], archived, started) == found


def test_a_retry_that_runs_too_early_is_rejected() -> None:
    """From a on, a and what is behind it."""
    archived = [*ENDS, *(replace(AGAIN, id=id) for id in "dfgh")]
    run = second(a="f", b="d", c="gh")
    started = [Started(row.id, 1) for row in archived]
    found = check_retries([Retry("r~2", "r", "a")], [ONE, run], archived, started)
    assert found == [f"P13: job {id} ran 1.000 s before job f ended" for id in "dgh"]


WHOLE = Group("g", ("a",), "b", True, 1, 1)


@pytest.mark.parametrize(
    ("group", "archived", "started", "found"),
    [
        (WHOLE, [GOOD, LATER], BOTH, []),
        (WHOLE, [BAD, LATER], BOTH, []),
        (Group("g", ("a",), "b", False, 1, 0), [GOOD, LATER], BOTH, ["P13: job group g has not ended: 0 of 1 children"]),
        (Group("g", ("a",), "b", True, 2, 2), [GOOD, LATER], BOTH, ["P14: job group g counts 2 children and has 1"]),
        (WHOLE, [GOOD], BOTH[:1], ["P13: the then of job group g did not run"]),
        (WHOLE, [GOOD, NEVER], BOTH[:1], ["P13: the then of job group g did not run"]),
        (WHOLE, [GOOD, LATER], [*BOTH, BOTH[1]], ["P14: the then of job group g started 2 times"]),
        (WHOLE, [LATER], BOTH[1:], ["P1: child a of job group g is nowhere"]),
        (
            WHOLE, [GOOD, Archived("b", "succeeded", None, 1.5, 4.0)], BOTH,
            ["P14: the then of job group g ran before child a had ended"],
        ),
        (
            WHOLE, [GOOD, replace(LATER, earlier=(1.5,))], BOTH,
            ["P14: the then of job group g ran before child a had ended"],
        ),
        (WHOLE, [GOOD, LATER], [*BOTH[::-1], Started("b", 2)], ["P14: the then of job group g ran before child a had ended"]),
        (WHOLE, [GOOD, LATER], BOTH[:1], ["P2: the then of job group g succeeded without a start"]),
        (WHOLE, [GOOD, LATER], BOTH[1:], ["P2: child a of job group g succeeded without a start"]),
        (
            WHOLE, [GOOD, Archived("b", "cancelled", "group", None, 3.0)], BOTH[:1],
            ["P13: the then of job group g did not run", "P2: the then of job group g was cancelled by nobody"],
        ),
        (
            WHOLE, [Archived("a", "cancelled", "group", None, 2.0), LATER], BOTH[1:],
            ["P2: child a of job group g was cancelled by nobody"],
        ),
        (
            WHOLE, [Archived("a", "expired", None, None, 2.0), LATER], BOTH[1:],
            ["P2: child a of job group g expired and had no time at which it expires"],
        ),
        (WHOLE, [GOOD, GOOD, LATER], BOTH, ["P14: child a of job group g ended 2 times"]),
        (WHOLE, [GOOD, LATER, LATER], BOTH, ["P14: the then of job group g ended 2 times"]),
        (replace(WHOLE, ended=0), [GOOD, LATER], BOTH, ["P14: job group g ended with 0 of 1 children"]),
        (replace(WHOLE, ends={"succeeded": 1, "failed": 0}, status="succeeded", finished_at=2.5), [GOOD, LATER], BOTH, []),
        (
            replace(WHOLE, ends={"failed": 1}, status="succeeded"), [GOOD, LATER], BOTH,
            ["P14: job group g counts {'failed': 1}, and has {'succeeded': 1}"],
        ),
        (replace(WHOLE, status="succeeded"), [BAD, LATER], BOTH, ["P14: job group g succeeded with {'failed': 1}"]),
        (replace(WHOLE, finished_at=1.5), [GOOD, LATER], BOTH, ["P14: job group g ended before child a of it"]),
        (
            replace(WHOLE, finished_at=3.5), [GOOD, LATER], BOTH,
            ["P14: the then of job group g started before the group had ended"],
        ),
    ],
)  # fmt: skip
def test_each_broken_history_of_groups_is_rejected(group: Any, archived: Any, started: Any, found: list[str]) -> None:
    assert check_groups([group], archived, started) == found


INNER = NestedGroup("i", ("a",), (), "t", "cancel", "succeeded", 3.0, 1, {"succeeded": 1})
OUTER = NestedGroup("o", ("b",), ("i",), "u", "continue", "succeeded", 6.0, 3, {"succeeded": 3})
ROWS = {
    "a": Archived("a", "succeeded", None, 1.0, 2.0), "t": Archived("t", "succeeded", None, 3.5, 4.0),
    "b": Archived("b", "succeeded", None, 1.0, 5.0), "u": Archived("u", "succeeded", None, 7.0, 8.0),
}  # fmt: skip
FAILED = {
    **ROWS, "a": Archived("a", "failed", None, 1.0, 2.0), "t": Archived("t", "cancelled", "dependency", None, 4.0),
}  # fmt: skip
FAILED_GROUPS = [
    replace(INNER, status="failed", ends={"failed": 1}, stopped=True),
    replace(OUTER, status="failed", ends={"succeeded": 1, "failed": 1, "cancelled": 1}),
]
BEGAN = [Started(id, 1) for id in ROWS]


@pytest.mark.parametrize(
    ("groups", "rows", "started", "found"),
    [
        ([INNER, OUTER], ROWS, BEGAN, []),
        (FAILED_GROUPS, FAILED, [each for each in BEGAN if each.id != "t"], []),
        (FAILED_GROUPS, FAILED, BEGAN, ["P14: the then of job group i started although the group failed"]),
        ([replace(INNER, status=None)], ROWS, BEGAN, ["P13: job group i has not ended: 1 of 1 children"]),
        ([replace(INNER, added=2)], ROWS, BEGAN, ["P14: job group i counts {'succeeded': 1} of 2, and has {'succeeded': 1}"]),
        ([replace(INNER, maybe=("x",))], ROWS, BEGAN, []),
        ([replace(INNER, maybe=("b",))], ROWS, BEGAN, ["P14: job group i counts", "P14: job group i ended before b in it"]),
        ([replace(INNER, children=("a", "x"))], ROWS, BEGAN, ["P1: child x of job group i is nowhere"]),
        ([replace(INNER, finished_at=1.5)], ROWS, BEGAN, ["P14: job group i ended before a in it"]),
        ([INNER, replace(OUTER, finished_at=4.5)], ROWS, BEGAN, ["P14: job group o ended before b in it"]),
        (
            [replace(INNER, status="failed")],
            ROWS,
            BEGAN,
            ["P14: job group i failed with", "P14: the then of job group i started"],
        ),
        ([INNER], ROWS, [*BEGAN, Started("t", 1)], ["P14: the then of job group i started 2 times"]),
        ([INNER], {**ROWS, "t": replace(ROWS["t"], started_at=2.5)}, BEGAN, ["P14: the then of job group i started before"]),
        ([INNER], {**ROWS, "t": replace(FAILED["t"])}, BEGAN[:1], ["P13: the then of job group i did not run"]),
        ([INNER], {"a": ROWS["a"]}, BEGAN[:1], ["P13: the then of job group i has not ended"]),
        ([INNER], ROWS, BEGAN[:1], ["P14: the then of job group i succeeded without a start"]),
    ],
)
def test_each_broken_history_of_nested_groups_is_rejected(groups: Any, rows: Any, started: Any, found: list[str]) -> None:
    violations = check_nested(groups, list(rows.values()), started)
    assert len(violations) == len(found), violations
    assert all(each.startswith(expected) for each, expected in zip(violations, found, strict=True)), violations


def test_a_job_that_ended_twice_is_found() -> None:
    assert check_nested([INNER], [*ROWS.values(), ROWS["a"]], BEGAN)[0] == "P14: job a ended 2 times"
