"""Scaling advice."""

from __future__ import annotations

import pytest

from penstock.jobs.scaling import Autoscale, Load, ScaleAdvice, advise


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
        (10, 0, 100.0, 0, 0, None, 2),  # no worker
    ],
)
def test_advice(
    ready: int, in_progress: int, oldest: float | None, finished: int, workers: int, most: int | None, advised: int
) -> None:
    load = Load("work", ready, in_progress, oldest, finished, 60.0, workers, most)
    assert advise(load, 5.0).advised == advised


def test_a_wait_that_no_number_of_workers_makes_so_short() -> None:
    assert advise(Load("work", 100, 4, 3.0, 600, 60.0, 4, None), 5e-324).advised == 8


def advice(advised: int, workers: int) -> list[ScaleAdvice]:
    return [ScaleAdvice("work", 0, None, 0.0, None, workers, advised)]


def decisions(scale: Autoscale, steps: list[tuple[float, int, int]], local: int) -> list[int]:
    """What comes of advice over time: (time, workers advised, workers in all); the number here follows each decision."""
    numbers = []
    for now, advised, workers in steps:
        local = scale.decide(advice(advised, workers), local, now)
        numbers.append(local)
    return numbers


def test_more_come_at_once_and_then_it_waits_to_see() -> None:
    scale = Autoscale(1, 8, settle_s=15, cooldown_s=60)
    assert decisions(scale, [(0, 2, 1), (5, 4, 2), (15, 4, 2), (31, 99, 4)], 1) == [2, 2, 4, 8]


def test_fewer_go_one_by_one_after_a_while() -> None:
    scale = Autoscale(1, 8, settle_s=15, cooldown_s=60)
    steps = [(0, 3, 4), (59, 3, 4), (60, 3, 4), (61, 2, 3), (76, 2, 3)]
    assert decisions(scale, steps, 4) == [4, 4, 3, 3, 2]


def test_a_moment_of_load_ends_the_cooldown() -> None:
    scale = Autoscale(1, 8, settle_s=1, cooldown_s=60)
    assert decisions(scale, [(0, 3, 4), (50, 4, 4), (70, 3, 4), (120, 3, 4), (130, 3, 4)], 4) == [4, 4, 4, 4, 3]


@pytest.mark.parametrize(
    ("advised", "workers", "local", "expected"),
    [
        (8, 4, 2, 4),  # another machine runs the other two, and doubles them too
        (5, 4, 1, 2),  # its share, rounded up
        (0, 0, 3, 3),  # no advice at all
        (100, 1, 1, 6),  # never more than the most
        (1, 1, 9, 6),  # there were too many to begin with
    ],
)
def test_a_machine_does_its_share_within_its_limits(advised: int, workers: int, local: int, expected: int) -> None:
    scale = Autoscale(1, 6, settle_s=15, cooldown_s=60)
    assert scale.decide(advice(advised, workers) if advised else [], local, 0.0) == expected


def test_the_type_that_needs_most_decides() -> None:
    scale = Autoscale(1, 9, settle_s=0, cooldown_s=0)
    assert scale.decide(advice(1, 3) + advice(5, 3) + advice(3, 3), 3, 0.0) == 5
