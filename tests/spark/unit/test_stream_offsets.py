"""Where a reader of streams is: arithmetic, over all cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput, OffsetGone
from penstock.spark.streams import offsets as so
from penstock.spark.streams.offsets import Extent, Growth, Run

places = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5))
offsets = st.dictionaries(places, st.integers(0, 200), min_size=1)


@given(offsets, offsets, st.integers(1, 300))
def test_a_limited_batch_holds_the_limit_and_every_event_comes_once(start: so.Offsets, ends: so.Offsets, limit: int) -> None:
    extents = {place: Extent(0, max(end, start.get(place, 0))) for place, end in ends.items()}
    final = {place: extent.next for place, extent in extents.items()}
    seen: list[tuple[str, int, int]] = []
    here = start
    while so.count(here, final):
        waits = so.count(here, final)
        end = so.limited(here, final, limit)
        assert so.count(here, end) == min(limit, waits)
        seen += [(r.stream, r.partition, n) for r in so.runs(here, end, extents) for n in range(r.begin, r.end)]
        here = {**here, **end}
    assert sorted(seen) == sorted((s, p, n) for (s, p), end in final.items() for n in range(start.get((s, p), 0), end))


def test_every_partition_gets_its_share_of_a_limit() -> None:
    end = so.limited({}, {("a", 0): 900, ("a", 1): 90, ("a", 2): 10}, 100)
    assert end == {("a", 0): 90, ("a", 1): 9, ("a", 2): 1}


@given(st.lists(st.integers(1, 400), max_size=6), st.integers(1, 300), st.integers(1, 20))
def test_tasks_are_even_and_have_every_event_once_in_order(sizes: list[int], size: int, least: int) -> None:
    found = [Run("a", place, 5, 5 + events) for place, events in enumerate(sizes)]
    dealt = so.tasks(found, size, least)
    assert [(r.partition, n) for task in dealt for r in task for n in range(r.begin, r.end)] == [
        (r.partition, n) for r in found for n in range(r.begin, r.end)
    ]
    counts = [sum(r.end - r.begin for r in task) for task in dealt]
    assert all(0 < events <= size for events in counts) and (not counts or max(counts) - min(counts) <= 1)
    assert len(dealt) >= min(least, sum(sizes))


@given(offsets)
def test_offsets_are_kept_as_kafka_writes_them(found: so.Offsets) -> None:
    document = so.as_json(found)
    assert so.from_json({**document, so.SINCE: document, so.LAG: 3}) == found
    assert document == so.as_json(dict(reversed(list(found.items()))))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"x": 1}}', '{"a": {"0": -3}}', '{"a": {"0": "1"}}', '{"a": {"0": true}}']
)
def test_what_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="startingOffsets"):
        so.parse(text, "startingOffsets")


def test_offsets_that_stand_for_the_ends_are_resolved() -> None:
    extents = {("a", 0): Extent(3, 9), ("a", 1): Extent(0, 7), ("a", 2): Extent(1, 2)}
    found = so.resolve(so.parse('{"a": {"0": -2, "1": -1}}', "startingOffsets"), extents, "startingOffsets", so.LATEST)
    assert found == {("a", 0): 3, ("a", 1): 7, ("a", 2): 2}
    with pytest.raises(InvalidInput, match="partition 5 of a"):
        so.resolve({("a", 5): 1}, extents, "startingOffsets", so.LATEST)


@pytest.mark.parametrize(
    ("start", "goes_on", "words"),
    [
        ({("a", 0): 2, ("a", 1): 7}, {("a", 0): 5, ("a", 1): 7}, "offsets 2 to 4"),
        ({("a", 0): 11, ("a", 1): 7}, {("a", 0): 5, ("a", 1): 7}, "created again"),
        ({("a", 0): 6, ("a", 1): 7, ("b", 0): 1}, {("a", 0): 6, ("a", 1): 7}, "partition 0 of b is gone"),
    ],
)
def test_lost_events_are_an_error_or_passed_over(start: so.Offsets, goes_on: so.Offsets, words: str) -> None:
    extents = {("a", 0): Extent(5, 10), ("a", 1): Extent(0, 8)}
    with pytest.raises(OffsetGone, match=words):
        so.begins(start, extents, fail=True)
    found, lost = so.begins(start, extents, fail=False)
    assert found == goes_on and words in lost[0]


def test_a_new_partition_begins_at_its_beginning() -> None:
    assert so.begins({("a", 0): 3}, {("a", 0): Extent(0, 4), ("a", 1): Extent(0, 4)}, fail=True)[0] == {("a", 0): 3, ("a", 1): 0}


def test_new_partitions_wait_until_the_old_ones_were_read_up_to_the_growth() -> None:
    growth = [Growth("a", 3, (10, 4))]
    ends = {("a", 0): 20, ("a", 1): 4, ("a", 2): 30, ("b", 2): 5}
    assert so.ripe({("a", 0): 9, ("a", 1): 4}, ends, growth) == {**ends, ("a", 2): 0}
    assert so.ripe({("a", 0): 10, ("a", 1): 4}, ends, growth) == ends
    # Of a stream of which only new partitions are read, nothing can be waited for.
    assert so.ripe({}, {("a", 2): 30}, growth) == {("a", 2): 30}
