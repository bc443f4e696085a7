"""The checker for streams: holds what was promised against what was recorded. It knows nothing of how Penstock works.

Producers record what was acknowledged, handlers what they did, with the times of one monotonic clock; the log is read at the end.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sent:
    """An acknowledged append: where it is said to be."""

    partition: int
    offset: int
    value: str


@dataclass(frozen=True, slots=True)
class Handled:
    """A handler was done with an event."""

    group: str
    partition: int
    offset: int
    key: str
    value: str
    at: float
    worker: str = ""


Log = Mapping[int, Sequence[tuple[int, str, str]]]  # by partition: (offset, key, value)


def read_handled(path: Path) -> list[Handled]:
    """The events of a file with one JSON object a line; a torn last line of a killed process is left out."""
    handled = []
    for line in path.read_text("utf-8").splitlines():
        try:
            handled.append(Handled(**json.loads(line)))
        except (json.JSONDecodeError, TypeError):
            continue
    return sorted(handled, key=lambda event: event.at)


def check_log(log: Log, sent: Iterable[Sent]) -> list[str]:
    """P1 and P7: what was acknowledged is there, once, where it was said to be; offsets are dense."""
    violations = []
    values: Counter[str] = Counter()
    for partition, events in log.items():
        for place, (offset, _, value) in enumerate(events):
            values[value] += 1
            if offset != place:
                violations.append(f"partition {partition} has offset {offset} where {place} belongs: not dense")
    for value, times in values.items():
        if times > 1:
            violations.append(f"{value} was appended {times} times, though its producer numbers its batches")
    for event in sent:
        events = log.get(event.partition, ())
        if event.offset >= len(events) or events[event.offset][2] != event.value:
            violations.append(f"{event.value} was acknowledged at {event.partition}:{event.offset} and is not there")
    return violations


def check_group(log: Log, handled: Iterable[Handled], appended: Mapping[str, Sequence[str]]) -> list[str]:
    """P7: every event was handled; in each partition none before the one in front of it; the values of a key in order."""
    violations = []
    expected: dict[int, int] = defaultdict(int)
    first: dict[str, list[str]] = defaultdict(list)
    seen: set[tuple[int, int]] = set()
    for event in handled:
        place = (event.partition, event.offset)
        if event.offset > expected[event.partition]:
            violations.append(
                f"{event.partition}:{event.offset} was handled before {event.partition}:{expected[event.partition]}"
            )
            expected[event.partition] = event.offset + 1
        elif event.offset == expected[event.partition]:
            expected[event.partition] += 1
        if place not in seen:
            seen.add(place)
            first[event.key].append(event.value)
    for partition, events in log.items():
        missing = [offset for offset, _, _ in events if (partition, offset) not in seen]
        if missing:
            violations.append(f"{len(missing)} events of partition {partition} were never handled, the first is {missing[0]}")
    for key, values in appended.items():
        if first[key] != list(values) and sorted(first[key]) == sorted(values):
            violations.append(f"the events of key {key} were handled in another order than they were appended")
    return violations


def check_exactly_once(log: Log, written: Iterable[tuple[int, int]]) -> list[str]:
    """P4: what a group wrote in the transactions of its commits is there exactly once."""
    counts = Counter(written)
    violations = [f"{partition}:{offset} was written {times} times" for (partition, offset), times in counts.items() if times > 1]
    for partition, events in log.items():
        missing = [offset for offset, _, _ in events if (partition, offset) not in counts]
        if missing:
            violations.append(f"{len(missing)} events of partition {partition} were never written, the first is {missing[0]}")
    return violations
