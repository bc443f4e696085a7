"""The checker of keys finds what it should, and nothing else."""

from __future__ import annotations

import pytest
from history import Event
from keyed_history import Gone, check_keys, check_standing


def run(
    name: str, begin: float, end: float | None, worker: str = "1", outcome: str = "succeeded", attempts: int = 5
) -> list[Event]:
    events = [Event("started", name, name, begin, attempts, worker)]
    return events if end is None else [*events, Event("ended", name, name, end, attempts, worker, outcome)]


GOOD = [
    [*run("a/0", 0, 1), *run("a/1", 1, 2), *run("b/0", 0.5, 3)],
    [*run("a/0", 0, 1, outcome="failed"), *run("a/0", 2, 3, attempts=4), *run("a/1", 3, 4)],
    # The result of a/0 was not written when its worker was killed: it runs again, and so does what followed.
    [*run("a/0", 0, 1), *run("a/1", 1, None), *run("a/0", 6, 7, "2", attempts=4), *run("a/1", 7, 8, "2", attempts=4)],
]
BAD = {
    "began on": [*run("a/0", 0, 2), *run("a/1", 1, 3)],
    "was done": [*run("a/1", 0, 1), *run("a/0", 1, 2)],
    "first began": [*run("a/0", 0, 1, outcome="failed"), *run("a/1", 1, 2), *run("a/0", 2, 3, attempts=4)],
    "stood still": [*run("a/0", 0, None), *run("a/0", 30, 31, "2", attempts=4)],
}


def in_order(events: list[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.at)


@pytest.mark.parametrize("events", GOOD)
def test_what_is_right_passes(events: list[Event]) -> None:
    assert check_keys(in_order(events), [Gone("1", 1.5)] if len(events) == 7 else [], {}, set(), 15) == []


def test_a_run_that_was_stopped_for_a_moment_and_counted_is_not_lost() -> None:
    events = in_order([*run("a/0", 0, 3), *run("a/1", 3, 4)])
    assert check_keys(events, [Gone("1", 1.0, 2.0)], {"a/0": 5}, set(), 15) == []
    assert check_keys(events, [Gone("1", 1.0, 2.0)], {"a/0": 4}, set(), 15) != []


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_found(message: str) -> None:
    (violation, *_) = check_keys(in_order(BAD[message]), [Gone("1", 5.0)], {}, set(), 15)
    assert message in violation


def standing(name: str, id: str, begin: float, end: float | None, worker: str = "1", runs: int = 1) -> list[Event]:
    began = Event("began", id, name, begin, runs, worker)
    return [began] if end is None else [began, Event("stopped", id, name, end, runs, worker)]


@pytest.mark.parametrize(
    ("events", "gone", "expected"),
    [
        ([*standing("a", "1", 0, 5), *standing("a", "2", 6, None, "2")], [], ""),
        ([*standing("a", "1", 0, None), *standing("a", "2", 6, None, "2")], [Gone("1", 3)], ""),
        ([*standing("a", "1", 0, 9.2), *standing("a", "2", 6, None, "2")], [Gone("1", 3, 9)], ""),
        ([*standing("a", "1", 0, 20), *standing("a", "2", 6, None, "2")], [Gone("1", 3, 9)], "ran on 1"),
        ([*standing("a", "1", 0, 5), *standing("a", "2", 4, None, "2")], [], "ran on 1"),
        ([*standing("a", "1", 0, 5), *standing("a", "2", 40, None, "2")], [], "did not run for 35.0 s"),
        ([*standing("a", "1", 0, 5, runs=3), *standing("a", "2", 6, None, "2", runs=4)], [], ""),
        ([*standing("a", "1", 0, 5, runs=3), *standing("a", "2", 6, None, "2", runs=2)], [], "state of run 2"),
        ([], [], "never ran"),
    ],
)
def test_runs_of_standing_jobs(events: list[Event], gone: list[Gone], expected: str) -> None:
    violations = check_standing(in_order(events), gone, {"a"}, 100.0, 15)
    assert ("".join(violations) == "") if expected == "" else (expected in violations[0])
