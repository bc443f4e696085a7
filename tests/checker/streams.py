"""The checker of streams: the log, what groups did with it, and the owners of partitions (P1, P4, P7).

Producers record acknowledged appends, handlers the events that they handled, and the database (by a trigger) the commits. The log
is read at the end.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.checker.history import SLACK_S, THAW_S, Absences, Gone


@dataclass(frozen=True, slots=True)
class Sent:
    """An acknowledged append, with the position in its answer.

    `transaction` is its transaction (0: not known) and `place` its place in it; the transaction began after `begun`, and its
    commit was acknowledged at `committed`.
    """

    partition: int
    offset: int
    value: str
    key: str = ""
    transaction: int = 0
    place: int = 0
    begun: float = float("-inf")
    committed: float = float("inf")


@dataclass(frozen=True, slots=True)
class Handled:
    """A handler has handled an event of a batch that it began at `begun`."""

    group: str
    partition: int
    offset: int
    key: str
    value: str
    begun: float
    at: float
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Committed:
    """The group has committed the offset `next` of a partition."""

    partition: int
    next: int
    at: float


@dataclass(frozen=True, slots=True)
class Stamped:
    """A batch of a partition was committed under `epoch`, when an owner had begun under the epoch `begun`."""

    partition: int
    epoch: int
    begun: int


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


def check_log(log: Log, sent: Sequence[Sent], withdrawn: Collection[str] = (), unknown: Collection[str] = ()) -> list[str]:
    """P1 and P7: each acknowledged event is in the log once, at its position, and no other event is; offsets are dense, and
    in the order of the commits.

    Args:
        log: All events.
        sent: The acknowledged appends.
        withdrawn: Values whose transaction was rolled back.
        unknown: Values of which it is not known whether their transaction was committed.
    """
    violations = list(_commit_order(sent))
    values: Counter[str] = Counter()
    for partition, events in log.items():
        for place, (offset, _, value) in enumerate(events):
            values[value] += 1
            if offset != place:
                violations.append(f"P7: partition {partition} has offset {offset} where {place} belongs: not dense")
    for value, times in values.items():
        if times > 1:
            violations.append(f"P10: {value} was appended {times} times, though its producer numbers its batches")
    violations += [f"P1: {value} is in the log, though its append was rolled back" for value in withdrawn if value in values]
    acknowledged = {*withdrawn, *unknown}
    for event in sent:
        acknowledged.add(event.value)
        events = log.get(event.partition, ())
        if event.offset >= len(events) or events[event.offset][2] != event.value:
            violations.append(f"P1: {event.value} was acknowledged at {event.partition}:{event.offset} and is not there")
        elif event.key and events[event.offset][1] != event.key:
            violations.append(f"P1: {event.value} was appended with the key {event.key} and has {events[event.offset][1]}")
    violations += [f"P10: {value} is in the log without an append" for value in values.keys() - acknowledged]
    return violations


def _commit_order(sent: Iterable[Sent]) -> Iterable[str]:
    """In a partition an event lies behind those whose commit was acknowledged before its transaction began, and within a
    transaction in the order of the calls. Of transactions that overlap either may come first, and all its events do."""
    partitions: dict[int, list[Sent]] = defaultdict(list)
    for event in sent:
        partitions[event.partition].append(event)
    for partition, events in partitions.items():
        events.sort(key=lambda event: event.offset)
        latest: Sent | None = None
        before: Sent | None = None
        over: set[int] = set()
        for event in events:
            where = f"{event.value} at {partition}:{event.offset}"
            if latest is not None and event.committed < latest.begun:
                yield f"P7: {where} lies behind {latest.value}, whose append began after that of {event.value} was committed"
            if before is not None and before.transaction != event.transaction:
                over.add(before.transaction)
            if event.transaction and before is not None:
                if event.transaction == before.transaction and event.place < before.place:
                    yield f"P7: {where} lies behind {before.value}, which the same transaction appended later"
                elif event.transaction in over:
                    yield f"P7: {where} lies behind {before.value} of another transaction, which came in between"
            before = event
            if latest is None or event.begun > latest.begun:
                latest = event


@dataclass(frozen=True, slots=True)
class Consumed:
    """The history of one group.

    Args:
        handled: The events that its handlers handled.
        committed: Its commits.
        gone: When worker processes were killed or suspended.
        cut: When worker processes could not reach the database: their events may not have been committed.
        away: When the database was away, until workers have had the time to find it again.
        thaw_s: Seconds for which a worker that has returned may continue with a partition that it lost.
    """

    handled: Sequence[Handled]
    committed: Sequence[Committed] = ()
    gone: Sequence[Gone] = ()
    cut: Sequence[Gone] = ()
    away: Sequence[tuple[float, float]] = ()
    thaw_s: float = THAW_S


def check_group(log: Log, consumed: Consumed, appended: Mapping[str, Sequence[str]]) -> list[str]:
    """P7 and P4: every event was handled, in the order of its partition, with the value in the log; the values of a key in
    order. A partition had one owner at a time. No event was committed before it was handled, or handled after its commit.
    """
    violations = []
    partitions: dict[int, list[Handled]] = defaultdict(list)
    for event in sorted(consumed.handled, key=lambda event: event.at):
        partitions[event.partition].append(event)
    absences = Absences(consumed.gone, consumed.thaw_s, consumed.away)
    for partition, handled in partitions.items():
        violations += _values(log, partition, handled)
        violations += _order(partition, handled)
        violations += _owners(partition, handled, absences)
        violations += _redelivered(partition, handled, consumed)
        own = sorted((each for each in consumed.committed if each.partition == partition), key=lambda each: each.at)
        violations += _commits(partition, handled, own, absences)
    first: dict[str, list[str]] = defaultdict(list)
    seen: set[tuple[int, int]] = set()
    for event in sorted(consumed.handled, key=lambda event: event.at):
        if (event.partition, event.offset) not in seen:
            seen.add((event.partition, event.offset))
            first[event.key].append(event.value)
    for partition, events in log.items():
        missing = [offset for offset, _, _ in events if (partition, offset) not in seen]
        if missing:
            violations.append(f"P7: {len(missing)} events of partition {partition} were never handled, the first is {missing[0]}")
    for key, values in appended.items():
        if first[key] != list(values) and sorted(first[key]) == sorted(values):
            violations.append(f"P7: the events of key {key} were handled in another order than they were appended")
    return violations


def _values(log: Log, partition: int, handled: Sequence[Handled]) -> Iterable[str]:
    events = log.get(partition, ())
    for event in handled:
        if event.offset >= len(events) or events[event.offset][1:] != (event.key, event.value):
            there = events[event.offset][1:] if event.offset < len(events) else "nothing"
            yield f"P7: {partition}:{event.offset} was handled with {event.key}, {event.value}; the log has {there}"


def _order(partition: int, handled: Sequence[Handled]) -> Iterable[str]:
    expected = 0
    for event in handled:
        if event.offset > expected:
            yield f"P7: {partition}:{event.offset} was handled before {partition}:{expected}"
        expected = max(expected, event.offset + 1)


def _owners(partition: int, handled: Sequence[Handled], absences: Absences) -> Iterable[str]:
    """A batch lasts from its begin to its last event. Batches of different workers do not overlap, unless a worker was gone."""
    batches: dict[tuple[str, float], float] = {}
    for event in handled:
        place = (event.worker, event.begun)
        batches[place] = max(batches.get(place, 0.0), event.at)
    spans = []
    for (worker, begun), end in batches.items():
        lost_at = absences.during(worker, begun, end)
        if not absences.thawing(worker, begun):
            spans.append((begun, end if lost_at is None else lost_at, worker))
    spans.sort()
    latest: tuple[float, float, str] | None = None
    for span in spans:
        if latest is not None and span[0] < latest[1] and span[2] != latest[2]:
            yield (
                f"P4: partition {partition} was handled by {span[2]} from {span[0]:.3f} on, by {latest[2]} until {latest[1]:.3f}"
            )
        if latest is None or span[1] > latest[1]:
            latest = span


def _redelivered(partition: int, handled: Sequence[Handled], consumed: Consumed) -> Iterable[str]:
    """An event is delivered again only when the worker that received it before could not commit it.

    The order is that of the deliveries: a worker that was frozen during a batch completes it after other workers.
    """
    excused = Absences([*consumed.gone, *consumed.cut], consumed.thaw_s, consumed.away)
    last: dict[int, Handled] = {}
    for event in sorted(handled, key=lambda event: event.begun):
        before = last.get(event.offset)
        if before is not None and excused.thawing(event.worker, event.begun):
            # This event was not delivered again; the following ones are compared with the deliveries before it.
            continue
        last[event.offset] = event
        if before is None or excused.between(before.worker, before.begun, event.begun):
            continue
        yield (
            f"P7: {partition}:{event.offset} came to {event.worker} again at {event.begun:.3f}, {event.begun - before.at:.3f} s"
            f" after {before.worker} had handled it, though nothing had happened to that"
        )


def _commits(partition: int, handled: Sequence[Handled], committed: Sequence[Committed], absences: Absences) -> Iterable[str]:
    if not committed:
        return
    done: dict[int, float] = {}
    for event in handled:
        done.setdefault(event.offset, event.at)
    reached = 0
    for commit in committed:
        if commit.next < reached:
            yield f"P4: partition {partition} was set back from {reached} to {commit.next} by a commit"
        for offset in range(reached, commit.next):
            if done.get(offset, float("inf")) > commit.at + SLACK_S:
                yield f"P7: {partition}:{offset} was committed before it was handled"
                break
        reached = max(reached, commit.next)
    times, places = [commit.at for commit in committed], []
    for commit in committed:
        places.append(max(commit.next, places[-1] if places else 0))
    for event in handled:
        earlier = bisect_right(times, event.begun - SLACK_S)
        if earlier and places[earlier - 1] > event.offset and not absences.thawing(event.worker, event.begun):
            yield (
                f"P7: {partition}:{event.offset} came to {event.worker} at {event.begun:.3f},"
                f" when {places[earlier - 1]} was committed"
            )


def check_exactly_once(log: Log, written: Iterable[tuple[int, int, str]]) -> list[str]:
    """P4: each event that a group wrote in the transaction of its commit exists exactly once, with the value in the log."""
    rows = list(written)
    counts = Counter((partition, offset) for partition, offset, _ in rows)
    violations = [
        f"P4: {partition}:{offset} was written {times} times" for (partition, offset), times in counts.items() if times > 1
    ]
    for partition, events in log.items():
        missing = [offset for offset, _, _ in events if (partition, offset) not in counts]
        if missing:
            violations.append(f"P7: {len(missing)} events of partition {partition} were never written, the first is {missing[0]}")
    for partition, offset, value in rows:
        events = log.get(partition, ())
        if offset >= len(events) or events[offset][2] != value:
            violations.append(f"P7: {partition}:{offset} was written as {value}, which the log does not have there")
    return violations


def check_epochs(stamped: Iterable[Stamped]) -> list[str]:
    """P4: a member that lost a partition does not commit to it after a later owner has begun."""
    return [
        f"P4: partition {each.partition} was committed under epoch {each.epoch}, when {each.begun} had begun"
        for each in stamped
        if each.epoch < each.begun
    ]
