"""The checker of streams itself: each broken promise is found, and a good history has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from stream_history import Handled, Sent, check_exactly_once, check_group, check_log

LOG = {0: [(0, "a", "a0"), (1, "b", "b0"), (2, "a", "a1")], 1: [(0, "c", "c0")]}
SENT = [Sent(0, 0, "a0"), Sent(0, 1, "b0"), Sent(0, 2, "a1"), Sent(1, 0, "c0")]
APPENDED = {"a": ["a0", "a1"], "b": ["b0"], "c": ["c0"]}
HANDLED = [
    Handled("g", 0, 0, "a", "a0", 1.0),
    Handled("g", 1, 0, "c", "c0", 1.5),
    Handled("g", 0, 1, "b", "b0", 2.0),
    Handled("g", 0, 1, "b", "b0", 3.0),  # again, after a crash
    Handled("g", 0, 2, "a", "a1", 4.0),
]
WRITTEN = [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_a_good_history_has_no_violations() -> None:
    assert check_log(LOG, SENT) == check_group(LOG, HANDLED, APPENDED) == check_exactly_once(LOG, WRITTEN) == []


@pytest.mark.parametrize(
    ("log", "sent", "violation"),
    [
        ({0: LOG[0]}, SENT, "is not there"),
        ({**LOG, 1: [(0, "c", "x")]}, SENT, "is not there"),
        ({**LOG, 0: [LOG[0][0], (2, "b", "b0"), (3, "a", "a1")]}, SENT[:1], "not dense"),
        ({**LOG, 1: [(0, "c", "c0"), (1, "c", "c0")]}, SENT, "appended 2 times"),
    ],
)
def test_a_broken_log_is_found(log: Any, sent: list[Sent], violation: str) -> None:
    assert any(violation in found for found in check_log(log, sent))


@pytest.mark.parametrize(
    ("handled", "violation"),
    [
        (HANDLED[:-1], "never handled"),
        ([HANDLED[0], HANDLED[1], HANDLED[4], HANDLED[2]], "before"),
        ([replace(HANDLED[4], offset=0), HANDLED[1], HANDLED[2], replace(HANDLED[0], offset=2)], "another order"),
    ],
)
def test_a_broken_group_is_found(handled: list[Handled], violation: str) -> None:
    assert any(violation in found for found in check_group(LOG, handled, APPENDED))


@pytest.mark.parametrize(("written", "violation"), [(WRITTEN[1:], "never written"), ([*WRITTEN, (0, 1)], "written 2 times")])
def test_what_was_not_written_exactly_once_is_found(written: list[tuple[int, int]], violation: str) -> None:
    assert any(violation in found for found in check_exactly_once(LOG, written))
