"""The checker of coalescing: while a job with a unique key is queued, enqueueing returns that job, and no other one (P10).

When a job is queued is what the database says: it is claimed before it is started, by how much depends on its worker, which may
be stopped or killed in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from checker.history import SLACK_S
from checker.noted import Noted


@dataclass(frozen=True, slots=True)
class Asked:
    """An acknowledged enqueue with a unique key: which job it returned, and whether that was a new one."""

    key: str
    id: str
    new: bool
    begun: float
    answered: float


def check_uniques(asked: Iterable[Asked], noted: Iterable[Noted]) -> list[str]:
    """The violations, in words.

    Args:
        asked: The enqueues.
        noted: What the database did: a job is queued until it is claimed or archived, and again when it is back in its line.
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
                # Once it has been claimed, another one may have its key when it comes back.
                if first.answered < second.begun and queued[first.id][0][1] > second.answered + SLACK_S:
                    violations.append(f"P10: {second.id} was enqueued with {key} while {first.id} was queued with it")
        for call in calls:
            there = any(begin <= call.answered + SLACK_S and call.begun - SLACK_S <= end for begin, end in queued[call.id])
            if not call.new and not there:
                violations.append(f"P10: an enqueue with {key} returned {call.id}, which was no longer queued")
    return violations
