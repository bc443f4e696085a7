"""Scaling advice."""

from __future__ import annotations

import pytest

from penstock.scaling import Load, advise


@pytest.mark.parametrize(
    ("ready", "in_progress", "oldest", "finished", "workers", "most", "advised"),
    [
        (0, 0, None, 0, 4, None, 1),  # nothing at all
        (0, 2, None, 600, 4, None, 3),  # nothing waits: one less, step by step
        (20, 4, 2.0, 600, 4, None, 4),  # waits, but not too long
        (100, 4, 3.0, 600, 4, None, 8),  # ten seconds of backlog for five: twice as many
        (10_000, 4, 60.0, 600, 4, None, 8),  # never more than twice as many at once
        (10_000, 4, 60.0, 600, 4, 6, 6),  # a pool with six slots keeps six busy
        (10, 4, 9.0, 0, 4, None, 5),  # nothing finishes, and they wait
        (10, 4, 1.0, 0, 4, None, 4),  # nothing finished yet
        (10, 0, 100.0, 0, 0, None, 2),  # nobody works
    ],
)
def test_advice(
    ready: int, in_progress: int, oldest: float | None, finished: int, workers: int, most: int | None, advised: int
) -> None:
    load = Load("work", ready, in_progress, oldest, finished, 60.0, workers, most)
    assert advise(load, 5.0).advised == advised
