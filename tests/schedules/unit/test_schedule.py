"""When schedules are due, and what becomes of times that were missed."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import InvalidInput
from penstock.schedules.schedule import Schedule, ScheduleRecord
from penstock.schedules.times import Cron, Every, times_of

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


def times(expression: str, tz: str, start: str, count: int) -> list[str]:
    """The first times after a moment, as UTC."""
    cron, moment, found = Cron(expression, tz), datetime.fromisoformat(start), []
    for _ in range(count):
        following = cron.after(moment, moment)
        assert following > moment
        moment = following
        found.append(f"{moment:%m-%d %H:%M:%S}" + (f".{moment:%f}" if moment.microsecond else ""))
    return found


SPRING, AUTUMN = "2026-03-08T00:00+00:00", "2026-11-01T00:00+00:00"


# In New York 8 March has no 2:00 to 3:00, and 1 November has 1:00 to 2:00 twice.
@pytest.mark.parametrize("seconds", ["", "0 "])
@pytest.mark.parametrize(
    ("expression", "tz", "start", "expected"),
    [
        ("30 2 * * *", "America/New_York", SPRING, ["03-08 07:00:00", "03-09 06:30:00"]),
        ("0,30 2 * * *", "America/New_York", SPRING, ["03-08 07:00:00", "03-08 07:00:00.000001", "03-09 06:00:00"]),
        ("0 2,3 * * *", "America/New_York", SPRING, ["03-08 07:00:00", "03-08 07:00:00.000001", "03-09 06:00:00"]),
        ("*/30 2 * * *", "America/New_York", SPRING, ["03-09 06:00:00", "03-09 06:30:00"]),
        ("0 * * * *", "America/New_York", "2026-03-08T05:30+00:00", ["03-08 06:00:00", "03-08 07:00:00", "03-08 08:00:00"]),
        ("30 1 * * *", "America/New_York", AUTUMN, ["11-01 05:30:00", "11-02 06:30:00"]),
        ("*/30 1 * * *", "America/New_York", AUTUMN, ["11-01 05:00:00", "11-01 05:30:00", "11-01 06:00:00", "11-01 06:30:00"]),
        ("30 1 * * *", "America/New_York", "2026-11-01T06:10+00:00", ["11-02 06:30:00"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10+00:00", ["10-26 01:30:00"]),
        # The clocks of these go forward at midnight.
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T12:00+00:00", ["04-23 22:00:00", "04-24 21:00:00"]),
        ("0 0 * * *", "America/Havana", "2026-03-07T12:00+00:00", ["03-08 05:00:00", "03-09 04:00:00"]),
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00+00:00", ["09-06 04:00:00", "09-07 03:00:00"]),
        # By half an hour.
        ("0 9 * * *", "Australia/Lord_Howe", "2026-04-04T12:00+00:00", ["04-04 22:30:00", "04-05 22:30:00"]),
        ("0 */6 * * *", "Australia/Lord_Howe", "2026-10-03T12:00+00:00", ["10-03 13:30:00", "10-03 19:00:00", "10-04 01:00:00"]),
        ("45 3 * * *", "Pacific/Chatham", "2026-04-03T14:00+00:00", ["04-04 15:00:00", "04-05 15:00:00"]),
        # Samoa had no 30 December 2011, and Kwajalein no 21 August 1993.
        ("0 12 * * *", "Pacific/Apia", "2011-12-29T00:00+00:00", ["12-29 22:00:00", "12-30 22:00:00"]),
        ("0 */12 * * *", "Pacific/Apia", "2011-12-29T12:00+00:00", ["12-29 22:00:00", "12-30 10:00:00", "12-30 22:00:00"]),
        ("0 12 20-22 * *", "Pacific/Kwajalein", "1993-08-20T00:00+00:00", ["08-21 00:00:00", "08-22 00:00:00", "09-20 00:00:00"]),
    ],
)  # fmt: skip
def test_slots_run_once_and_every_matching_instant_runs_when_the_clocks_are_changed(
    seconds: str, expression: str, tz: str, start: str, expected: list[str]
) -> None:
    assert times(seconds + expression, tz, start, len(expected)) == expected


@pytest.mark.parametrize("missed", ["skip", "once", "all"])
@pytest.mark.parametrize("expression", ["30 1 * * *", "0,30 1,2 * * *", "*/10 1 * * *", "0 30 2 * * *", "0,30 2 * * *"])
@pytest.mark.parametrize("start", [SPRING, AUTUMN])
def test_each_time_of_a_night_with_a_change_has_one_run_by_a_worker_that_looks_each_second(
    missed: Any, expression: str, start: str
) -> None:
    schedule = Schedule("s", Cron(expression, "America/New_York"), lambda: None, missed)
    now = datetime.fromisoformat(start)
    end = now + timedelta(hours=30)
    expected, time = [], now
    while (time := schedule.times.after(time, time)) <= end:
        expected.append(time)
    due, ran = expected[0], []
    while now < end:
        now += timedelta(seconds=1)
        if due <= now:
            run_for, following = schedule.decide(due, now)
            assert following > due
            ran.append(run_for)
            due = following
    assert ran == expected


def test_a_worker_that_starts_in_the_repeated_hour_runs_what_has_not_run() -> None:
    schedule = Schedule("s", Cron("30 1 * * *", "America/New_York"), lambda: None, "once")
    second_time = datetime(2026, 11, 1, 6, 30, tzinfo=UTC)
    run_for, following = schedule.decide(datetime(2026, 10, 31, 5, 30, tzinfo=UTC), second_time)
    assert run_for == datetime(2026, 11, 1, 5, 30, tzinfo=UTC)
    assert following == datetime(2026, 11, 2, 6, 30, tzinfo=UTC)


@pytest.mark.parametrize("expression", ["0 0 */31 * 1#5", "0 0 31 4,6 */7", "0 0 30 2 *"])
def test_an_expression_that_never_runs_is_refused_by_name(expression: str) -> None:
    with pytest.raises(InvalidInput, match=f"{re.escape(expression)}.* never runs|invalid cron") as refused:
        Cron(expression, "UTC")
    assert refused.value.hint


def test_a_time_years_away_is_found() -> None:
    # 29 February on a Sunday, across the year 2100, which has none.
    moment = datetime(2088, 3, 1, tzinfo=UTC)
    assert Cron("0 0 29 2 */7", "UTC").after(moment, moment) == datetime(2128, 2, 29, tzinfo=UTC)
    assert Cron("* * 29 2 */7", "Europe/Berlin").after(moment, moment) == datetime(2128, 2, 28, 23, tzinfo=UTC)


@pytest.mark.parametrize(
    ("nickname", "expression"),
    [("@hourly", "0 * * * *"), ("@daily", "0 0 * * *"), ("@midnight", "0 0 * * *"), ("@weekly", "0 0 * * 0"),
     ("@monthly", "0 0 1 * *"), ("@yearly", "0 0 1 1 *"), ("@annually", "0 0 1 1 *"), ("@Daily", "0 0 * * *")],
)  # fmt: skip
def test_nicknames_are_those_of_debians_cron(nickname: str, expression: str) -> None:
    assert times(nickname, "Europe/Berlin", AUTUMN, 3) == times(expression, "Europe/Berlin", AUTUMN, 3)


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        ("47-47/1 1 * * *", "47 1 * * *"),
        ("0,35-35/9 9 * * *", "0,35 9 * * *"),
        ("0 20-20/3 * jan-1/2 mon-1/2", "0 20 * 1 1"),
        ("5-05/2 0 9-9/30 * *", "5 0 9 * *"),
        ("30-30/7 0 20-20/3 * * *", "30 0 20 * * *"),
        ("5/15 0 * * *", "5,20,35,50 0 * * *"),
        ("5-6/15 0 * * *", "5 0 * * *"),
    ],
)
def test_a_step_of_a_range_stays_in_the_range_also_when_it_has_one_value(expression: str, same: str) -> None:
    at, other = Cron(expression, "UTC"), Cron(same, "UTC")
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(30):
        following = at.after(moment, moment)
        assert following == other.after(moment, moment)
        moment = following


@pytest.mark.parametrize("tz", ["localtime", "right/UTC", "posix/UTC", "Factory", "../passwd", "", "Europe/Berlin "])
def test_zones_of_no_place_are_refused(tz: str) -> None:
    with pytest.raises(InvalidInput, match="unknown time zone"):
        Cron("* * * * *", tz)


@pytest.mark.parametrize(
    "span",
    [timedelta(days=120, hours=1, minutes=1), timedelta(days=20), timedelta(days=20, seconds=1), timedelta(milliseconds=10),
     timedelta(seconds=1, microseconds=1), timedelta(hours=1), timedelta(days=366_000)],
)  # fmt: skip
def test_the_span_of_a_timer_is_stored_as_it_is(span: timedelta) -> None:
    assert times_of("every", Every(span).spec) == Every(span)


@pytest.mark.parametrize(
    ("kind", "spec"), [("every", "NaN"), ("every", "1e400"), ("every", ""), ("cron", "x"), ("cron", "61 * * * * UTC")]
)
def test_a_record_that_another_program_wrote_has_its_stored_time(kind: str, spec: str) -> None:
    record = ScheduleRecord("s", "job", kind, spec, at(4), None, None, None, None, None, None, None, None, False, None)
    assert record.upcoming() == [at(4)]


def test_a_run_is_for_a_time_in_the_zone_of_its_schedule() -> None:
    schedule = Schedule("s", Cron("0 0 1 * *", "Europe/Berlin"), lambda: None, "skip", key=lambda tick: f"{tick.at:%Y-%m}")
    midnight = datetime(2026, 1, 31, 23, tzinfo=UTC)
    assert schedule.key_of(midnight, midnight) == "2026-02"
    assert str(schedule.tick(midnight, midnight).at) == "2026-02-01 00:00:00+01:00"


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
    assert len(asked) < 100


def test_each_worker_for_itself_cannot_make_up_for_missed_times() -> None:
    with pytest.raises(InvalidInput, match="in each worker"):
        Schedule("s", HOURLY, lambda: None, "all", "per-worker")


@pytest.mark.parametrize(
    "bad", ["", "a", "61 * * * *", "* * * *", "1" * 5000 + " * * * *", "@reboot", "0 0 31 2 *", "\u0661 * * * *"]
)
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
