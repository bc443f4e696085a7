"""The checker of keys passes keys that are kept in order, and rejects by name each way of breaking a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from tests.checker.history import Event, Gone, runs_of
from tests.checker.keys import Ended, Placed, check_keys, check_standing
from tests.checker.unit.checked_histories import CHANCE, END, HEALED_WITHIN, KeyHistory, assert_rejected, keys_in_order


def keys_of(history: KeyHistory) -> list[str]:
    return check_keys(history.events, history.placed, history.ended, history.gone, within_s=HEALED_WITHIN)


@given(CHANCE)
@settings(max_examples=40)
def test_keys_that_are_kept_in_order_pass(chance: Random) -> None:
    assert keys_of(keys_in_order(chance, 3, 8)) == []


def test_transactions_that_overlap_may_start_in_any_order_and_others_may_not() -> None:
    def history(committed: float) -> list[str]:
        events = [event for n, begin in ((1, 10.0), (0, 11.0)) for event in ran(n, begin)]
        placed = {"k/0": Placed(1, 0, 1.0, committed), "k/1": Placed(2, 0, 3.0, 4.0)}
        ended = {f"k/{n}": Ended("succeeded", 3, 12.0) for n in range(2)}
        return check_keys(events, placed, ended, [], within_s=15)

    assert history(5.0) == []
    assert_rejected(history(2.0), "P6")


def ran(n: int, begin: float) -> list[Event]:
    name = f"k/{n}"
    return [Event("started", name, name, begin, 3, "w"), Event("ended", name, name, begin + 0.5, 3, "w", "succeeded")]


def shifted(history: KeyHistory, pick: Callable[..., bool], **to: float | str) -> KeyHistory:
    events = [replace(event, **to) if pick(event) else event for event in history.events]  # type: ignore[arg-type]
    return replace(history, events=sorted(events, key=lambda event: event.at))


def quiet(history: KeyHistory, key: str) -> list[str]:
    """Jobs of a key that ran once, with success, on workers that were never gone."""
    lost = {gone.worker for gone in history.gone}
    runs = [run for run in runs_of(history.events) if run.name.startswith(f"{key}/") and run.worker not in lost]
    names = [run.name for run in runs]
    return [run.name for run in runs if names.count(run.name) == 1 and run.outcome == "succeeded"]


def key_runs_two_at_once(history: KeyHistory, chance: Random) -> KeyHistory | None:
    names = quiet(history, "k0")
    if len(names) < 2:
        return None
    end = next(event.at for event in history.events if event.kind == "ended" and event.name == names[-1])
    return shifted(history, lambda event: event.kind == "ended" and event.name == names[0], at=end)


def key_starts_in_the_wrong_order(history: KeyHistory, chance: Random) -> KeyHistory | None:
    names = quiet(history, "k0")
    if len(names) < 2:
        return None
    first, last = names[0], names[-1]
    swap = {first: last, last: first}
    events = [replace(event, id=swap.get(event.id, event.id), name=swap.get(event.name, event.name)) for event in history.events]
    return replace(history, events=events)


def key_breaks_the_order_of_a_transaction(history: KeyHistory, chance: Random) -> KeyHistory | None:
    broken = key_starts_in_the_wrong_order(history, chance)
    one = {name: Placed(1, int(name.rpartition("/")[2]), 0.0, 1e9) for name in history.placed}
    return broken and replace(broken, placed=one)


def thawed_worker_runs_for_minutes(history: KeyHistory, chance: Random) -> KeyHistory | None:
    stopped = {gone.worker: gone.back for gone in history.gone if gone.back < END}
    runs = runs_of(history.events)
    for run in runs:
        key = run.name.partition("/")[0]
        later = [other for other in runs if other.name.partition("/")[0] == key and other.begin > run.begin]
        if run.worker in stopped and run.end > stopped[run.worker] and later:
            end = next(event for event in history.events if event.kind == "ended" and event.id == run.id and event.at == run.end)
            return shifted(history, lambda event, end=end: event is end, at=run.end + 300)
    return None


def key_stands_still(history: KeyHistory, chance: Random) -> KeyHistory | None:
    if not history.gone:
        return None
    gone = history.gone[0]
    key = gone.worker.partition("w")[0]

    def later(event: Event) -> bool:
        return event.name.startswith(f"{key}/") and event.at > gone.at + 1 and event.worker != gone.worker

    events = [replace(event, at=event.at + 60) if later(event) else event for event in history.events]
    return replace(history, events=sorted(events, key=lambda event: event.at)) if events != history.events else None


def key_runs_a_job_again(history: KeyHistory, chance: Random) -> KeyHistory | None:
    names = quiet(history, "k0")
    if not names:
        return None
    start = next(event for event in history.events if event.kind == "started" and event.name == names[0])
    again = [replace(start, at=1e6, attempt=0), replace(start, kind="ended", at=1e6 + 1, attempt=0, outcome="succeeded")]
    return replace(history, events=[*history.events, *again])


KEY_MUTATIONS: dict[Callable[[KeyHistory, Random], KeyHistory | None], str] = {
    key_runs_two_at_once: "P6",
    key_starts_in_the_wrong_order: "P6",
    key_breaks_the_order_of_a_transaction: "P6",
    thawed_worker_runs_for_minutes: "P6",
    key_stands_still: "P9",
    key_runs_a_job_again: "P4",
}


@pytest.mark.parametrize("mutation", KEY_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_keys_that_break_a_promise_are_rejected(mutation: Callable[[KeyHistory, Random], KeyHistory | None]) -> None:
    occasions = 0

    @given(CHANCE)
    @settings(max_examples=25)
    def rejected(chance: Random) -> None:
        nonlocal occasions
        broken = mutation(keys_in_order(chance, 2, 8), chance)
        if broken is not None:
            occasions += 1
            assert_rejected(keys_of(broken), KEY_MUTATIONS[mutation])

    rejected()
    assert occasions >= 3, "hardly any history gave an occasion"


def run_of(name: str, attempt: int, begin: float, end: float | None, worker: str) -> list[Event]:
    started = Event("started", name, name, begin, attempt, worker)
    return [started] if end is None else [started, replace(started, kind="ended", at=end, outcome="succeeded")]


@pytest.mark.parametrize(
    ("losses", "begin", "other_s", "violations"),
    [
        (1, 14.0, 0.0, []),
        (1, 30.0, 0.0, ["P9"]),
        (1, 30.0, 10.0, ["P9"]),
        (2, 60.0, 0.0, []),
        (2, 75.0, 0.0, ["P9"]),
        # Twice the time of the other one counts, since their worker works as usual for as long.
        (2, 75.0, 10.0, []),
        (2, 95.0, 10.0, ["P9"]),
    ],
)
def test_a_suspect_may_wait_longer_than_another_job(losses: int, begin: float, other_s: float, violations: list[str]) -> None:
    events = run_of("k/0", losses + 1, begin, begin + 1, "w") + run_of("j/0", 3, 10, 10 + other_s, "w")
    for number in range(1, losses + 1):
        events += run_of("k/0", number, number, None, f"v{number}")
    gone = [Gone(f"v{number}", number + 0.5) for number in range(1, losses + 1)]
    ended = {"k/0": Ended("succeeded", losses + 1, begin + 1), "j/0": Ended("succeeded", 3, 10 + other_s)}
    found = check_keys(sorted(events, key=lambda event: event.at), {}, ended, gone, within_s=15)
    assert [each[:2] for each in found] == violations, found


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
    violations = check_standing(sorted(events, key=lambda event: event.at), gone, {"a"}, 100.0, within_s=15)
    assert ("".join(violations) == "") if expected == "" else (expected in violations[0])
