"""The checker of durable steps finds what it is for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checker.steps import Noted, Sent, Written, check_steps


def note(kind: str, run: str, step: str = "", value: str | None = None) -> Noted:
    return Noted(kind, "a", run, step, value)


FIRST = [note("began", "r1"), note("did", "r1", "pay"), note("kept", "r1", "pay", "r1")]
AGAIN = [note("began", "r2"), note("kept", "r2", "pay", "r1")]
LOST = [note("began", "r1"), note("did", "r1", "pay")]
GO, LATE, UNKNOWN = Sent("a", "go", True), Sent("a", "late", False), Sent("a", "go", None)
GOT, TIMEOUT = note("received", "r1", "go", "go"), note("received", "r1", "go")
GOT_LATE = note("received", "r1", "go", "late")
DONE = {"a": "succeeded"}


@pytest.mark.parametrize(
    ("noted", "written", "sent", "ended", "left", "found"),
    [
        ([*FIRST, *AGAIN], [Written("a", "pay", 3, 3)], [], {}, [], []),
        # Not acknowledged, so it may be done again.
        ([*LOST, note("began", "r2"), note("did", "r2", "pay"), note("kept", "r2", "pay", "r2")], [], [], {}, [], []),
        # A run that had begun before did not know.
        ([note("began", "r2"), *FIRST, note("did", "r2", "pay")], [], [], {}, [], []),
        ([*FIRST, GOT], [], [GO, LATE], DONE, [], []),
        ([*FIRST, TIMEOUT], [], [LATE], DONE, [], []),
        ([*FIRST, GOT], [], [UNKNOWN, LATE], DONE, [], []),
        ([*FIRST, TIMEOUT], [], [UNKNOWN], DONE, [], []),
        # It was cancelled before its wait.
        (FIRST, [], [GO], {"a": "cancelled"}, [], []),
        ([], [], [], {}, ["job a"], ["P13: job a has not ended"]),
        (
            [*FIRST, note("began", "r2"), note("did", "r2", "pay")], [], [], {}, [],
            ["P15: step pay of job a ran again, in a run that began after it was acknowledged"],
        ),
        ([*FIRST, note("kept", "r2", "pay", "r2")], [], [], {}, [], ["P15: step pay of job a has two results"]),
        (
            FIRST, [Written("a", "pay", 3, 4)], [], {}, [],
            ["P15: step pay of job a was kept by a run with the lease 3, while it was held under 4"],
        ),
        (
            FIRST, [Written("a", "pay", 3, None)], [], {}, [],
            ["P15: step pay of job a was kept by a run with the lease 3, while it was held under None"],
        ),
        ([GOT, TIMEOUT], [], [GO], DONE, [], [
            "P16: the wait of job a had 2 outcomes", "P16: the wait of job a timed out, and a signal was accepted",
        ]),
        ([GOT], [], [GO, Sent("a", "too", True)], DONE, [], ["P16: 2 signals to job a were the first"]),
        ([TIMEOUT], [], [GO], DONE, [], ["P16: the wait of job a timed out, and a signal was accepted"]),
        ([GOT], [], [LATE], DONE, [], ["P16: job a received a signal that was refused, or not sent"]),
        ([GOT_LATE], [], [GO, LATE], DONE, [], ["P16: job a received a signal that was refused, or not sent"]),
        ([], [], [GO], DONE, [], ["P16: job a succeeded without the end of its wait"]),
    ],
)  # fmt: skip
def test_each_broken_history_is_rejected(noted: Any, written: Any, sent: Any, ended: Any, left: Any, found: list[str]) -> None:
    assert check_steps(noted, written, sent, ended, left) == found
