"""The times of cron expressions around a change of the clocks, found by looking at every second."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import numpy as np

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400
WINDOW_S = 2 * DAY_S
# What no schedule names as its zone: it is that of a machine, or counts leap seconds.
NO_PLACES = ("localtime", "posixrules", "Factory", "posix/", "right/")


@dataclass(frozen=True)
class Fields:
    """What an expression names; seconds, minutes, hours, months as sets. `star`: hours or minutes have a *."""

    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int] | None
    months: frozenset[int]
    weekdays: frozenset[int] | None
    star: bool

    def fits(self, day: date) -> bool:
        of_month = self.days is None or day.day in self.days
        of_week = self.weekdays is None or day.isoweekday() % 7 in self.weekdays
        both = self.days is None or self.weekdays is None
        return day.month in self.months and (of_month and of_week if both else of_month or of_week)


def places() -> list[str]:
    return sorted(name for name in available_timezones() if not name.startswith(NO_PLACES))


def offset_at(zone: ZoneInfo, second: int) -> int:
    offset = (EPOCH + timedelta(seconds=second)).astimezone(zone).utcoffset()
    assert offset is not None
    return round(offset.total_seconds())


@cache
def changes_of(name: str, first: int = 1970, last: int = 2037) -> tuple[int, ...]:
    """The seconds, since 1970, at which the offset of a zone changes."""
    zone, found = ZoneInfo(name), []
    at = round((datetime(first, 1, 1, tzinfo=UTC) - EPOCH).total_seconds())
    end = round((datetime(last + 1, 1, 1, tzinfo=UTC) - EPOCH).total_seconds())
    step = DAY_S // 2
    while at < end:
        if offset_at(zone, at) != offset_at(zone, at + step):
            low, high = at, at + step
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset_at(zone, middle) == offset_at(zone, at) else (low, middle)
            found.append(high)
        at += step
    return tuple(found)


def local_seconds(zone: ZoneInfo, start: int, end: int) -> np.ndarray:
    """The local time of each second from `start` on, as seconds since 1970 by the clock on the wall."""
    offsets = np.empty(end - start, dtype=np.int64)
    for minute in range(start, end, 60):
        here, there = offset_at(zone, minute), offset_at(zone, min(minute + 59, end - 1))
        if here == there:
            offsets[minute - start : minute + 60 - start] = here
        else:
            for second in range(minute, min(minute + 60, end)):
                offsets[second - start] = offset_at(zone, second)
    return np.arange(start, end, dtype=np.int64) + offsets


def times_of(fields: Fields, readings: np.ndarray, start: int) -> list[datetime]:
    """The times of an expression among seconds that are read one after the other, by the rule of the documents."""
    of_day = readings % DAY_S
    numbered = readings // DAY_S
    dates = {int(day): fields.fits(date(1970, 1, 1) + timedelta(days=int(day))) for day in np.unique(numbered)}

    def matching(second_of_day: np.ndarray) -> np.ndarray:
        hours, minutes, seconds = second_of_day // 3600, second_of_day // 60 % 60, second_of_day % 60
        found: np.ndarray = (
            np.isin(hours, list(fields.hours)) & np.isin(minutes, list(fields.minutes)) & np.isin(seconds, list(fields.seconds))
        )
        return found

    fitting = np.isin(numbered, [day for day, fits in dates.items() if fits])
    hits = np.flatnonzero(fitting & matching(of_day))
    if fields.star:
        return [EPOCH + timedelta(seconds=start + int(hit)) for hit in hits]
    found: list[datetime] = []
    seen: set[int] = set()
    existing = set(numbered.tolist())
    jumps = set((np.flatnonzero(np.diff(readings) > 1) + 1).tolist())
    for place in sorted({*hits.tolist(), *jumps}):
        instant = EPOCH + timedelta(seconds=start + int(place))
        slots = []
        if place in jumps:
            # The clock on the wall goes on to `readings[place]`: what it leaves out falls on this instant.
            left_out = np.arange(readings[place - 1] + 1, readings[place])
            left_out = left_out[np.isin(left_out // DAY_S, list(existing))]
            fits = {int(day): fields.fits(date(1970, 1, 1) + timedelta(days=int(day))) for day in np.unique(left_out // DAY_S)}
            left_out = left_out[np.isin(left_out // DAY_S, [day for day, that in fits.items() if that])]
            slots += left_out[matching(left_out % DAY_S)].tolist()
        if fitting[place] and matching(of_day[place : place + 1])[0]:
            slots.append(int(readings[place]))
        slots = [slot for slot in slots if slot not in seen]
        seen.update(slots)
        found += [instant + timedelta(microseconds=number) for number in range(len(slots))]
    return found


def some(chosen: random.Random, least: int, most: int, count: int) -> list[int]:
    return sorted(chosen.sample(range(least, most + 1), min(count, most - least + 1)))


def any_expression(chosen: random.Random, near: datetime) -> tuple[str, Fields]:
    """An expression whose hours and minutes are mostly those around a local time, and what it names."""

    def numbers(around: int, most: int) -> list[int]:
        return sorted(
            {(around + chosen.choice([0, 0, 0, 1, -1, 30, 15])) % (most + 1) for _ in range(chosen.choice([1, 1, 2, 3]))}
        )

    def listed(values: list[int]) -> str:
        return ",".join(map(str, values))

    all_minutes, all_hours = frozenset(range(60)), frozenset(range(24))
    kind = chosen.choice(["named", "named", "named", "ranges", "star minutes", "star hours", "both", "every second named"])
    minutes, hours = numbers(chosen.choice([0, 30, near.minute, near.minute]), 59), numbers(near.hour, 23)
    minute_field, hour_field, star = listed(minutes), listed(hours), False
    if kind == "ranges":
        low, high = some(chosen, 0, 23, 2)
        hour_field, hours = f"{low}-{high}", list(range(low, high + 1))
    if kind in ("star minutes", "both"):
        step = chosen.choice([1, 1, 5, 20, 45])
        minute_field, minutes, star = "*" if step == 1 else f"*/{step}", list(range(0, 60, step)), True
    if kind in ("star hours", "both"):
        step = chosen.choice([1, 1, 2, 6])
        hour_field, hours, star = "*" if step == 1 else f"*/{step}", list(range(0, 24, step)), True
    assert all_minutes >= set(minutes) and all_hours >= set(hours)
    seconds = [0]
    parts = [minute_field, hour_field]
    if kind == "every second named" or chosen.random() < 0.3:
        seconds = chosen.choice([[0], [0, 30], [59], some(chosen, 0, 59, 3)])
        parts.insert(0, listed(seconds))
    days = months = weekdays = None
    if chosen.random() < 0.3:
        days = sorted({near.day, chosen.randint(1, 28)})
    if chosen.random() < 0.3:
        weekdays = sorted({near.isoweekday() % 7, chosen.randint(0, 6)})
    if chosen.random() < 0.2:
        months = sorted({near.month, chosen.randint(1, 12)})
    parts += ["*" if values is None else listed(values) for values in (days, months, weekdays)]
    return " ".join(parts), Fields(
        frozenset(seconds), frozenset(minutes), frozenset(hours), None if days is None else frozenset(days),
        frozenset(range(1, 13) if months is None else months), None if weekdays is None else frozenset(weekdays), star,
    )  # fmt: skip
