"""The arithmetic of offsets in streams. Nothing here does input or output.

The position of a reader names, for each stream and partition, the next event to be read, in the form of Kafka's connector:
`{"orders": {"0": 17, "1": 12}}`. Offsets are dense and follow the order of commits, so two positions determine a batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeAlias

from penstock.errors import InvalidInput, OffsetGone

Place: TypeAlias = tuple[str, int]
"""A partition of a stream."""
Offsets: TypeAlias = dict[Place, int]

EARLIEST, LATEST = -2, -1
# Beside the offsets, a checkpoint has these; no stream has such a name.
STREAMS = "@streams"  # the identity of each stream
SINCE = "@since"  # where the first batch of a query began
LAG = "@lag"
ROLLED_BACK = "See docs/restore.md: penstock restore check --checkpoint says where to continue."


@dataclass(frozen=True, slots=True)
class Since:
    """The first events that were appended at a time or later.

    Attributes:
        time: Time for all partitions that `times` does not name; None: these are read as without the option.
        times: Times for single partitions.
        strict: Whether a partition without such an event is an error; otherwise it is read from its end.
    """

    time: datetime | None = None
    times: Mapping[Place, datetime] = field(default_factory=dict)
    strict: bool = False

    def of(self, place: Place) -> datetime | None:
        """The time for a partition; None: it has none."""
        return self.times.get(place, self.time)


@dataclass(frozen=True, slots=True)
class Extent:
    """The events that a partition has.

    Attributes:
        first: Offset of the first one.
        next: Offset of the next one to come.
        compressed: Whether they are compressed.
        identity: Identity of the stream. After "+" it has the number of the last restore of the database.
        restored: Where the partition ended at each restore, by its number.
    """

    first: int
    next: int
    compressed: bool = False
    identity: str | None = None
    restored: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """A growth of a stream to `width` partitions. `ends` are the ends of the previous partitions at that time."""

    stream: str
    width: int
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Events of one partition, from `begin` to before `end`."""

    stream: str
    partition: int
    begin: int
    end: int
    compressed: bool = False
    identity: str | None = None


def parse(text: str, name: str) -> Offsets:
    """The offsets of an option: {"stream": {"partition": offset}}; -2 is the earliest, -1 the latest. Raises `InvalidInput`."""
    hint = 'It looks like {"orders": {"0": 17, "1": -2}}; -2 is the earliest, -1 the latest.'
    offsets = by_place(text, name, hint)
    for place, offset in offsets.items():
        if not isinstance(offset, int) or isinstance(offset, bool) or offset < EARLIEST:
            raise InvalidInput(f"the option {name} has the offset {offset!r} for partition {place[1]} of {place[0]}", hint=hint)
    return offsets


