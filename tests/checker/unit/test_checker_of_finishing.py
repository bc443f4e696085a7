"""The checker of finished jobs finds what it is for."""

from __future__ import annotations

import pytest

from tests.checker.finishing import Effect, Ended, check_finishing

DONE = Ended("a", "succeeded", 2)


@pytest.mark.parametrize(
    ("ended", "effects", "found"),
    [
        ([DONE], [Effect("a", 2)], []),
        ([Ended("a", "failed", 2)], [], []),
        ([DONE], [], ["P4: job a, which succeeded, has 0 effects"]),
        ([DONE], [Effect("a", 1), Effect("a", 2)], ["P4: job a, which succeeded, has 2 effects"]),
        ([Ended("a", "failed", 2)], [Effect("a", 1)], ["P4: job a, which failed, has 1 effects"]),
        ([DONE], [Effect("a", 1)], ["P4: job a was finished by attempt 1 while attempt 2 had it"]),
        ([], [], ["P2: job a is archived 0 times"]),
        ([DONE, DONE], [Effect("a", 2)], ["P2: job a is archived 2 times"]),
        ([DONE], [Effect("a", 2), Effect("b", 1)], ["P2: an effect of job b, which was not enqueued"]),
    ],
)
def test_effects_and_archive_agree_exactly_once(ended: list[Ended], effects: list[Effect], found: list[str]) -> None:
    assert check_finishing(["a"], ended, effects) == found
