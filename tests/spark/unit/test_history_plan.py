"""Offsets and plans of the archive's reader, against a model of transactions."""

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from penstock.spark.jobs.offsets import Position, Snapshot, advance, finish, window
from penstock.spark.jobs.plan import Slice, Split, choose, even, slices


@st.composite
def snapshots(draw: st.DrawFn, at_least: int = 1) -> Snapshot:
    xmax = draw(st.integers(at_least, at_least + 30))
    return Snapshot(xmax, tuple(sorted(draw(st.sets(st.integers(1, max(1, xmax - 1)), max_size=6)) - {xmax})))


@st.composite
def two_snapshots(draw: st.DrawFn) -> tuple[Snapshot, Snapshot]:
    """One, and a later one: what was over stays over."""
    first = draw(snapshots())
    xmax = first.xmax + draw(st.integers(0, 30))
    still = {xid for xid in first.running if draw(st.booleans())}
    new = {xid for xid in range(first.xmax, xmax) if draw(st.integers(0, 4)) == 0}
    return first, Snapshot(xmax, tuple(sorted(still | new)))


@given(snapshots())
def test_a_snapshot_is_what_its_text_says(snapshot: Snapshot) -> None:
    assert Snapshot.parse(str(snapshot)) == snapshot


@pytest.mark.parametrize("text", ["", "1:2", "1:2:3,", "5:4:9", "a:b:c", "1:5:3,2", "1:5:2,2"])
def test_what_is_no_snapshot_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a snapshot"):
        Snapshot.parse(text)


@pytest.mark.parametrize("text", ["{}", "[]", "7", "x", '{"seen": 5}', '{"seen": "1:1:", "part": "3", "after": "x"}'])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a position"):
        Position.from_json(text)


def test_a_position_survives_the_checkpoint() -> None:
    for position in (Position(Snapshot(9, (3, 5))), Position(Snapshot(2**40), 2**40, UUID(int=7))):
        assert Position.from_json(position.as_json()) == position


@given(two_snapshots(), st.integers(0, 70))
def test_advance_sees_what_was_seen_and_what_lies_below(pair: tuple[Snapshot, Snapshot], below: int) -> None:
    first, second = pair
    between = advance(first, second, below)
    for xid in range(80):
        assert between.sees(xid) == (first.sees(xid) or (second.sees(xid) and xid < below))


@given(snapshots(), st.integers(1, 40))
def test_finish_sees_one_more(snapshot: Snapshot, xid: int) -> None:
    after = finish(snapshot, xid)
    assert [other for other in range(80) if after.sees(other)] == sorted(
        {other for other in range(80) if snapshot.sees(other)} | {xid}
    )


def test_an_archive_that_went_backwards_is_refused() -> None:
    with pytest.raises(InvalidInput, match="before position 50"):
        window(Position(Snapshot(50)), Position(Snapshot(40)))


def rows_of(part: Slice, archive: dict[int, list[UUID]]) -> list[tuple[int, UUID]]:
    """What `penstock.scan` would return for a slice."""
    return [
        (xid, id)
        for xid, ids in archive.items()
        for id in ids
        if part.low <= xid < part.high
        and xid not in part.without
        and (not part.only or xid in part.only)
        and (part.after is None or id > part.after)
        and (part.until is None or id <= part.until)
    ]


def counted(start: Position, end: Position, archive: dict[int, list[UUID]]) -> list[tuple[int, int]]:
    """What `penstock.archive_counts` would return for a window."""
    batch = window(start, end)
    found = []
    for xid in sorted(archive):
        if xid in batch.late or (batch.low <= xid < batch.high and xid not in batch.without):
            ids = [id for id in archive[xid] if xid != batch.part or (batch.after is not None and id > batch.after)]
            if ids:
                found.append((xid, len(ids)))
    return found


def next_end(start: Position, now: Snapshot, archive: dict[int, list[UUID]], limit: int) -> Position:
    """One step of the reader, as `ArchiveReader` does it with a database."""
    if start.part is not None:
        now = finish(start.seen, start.part)
    end = choose(start.seen, now, counted(start, Position(now), archive), limit)
    if isinstance(end, Split):
        after = start.after if start.part == end.xid else None
        remaining = sorted(id for id in archive[end.xid] if after is None or id > after)
        return end.at(remaining[limit - 1])
    return end


@given(st.lists(st.integers(0, 7), min_size=1, max_size=25), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**32))
def test_batches_hold_everything_once_whatever_runs_for_long(sizes: list[int], limit: int, size: int, seed: int) -> None:
    chance = Random(seed)
    number = 0
    archive: dict[int, list[UUID]] = {}
    for xid, jobs in enumerate(sizes, 1):
        archive[xid] = [UUID(int=number * 7919 % 100_003) for number in range(number, number + jobs)]
        number += jobs
    ended: set[int] = set()
    xmax = 1
    position = Position(Snapshot(1))
    read: list[tuple[int, UUID]] = []
    while True:
        # Some transactions begin and some end, in any order, between any two batches.
        xmax = min(len(sizes) + 1, xmax + chance.randint(0, 8))
        running = [xid for xid in range(1, xmax) if xid not in ended]
        ended |= {xid for xid in running if chance.random() < 0.5}
        over = xmax == len(sizes) + 1
        if over:
            ended = set(archive)
        now = Snapshot(xmax, tuple(xid for xid in range(1, xmax) if xid not in ended))
        end = next_end(position, now, archive, limit)
        batch = window(position, end)
        counts = counted(position, end, archive)
        large = {xid: cuts(archive[xid], batch.after if xid == batch.part else None, size) for xid, jobs in counts if jobs > size}
        if batch.last is not None:
            large[batch.last] = cuts(archive[batch.last], batch.since, size)
        got = [row for part in slices(batch, counts, size, large) for row in rows_of(part, archive)]
        assert len(got) <= limit
        assert all(xid in ended for xid, _ in got), "a transaction was read before it was over"
        read += got
        if over and end == position:
            break
        position = end
    assert sorted(read) == sorted((xid, id) for xid, ids in archive.items() for id in ids)


def cuts(ids: list[UUID], after: UUID | None, every: int) -> list[UUID]:
    """What `penstock.archive_cuts` would return."""
    return sorted(id for id in ids if after is None or id > after)[every - 1 :: every]


@given(st.integers(0, 1000), st.integers(1, 50))
def test_blocks_are_shared_out_evenly(total: int, parts: int) -> None:
    ranges = even(total, parts)
    assert [block for low, high in ranges for block in range(low, high)] == list(range(total))
    assert len(ranges) <= parts
    assert max((high - low for low, high in ranges), default=0) - min((high - low for low, high in ranges), default=0) <= 1
