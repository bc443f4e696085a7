"""The promise of operations: each job that matches is changed once, and the counts say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence


def check_cancel(matching: Collection[str], others: Collection[str], cancelled: Sequence[str], done: int) -> list[str]:
    """The violations of a cancellation that has ended: those that matched are archived as cancelled, once each."""
    times = Counter(cancelled)
    violations = [f"job {id} is archived {count} times" for id, count in times.items() if count > 1]
    violations += [f"job {id} matches and is not cancelled" for id in matching if id not in times]
    violations += [f"job {id} is cancelled and does not match" for id in others if id in times]
    if done != len(matching):
        violations.append(f"the operation counts {done} jobs of {len(matching)}")
    return violations


def check_replay(matching: Collection[str], replay_of: Sequence[str], done: int) -> list[str]:
    """The violations of a replay that has ended: each job that matched has one copy, and no other job has any."""
    times = Counter(replay_of)
    violations = [f"job {id} has {times[id]} replays" for id in matching if times[id] != 1]
    violations += [f"job {id} does not match and has {count} replays" for id, count in times.items() if id not in set(matching)]
    if done != len(matching):
        violations.append(f"the operation counts {done} jobs of {len(matching)}")
    return violations
