"""The checkers of operations find what they are for."""

from __future__ import annotations

import pytest

from tests.checker.operations import check_cancel, check_replay


@pytest.mark.parametrize(
    ("cancelled", "done", "found"),
    [
        (["a", "b"], 2, []),
        (["a"], 2, ["job b matches and is not cancelled"]),
        (["a", "b", "b"], 2, ["job b is archived 2 times"]),
        (["a", "b", "c"], 2, ["job c is cancelled and does not match"]),
        (["a", "b"], 3, ["the operation counts 3 jobs of 2"]),
    ],
)
def test_a_cancellation_changes_each_job_once(cancelled: list[str], done: int, found: list[str]) -> None:
    assert check_cancel(["a", "b"], ["c"], cancelled, done) == found


@pytest.mark.parametrize(
    ("replays", "done", "found"),
    [
        (["a", "b"], 2, []),
        (["a"], 2, ["job b has 0 replays"]),
        (["a", "b", "b"], 2, ["job b has 2 replays"]),
        (["a", "b", "c"], 2, ["job c does not match and has 1 replays"]),
        (["a", "b"], 1, ["the operation counts 1 jobs of 2"]),
    ],
)
def test_a_replay_makes_one_copy_of_each_job(replays: list[str], done: int, found: list[str]) -> None:
    assert check_replay(["a", "b"], replays, done) == found
