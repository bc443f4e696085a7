"""The checker of coalescing: while a job with a unique key is queued, an enqueue returns that job and no other (P10).

The notes of the database say when a job is queued: its worker claims it before it starts it, and may be suspended or killed in
between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tests.checker.history import SLACK_S
from tests.checker.noted import Noted


@dataclass(frozen=True, slots=True)
class Asked:
    """An acknowledged enqueue with a unique key: the job that it returned, and whether that job was new."""

    key: str
    id: str
    new: bool
    begun: float
    answered: float


def check_uniques(asked: Iterable[Asked], noted: Iterable[Noted]) -> list[str]:
    """The violations, as text.

    Args:
        asked: The enqueues.
        noted: The changes of the database: a job is queued until it is claimed or archived, and again after a retry or release.
    """
    queued: dict[str, list[tuple[float, float]]] = defaultdict(lambda: [(float("-inf"), float("inf"))])
    for note in noted:
        spans = queued[note.id]
        if note.what in ("claimed", "over") and spans[-1][1] == float("inf"):
            spans[-1] = (spans[-1][0], note.at)
        elif note.what == "back":
            spans.append((note.at, float("inf")))
    by_key: dict[str, list[Asked]] = defaultdict(list)
    for each in asked:
        by_key[each.key].append(each)
    violations = []
    for key, calls in by_key.items():
        new = sorted((call for call in calls if call.new), key=lambda call: call.begun)
        for place, first in enumerate(new):
            for second in new[place + 1 :]:
                # After a claim another job may have the key when this one is queued again.
                if first.answered < second.begun and queued[first.id][0][1] > second.answered + SLACK_S:
                    violations.append(f"P10: {second.id} was enqueued with {key} while {first.id} was queued with it")
        for call in calls:
            there = any(begin <= call.answered + SLACK_S and call.begun - SLACK_S <= end for begin, end in queued[call.id])
            if not call.new and not there:
                violations.append(f"P10: an enqueue with {key} returned {call.id}, which was no longer queued")
    return violations
