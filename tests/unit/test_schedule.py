"""When schedules are due, and what becomes of times that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import InvalidInput
from penstock.schedule import Cron, Every, Schedule

HOURLY = Cron("0 * * * *", "UTC")


def at(hour: int, minute: int = 0, day: int = 5) -> datetime:
    return datetime(2026, 1, day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("missed", "now", "run_for", "next_at"),
    [
        ("skip", at(4), at(4), at(5)),
        ("once", at(4, 0), at(4), at(5)),
        ("skip", at(4, 30), None, at(5)),
        ("once", at(4, 30), at(4), at(5)),
        ("all", at(4, 30), at(4), at(5)),
        ("skip", at(9, 30), None, at(10)),
        ("once", at(9, 30), at(9), at(10)),
        ("all", at(9, 30), at(4), at(5)),
    ],
)
@pytest.mark.parametrize("times", [HOURLY, Every(timedelta(hours=1))], ids=["cron", "every"])
def test_missed_times(times: Any, missed: Any, now: datetime, run_for: datetime | None, next_at: datetime) -> None:
    schedule = Schedule("s", times, lambda: None, missed, per_worker=False)
    assert schedule.decide(at(4), now) == (run_for, next_at)


def test_cron_follows_the_clocks_of_its_time_zone() -> None:
    daily = Cron("30 2 * * *", "Europe/Berlin")
    spring = datetime(2026, 3, 28, 12, tzinfo=UTC)
    # On 29 March there is no 2:30: it runs at 3:00 summer time. On 25 October there are two: it runs at the first.
    assert daily.after(spring, spring) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    autumn = datetime(2026, 10, 24, 12, tzinfo=UTC)
    first = daily.after(autumn, autumn)
    assert first == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)
    assert daily.after(first, first) == datetime(2026, 10, 26, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("bad", ["", "a", "61 * * * *", "* * * *"])
def test_bad_expressions_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="invalid cron"):
        Cron(bad, "UTC")


def test_unknown_time_zones_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown time zone"):
        Cron("* * * * *", "Mars/Olympus")


def test_unknown_policies_and_tiny_spans_are_refused() -> None:
    with pytest.raises(InvalidInput, match="missed"):
        Schedule("s", HOURLY, print, "pray", False)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="every"):
        Schedule("s", Every(timedelta(0)), print, "skip", False)
