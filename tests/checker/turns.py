"""The checker of turns: who has a job that could start is served after a bounded number of starts of others (P12)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from tests.checker.history import Event, Run, runs_of


def key_of(run: Run) -> str:
    """The key of a run whose name is "key/n"."""
    return run.name.rpartition("/")[0]


def check_turns(
    events: Sequence[Event],
    enqueued: Mapping[str, tuple[str, float]],
    *,
    most: int,
    until: float,
    away: Sequence[tuple[float, float]] = (),
    holder: Callable[[Run], str] = key_of,
    serial: bool = True,
) -> list[str]:
    """The violations, as text.

    Args:
        events: The recorded history.
        enqueued: The key or type of each job, by id, and when its enqueue was acknowledged.
        most: The largest number of starts of others while a key or type waits.
        until: The end of the history, until which a job that has not started has waited.
        away: When workers were gone until others had taken over their keys: starts at these times do not count.
        holder: The key or type of a run.
        serial: Whether jobs of a key run one at a time: then it waits from the end of its last run on, otherwise from its start.
    """
    runs = runs_of(events)
    counted = sorted((run.begin, holder(run)) for run in runs if not any(at <= run.begin <= back for at, back in away))
    begins = [begin for begin, _ in counted]
    own: dict[str, list[float]] = defaultdict(list)
    for begin, name in counted:
        own[name].append(begin)

    def of_others(name: str, since: float, to: float) -> int:
        mine = own[name]
        return bisect_left(begins, to) - bisect_right(begins, since) - (bisect_left(mine, to) - bisect_right(mine, since))

    violations = []
    served: dict[str, float] = {}
    started = set()
    waits: list[tuple[str, float, float]] = []
    for run in runs:
        name = holder(run)
        if run.id in enqueued:
            waits.append((name, max(enqueued[run.id][1], served.get(name, 0.0)), run.begin))
        started.add(run.id)
        served[name] = max(served.get(name, 0.0), run.end if serial else run.begin)
    for id, (name, at) in enqueued.items():
        if id not in started:
            waits.append((name, max(at, served.get(name, 0.0)), until))
    for name, since, to in waits:
        others = of_others(name, since, to)
        if since < to and others > most:
            violations.append(f"P12: {name} waited from {since:.3f} to {to:.3f} for {others} starts of others, {most} at most")
    return violations