def by_place(text: str, name: str, hint: str) -> dict[Place, Any]:
    """The values of an option that has one for each partition, unchecked. Raises `InvalidInput`, with the hint.

    What a checkpoint has beside the offsets is passed over, so that its offsets can be given as they are.
    """
    try:
        return {
            (stream, int(partition)): value
            for stream, partitions in json.loads(text).items()
            if not stream.startswith("@")
            for partition, value in partitions.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise InvalidInput(f"the option {name} is {text[:100]!r}", hint=hint) from None


def from_json(document: Mapping[str, Any]) -> Offsets:
    """Offsets from the form that Spark keeps in the checkpoint."""
    return {
        (stream, int(partition)): int(offset)
        for stream, partitions in document.items()
        if not stream.startswith("@")
        for partition, offset in partitions.items()
    }


def identities_of(document: Mapping[str, Any]) -> dict[str, str]:
    """The identities of the streams of a checkpoint. Checkpoints of older versions have none."""
    return dict(document.get(STREAMS, {}))


def as_json(offsets: Offsets, identities: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The form that Spark keeps in the checkpoint. Equal offsets give equal text."""
    document: dict[str, Any] = {}
    for (stream, partition), offset in sorted(offsets.items()):
        document.setdefault(stream, {})[str(partition)] = offset
    if identities:
        document[STREAMS] = {stream: identities[stream] for stream in sorted(identities) if stream in document}
    return document


def resolve(given: Offsets, extents: Mapping[Place, Extent], name: str, otherwise: int) -> Offsets:
    """Offsets of an option as numbers, for exactly the partitions that are read.

    Args:
        given: Offsets of the option.
        extents: Extents of the partitions that are read.
        name: Name of the option, for errors.
        otherwise: Offset of partitions that the option does not name: `EARLIEST` or `LATEST`.

    Raises:
        InvalidInput: The option names a partition that is not read.
    """
    if unknown := sorted(place for place in given if place not in extents):
        stream, partition = unknown[0]
        raise InvalidInput(
            f"{name} names partition {partition} of {stream}, which is not read", hint="Name partitions that are subscribed to."
        )
    found = {}
    for place, extent in extents.items():
        offset = given.get(place, otherwise)
        found[place] = extent.first if offset == EARLIEST else extent.next if offset == LATEST else offset
    return found


def begins(
    start: Offsets, extents: Mapping[Place, Extent], *, fail: bool, identities: Mapping[str, str] | None = None
) -> tuple[Offsets, list[str]]:
    """Where a reader continues: at `start`, and in a new partition at its beginning, as with Kafka.

    Args:
        start: The offsets that the reader has come to.
        extents: Extents of the partitions.
        fail: Whether lost events are an error; otherwise the reader continues with the first event that is left.
        identities: The identities of the streams that were read, by name, as far as they are known.

    Returns:
        The offset at which each partition continues, and descriptions of the losses.

    Raises:
        OffsetGone: Events were lost, and `fail` is set.
    """
    found: Offsets = {}
    rolled = rolled_back(start, extents, identities or {})
    recreated = {place[0] for place, extent in extents.items() if was_recreated(place[0], extent, identities or {})}
    lost = [f"stream {stream} was dropped and created again since it was read" for stream in sorted(recreated)]
    for place, extent in extents.items():
        offset = start.get(place, 0)
        name = f"partition {place[1]} of {place[0]}"
        if place[0] in recreated:
            found[place] = extent.first
            continue
        if place in rolled:
            lost.append(rolled[place])
            found[place] = max(extent.first, _restored_end(offset, extent, (identities or {}).get(place[0])))
            continue
        if offset < extent.first:
            lost.append(f"offsets {offset} to {extent.first - 1} of {name} were dropped by retention")
        elif offset > extent.next:
            lost.append(f"{name} ends at {extent.next}, before the offset {offset} that was read: it was created again")
        # A recreated stream is read from its beginning.
        found[place] = extent.first if not extent.first <= offset <= extent.next else offset
    missing = sorted(start.keys() - extents.keys())
    lost += [f"partition {partition} of {stream} is gone" for stream, partition in missing if stream not in recreated]
    if lost and fail:
        raise OffsetGone(
            f"events were lost before they were read: {'; '.join(lost[:5])}",
            hint=ROLLED_BACK if rolled else "Set failOnDataLoss to false to continue without them.",
        )
    return found, lost


def was_recreated(stream: str, extent: Extent, identities: Mapping[str, str]) -> bool:
    """Whether the stream of a name is another one than in `identities`."""
    before = identities.get(stream)
    return before is not None and extent.identity is not None and before.split("+")[0] != extent.identity.split("+")[0]


def rolled_back(offsets: Offsets, extents: Mapping[Place, Extent], identities: Mapping[str, str]) -> dict[Place, str]:
    """What was read of events that a restore of the database has lost, by partition: offsets behind the ends at the restore.

    Args:
        offsets: Offsets up to which was read.
        extents: Extents of the partitions.
        identities: The identities of the streams when the offsets were noted; of an older checkpoint they are not known.
    """
    found = {}
    for (stream, partition), extent in extents.items():
        offset = offsets.get((stream, partition), 0)
        if offset > (end := _restored_end(offset, extent, identities.get(stream))):
            found[stream, partition] = (
                f"partition {partition} of {stream} was read up to offset {offset}, and the database was restored to a time"
                f" at which it ended at {end}"
            )
    return found


def _restored_end(offset: int, extent: Extent, identity: str | None) -> int:
    """The lowest end at a restore after the offset was noted, or the offset itself where that is lower."""
    if identity is None:
        return offset
    noted = int(identity.partition("+")[2] or 0)
    return min([offset, *(end for number, end in extent.restored.items() if number > noted)])


def ripe(start: Offsets, ends: Offsets, growths: Iterable[Growth]) -> Offsets:
    """The ends, held back in new partitions until the old ones have been read up to their ends at the growth.

    A key that moved to a new partition has its earlier events in an old one, and these have to come in an earlier batch.
    """
    held = dict(ends)
    for growth in growths:
        done = all(
            start.get((growth.stream, partition), 0) >= end
            for partition, end in enumerate(growth.ends)
            if (growth.stream, partition) in ends
        )
        if not done:
            for partition in range(len(growth.ends), growth.width):
                place = (growth.stream, partition)
                if place in held:
                    held[place] = min(held[place], start.get(place, 0))
    return held


def limited(start: Offsets, ends: Offsets, limit: int | None) -> Offsets:
    """The ends, moved so that at most `limit` events lie between. Each partition gets its share of the waiting events."""
    waiting = {place: end - start.get(place, 0) for place, end in ends.items() if end > start.get(place, 0)}
    total = sum(waiting.values())
    if limit is None or total <= limit:
        return dict(ends)
    found = {place: min(end, start.get(place, 0)) for place, end in ends.items()}
    left = limit
    for place, events in waiting.items():
        share = events * limit // total
        found[place] += share
        left -= share
    # The remainder of the division goes to the fullest partitions first, one event each.
    for place, events in sorted(waiting.items(), key=lambda item: -item[1]):
        more = min(left, 1, events - (found[place] - start.get(place, 0)))
        found[place] += more
        left -= more
    return found


def count(start: Offsets, end: Offsets) -> int:
    """The number of events between two offsets."""
    return sum(max(0, offset - start.get(place, 0)) for place, offset in end.items())


def runs(start: Offsets, end: Offsets, extents: Mapping[Place, Extent]) -> list[Run]:
    """The events between two offsets, by partition."""
    found = []
    for place, offset in sorted(end.items()):
        extent = extents.get(place)
        begin = start.get(place, 0)
        if extent is not None and offset > begin:
            found.append(Run(*place, begin, offset, extent.compressed, extent.identity))
    return found


def tasks(found: Sequence[Run], size: int, least: int) -> list[list[Run]]:
    """Runs dealt to tasks of about `size` events each, at least `least` tasks as far as there are events.

    A task may have several small partitions, and a large partition is cut. The tasks are in the order of the runs.
    """
    total = sum(run.end - run.begin for run in found)
    if total == 0:
        return []
    number = min(total, max(least, -(-total // size)))
    dealt: list[list[Run]] = [[] for _ in range(number)]
    task = done = 0
    for run in found:
        begin = run.begin
        while begin < run.end:
            edge = total * (task + 1) // number
            end = min(run.end, begin + edge - done)
            dealt[task].append(replace(run, begin=begin, end=end))
            done += end - begin
            begin = end
            if done == edge:
                task += 1
    return dealt
