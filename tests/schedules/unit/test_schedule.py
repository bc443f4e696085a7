"""When schedules are due, and what becomes of times that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import InvalidInput
from penstock.schedules.schedule import Cron, Every, Schedule

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
    schedule = Schedule("s", times, lambda: None, missed)
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


EVERY_SECOND = Cron("* * * * * *", "UTC")


# Six days, in smaller steps around the change of the clocks, which is in the midst of them.
MINUTES = sorted({*range(0, 6 * 24 * 60, 61), *range(40 * 60, 80 * 60, 13)})


@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe"])
@pytest.mark.parametrize("expression", ["*/20 * * * *", "30 2 * * *", "15 1,2,3 * * *", "0 4 1 * *"])
def test_the_latest_time_is_the_last_one_that_looking_forward_finds(expression: str, tz: str) -> None:
    times = Cron(expression, tz)
    for month, day in [(3, 29), (10, 25), (4, 5), (10, 4), (1, 1)]:
        base = times.after(datetime(2026, month, day, tzinfo=UTC) - timedelta(days=3), datetime(2026, 1, 1, tzinfo=UTC))
        expected, following = base, times.after(base, base)
        for minutes in MINUTES:
            moment = base + timedelta(minutes=minutes)
            while following <= moment:
                expected, following = following, times.after(following, base)
            assert times.latest(moment, base) == expected


def test_after_years_of_downtime_the_latest_time_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule("s", EVERY_SECOND, lambda: None, "once")
    asked: list[datetime] = []
    after = Cron.after
    monkeypatch.setattr(Cron, "after", lambda self, moment, base: asked.append(moment) or after(self, moment, base))
    assert schedule.decide(at(0), at(9, 30) + timedelta(days=800)) == (
        at(9, 30) + timedelta(days=800),
        at(9, 30) + timedelta(days=800, seconds=1),
    )
    assert len(asked) < 10


def test_each_worker_for_itself_cannot_make_up_for_missed_times() -> None:
    with pytest.raises(InvalidInput, match="in each worker"):
        Schedule("s", HOURLY, lambda: None, "all", "per-worker")


@pytest.mark.parametrize("bad", ["", "a", "61 * * * *", "* * * *"])
def test_bad_expressions_are_refused(bad: str) -> None:
    with pytest.raises(InvalidInput, match="invalid cron"):
        Cron(bad, "UTC")


def test_unknown_time_zones_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown time zone"):
        Cron("* * * * *", "Mars/Olympus")


def test_unknown_policies_and_tiny_spans_are_refused() -> None:
    with pytest.raises(InvalidInput, match="missed"):
        Schedule("s", HOURLY, print, "pray")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="every"):
        Schedule("s", Every(timedelta(0)), print, "skip")
