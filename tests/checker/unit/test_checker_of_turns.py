"""The checker of turns passes keys and types that take turns, and rejects each way of starving one."""

from __future__ import annotations

import pytest

from tests.checker.history import Event, Run
from tests.checker.turns import check_turns

MOST = 4


def ran(key: str, n: int, begin: float, end: float | None = None) -> list[Event]:
    name = f"{key}/{n}"
    started = Event("started", name, name, begin, 1, "w")
    return [started] if end is None else [started, Event("ended", name, name, end, 1, "w", "succeeded")]


def noisy(begin: float, count: int) -> list[Event]:
    """So many starts of three other keys, one in a second."""
    return [event for n in range(count) for event in ran(f"noisy{n % 3}", n, begin + n, begin + n + 0.5)]


@pytest.mark.parametrize(
    ("events", "enqueued", "away", "waits"),
    [
        pytest.param([*noisy(0, 10), *ran("quiet", 0, 4.2, 4.3)], {"quiet/0": 1.1}, [], [], id="in turn"),
        pytest.param([*noisy(0, 10), *ran("quiet", 0, 8.2, 8.3)], {"quiet/0": 1.1}, [], [7], id="passed over"),
        pytest.param([*noisy(0, 20)], {"quiet/0": 1.1}, [], [18], id="never served"),
        pytest.param([*noisy(0, 4)], {"quiet/0": 1.1}, [], [], id="no key was served"),
        pytest.param([*noisy(0, 10), *ran("quiet", 0, 8.2, 8.3)], {"quiet/0": 6.1}, [], [], id="enqueued late"),
        pytest.param([*noisy(0, 10), *ran("quiet", 0, 8.2, 8.3)], {"quiet/0": 1.1}, [(2.5, 7.5)], [], id="its owner was gone"),
        pytest.param([*noisy(0, 20)], {"quiet/0": 1.1}, [(2.5, 7.5)], [13], id="passed over when its owner was back"),
        pytest.param(
            [*noisy(0, 12), *ran("quiet", 0, 1.2, 7.2), *ran("quiet", 1, 9.3, 9.4)], {"quiet/0": 1.1, "quiet/1": 1.1}, [], [],
            id="it ran itself meanwhile",
        ),
        pytest.param(
            [*noisy(0, 12), *ran("quiet", 0, 1.2, 2.2), *ran("quiet", 1, 9.3, 9.4)], {"quiet/0": 1.1, "quiet/1": 1.1}, [], [7],
            id="the second job is passed over",
        ),
    ],
)  # fmt: skip
def test_a_key_waits_for_few_starts_of_others(
    events: list[Event], enqueued: dict[str, float], away: list[tuple[float, float]], waits: list[int]
) -> None:
    jobs = {id: (id.rpartition("/")[0], at) for id, at in enqueued.items()}
    violations = check_turns(events, jobs, most=MOST, until=100.0, away=away)
    assert [each.startswith("P12: quiet waited") for each in violations] == [True] * len(waits), violations
    assert [int(each.split(" for ")[1].split()[0]) for each in violations] == waits


@pytest.mark.parametrize(("begin", "waits"), [(3.2, []), (8.2, [7])])
def test_a_type_waits_from_its_last_start_on(begin: float, waits: list[int]) -> None:
    def of_type(run: Run) -> str:
        return run.name.partition("/")[0]

    events = [*ran("quiet", 0, 1.5, 20.0), *noisy(1, 9), *ran("quiet", 1, begin, 20.0)]
    jobs = {"quiet/0": ("quiet", 1.4), "quiet/1": ("quiet", 1.4)}
    violations = check_turns(events, jobs, most=MOST, until=100.0, holder=of_type, serial=False)
    assert [int(each.split(" for ")[1].split()[0]) for each in violations] == waits, violations
