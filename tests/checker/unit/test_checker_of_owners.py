"""The checker of ownership passes owners that follow each other, and rejects by name what others begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.checker.history import Gone
from tests.checker.owners import Begun, Owned, check_begun, check_owners

FIRST = Owned(1.0, "g", 3, "a.p1", 1, worker="a")
EVICTED = Owned(10.0, "g", 3, "", 1, "a.p1", 1)
NEXT = Owned(10.5, "g", 3, "b.p1", 2, "", 1, worker="b")
OWNERS = [FIRST, EVICTED, NEXT]
FROZEN = Gone("a", 5.0, 20.0)


def test_a_slot_that_was_released_may_be_taken_under_a_new_epoch() -> None:
    assert list(check_owners(OWNERS)) == []


@pytest.mark.parametrize(
    ("second", "violation"),
    [
        (replace(NEXT, before="a.p1"), "P4: slot 3 of g was taken by b.p1 while a.p1 had it"),
        (replace(NEXT, epoch=1), "P4: slot 3 of g was taken by b.p1 under the epoch 1, which is not new"),
    ],
)
def test_a_slot_of_another_owner_and_an_old_epoch_are_rejected(second: Owned, violation: str) -> None:
    assert list(check_owners([FIRST, second])) == [violation]


def begun(worker: str, at: float, slot: int = 3) -> Begun:
    return Begun("k/7", "g", slot, worker, at)


@pytest.mark.parametrize(
    ("work", "absences"),
    [
        (begun("a", 4.0), []),
        (begun("a", 10.05), []),  # the clocks differ
        (begun("b", 10.45), []),
        (begun("b", 30.0), []),
        (begun("a", 20.5), [FROZEN]),
        (begun("a", 20.5), [Gone("", 5.0, 20.0)]),
        (begun("a", 20.9), [Gone("a", 5.0, 12.0), Gone("a", 11.0, 20.0)]),
        (begun("a", 10.9), []),  # it was told at once
    ],
)
def test_an_owner_begins_work_and_one_that_is_back_for_a_moment(work: Begun, absences: list[Gone]) -> None:
    assert list(check_begun([work], OWNERS, absences)) == []


@pytest.mark.parametrize(
    ("work", "absences", "violation"),
    [
        # The new owner may be idle at this moment: no other run overlaps.
        (begun("a", 22.0), [FROZEN], "P4: k/7 began on a at 22.000, 2.000 s after that had lost slot 3 of g"),
        (begun("a", 200.0), [FROZEN], "P4: k/7 began on a at 200.000, 180.000 s after that had lost slot 3 of g"),
        (begun("a", 12.0), [], "P4: k/7 began on a at 12.000, 2.000 s after that had lost slot 3 of g"),
        # Another worker was frozen.
        (begun("a", 20.5), [Gone("b", 5.0, 20.0)], "P4: k/7 began on a at 20.500, 10.500 s after"),
        # Its time is counted together, before and between its absences.
        (
            begun("a", 30.1),
            [Gone("a", 10.5, 20.0), Gone("a", 20.6, 30.0)],
            "P4: k/7 began on a at 30.100, 1.200 s after that had lost slot 3 of g",
        ),
        (begun("c", 11.0), [], "P4: k/7 began on c at 11.000, which never had slot 3 of g"),
        (begun("b", 5.0), [], "P4: k/7 began on b at 5.000, which never had slot 3 of g"),
        (begun("a", 4.0, slot=4), [], "P4: k/7 began on a at 4.000, which never had slot 4 of g"),
        (begun("a", 0.5), [], "P4: k/7 began on a at 0.500, which never had slot 3 of g"),
    ],
)
def test_what_another_worker_begins_is_rejected(work: Begun, absences: list[Gone], violation: str) -> None:
    found = list(check_begun([work], OWNERS, absences))
    assert len(found) == 1
    assert found[0].startswith(violation)


def test_an_owner_that_lost_a_slot_and_took_it_again_begins_work() -> None:
    again = [*OWNERS, Owned(25.0, "g", 3, "", 2, "b.p1", 2), Owned(25.1, "g", 3, "a.p1", 3, "", 2, worker="a")]
    assert list(check_begun([begun("a", 26.0)], again, [])) == []
    assert list(check_begun([begun("b", 27.0)], again, [])) != []
