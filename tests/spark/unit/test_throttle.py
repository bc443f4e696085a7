"""Stepping back behind the rest of a machine."""

from __future__ import annotations

from datetime import timedelta

from penstock.spark.throttle import throttle


def test_waits_until_the_machine_is_half_idle() -> None:
    looks = iter([100.0, 50.0, 49.9, 100.0])
    assert throttle(timedelta(hours=1), lambda _: next(looks))
    assert next(looks) == 100.0


def test_waits_only_so_long() -> None:
    looked: list[float] = []

    def busy(seconds: float) -> float:
        looked.append(seconds)
        return 100.0

    assert not throttle(timedelta(milliseconds=20), busy)
    assert 0 < max(looked) <= 0.02


def test_without_a_timeout_it_does_not_look() -> None:
    assert not throttle(timedelta(0), lambda _: 1 / 0)
