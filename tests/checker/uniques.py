"""The checker of coalescing: while a job with a unique key is queued, enqueueing returns that job, and no other one (P10)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from checker.history import SLACK_S, Event


@dataclass(frozen=True, slots=True)
class Asked:
    """An acknowledged enqueue with a unique key: which job it returned, and whether that was a new one."""

    key: str
    id: str
    new: bool
    begun: float
    answered: float


def check_uniques(asked: Iterable[Asked], events: Iterable[Event], over: Mapping[str, float]) -> list[str]:
    """The violations, in words.

    Args:
        asked: The enqueues.
        events: The recorded history: a job is queued for certain until it is first started, or somebody asked to cancel it.
        over: When each job was archived.
    """
    left: dict[str, float] = dict(over)
    started: dict[str, float] = {}
    for event in events:
        if event.kind in ("started", "cancelling"):
            left[event.id] = min(left.get(event.id, float("inf")), event.at)
        if event.kind == "started":
            started[event.id] = min(started.get(event.id, float("inf")), event.at)
    by_key: dict[str, list[Asked]] = defaultdict(list)
    for each in asked:
        by_key[each.key].append(each)
    violations = []
    for key, calls in by_key.items():
        new = sorted((call for call in calls if call.new), key=lambda call: call.begun)
        for place, first in enumerate(new):
            for second in new[place + 1 :]:
                # A claim comes before the start; by how much, nobody has seen.
                if first.answered < second.begun and left.get(first.id, float("inf")) > second.answered + _CLAIMED_BEFORE_S:
                    violations.append(f"P10: {second.id} was enqueued with {key} while {first.id} was queued with it")
        for call in calls:
            if not call.new and started.get(call.id, float("inf")) < call.begun - SLACK_S:
                violations.append(f"P10: an enqueue with {key} returned {call.id}, which was no longer queued")
    return violations


_CLAIMED_BEFORE_S = 1.0
