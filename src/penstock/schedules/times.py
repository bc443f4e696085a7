"""The times of timers and cron schedules.

`cronsim` parses cron expressions; the search is here. It walks through instants and the changes of the time zone:

* An expression that names its hours and its minutes has a slot for each local date and time that matches. A slot runs once: at
  its first instant, and where the clocks are put forward over it, at the first instant after that. Slots that fall on one instant
  follow each other by a microsecond, in their order. A date that the zone leaves out has no slots.
* An expression with `*`, or a step of it, in its hours or minutes runs at every instant whose local time matches.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from functools import cached_property

from cronsim import CronSim, CronSimError
from cronsim.cronsim import Field

from penstock.core.checks import LONGEST_SPAN, check_span, check_text
from penstock.errors import InvalidInput
from penstock.schedules.zones import LARGEST_CHANGE, Change, Zone

_STEP_OF_RANGE = re.compile(r"(\w+)-(\w+)/0*[1-9][0-9]*")
_SECOND = timedelta(seconds=1)
_MICROSECOND = timedelta(microseconds=1)
_DAY = timedelta(days=1)
# Each combination of a date and a day of the week comes back within this time, also over a century without a leap day.
_CYCLE = timedelta(days=41 * 366)
_LONGEST_EXPRESSION = 200
# As Debian's cron reads them.
_NICKNAMES = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip


@dataclass(frozen=True)
class Every:
    """Times at a fixed interval."""

    span: timedelta

    def __post_init__(self) -> None:
        check_span("every", self.span, shortest=timedelta(milliseconds=10), longest=LONGEST_SPAN)

    @property
    def kind(self) -> str:
        """See `schedules.kind`."""
        return "every"

    @property
    def spec(self) -> str:
        """See `schedules.spec`."""
        seconds, microseconds = divmod(self.span // _MICROSECOND, 1_000_000)
        return f"{seconds}.{microseconds:06d}".rstrip("0").rstrip(".")

    def after(self, moment: datetime, base: datetime) -> datetime:
        """The first time after `moment` that is a whole number of spans from `base`."""
        return base + (((moment - base) // self.span) + 1) * self.span

    def latest(self, moment: datetime, base: datetime) -> datetime:
        """The last time up to `moment`."""
        return self.after(moment, base) - self.span

    def local(self, instant: datetime) -> datetime:
        """A time as it is given to the function: in UTC."""
        return instant.astimezone(UTC)


def _without_steps_of_one(expression: str) -> str:
    """The expression, in which a step of a range with one value, as in `7-7/2`, is left out: cronsim takes it for `7/2`."""
    parts = expression.upper().split()
    if len(parts) not in (5, 6):
        return expression
    first = Field.MINUTE if len(parts) == 5 else Field.SECOND

    def shorter(field: Field, term: str) -> str:
        found = _STEP_OF_RANGE.fullmatch(term)
        return found[1] if found and field.int(found[1]) == field.int(found[2]) else term

    return " ".join(",".join(shorter(Field(first + place), term) for term in part.split(",")) for place, part in enumerate(parts))


@dataclass(frozen=True)
class Cron:
    """The times of a cron expression in a time zone.

    Raises:
        InvalidInput: The expression is none, no date ever matches it, or the time zone is unknown.
    """

    expression: str
    tz: str

    def __post_init__(self) -> None:
        check_text("expression", self.expression)
        check_text("tz", self.tz)
        if len(self.expression) > _LONGEST_EXPRESSION:
            raise InvalidInput(
                f"invalid cron expression {self.expression!r:.100}: it has {len(self.expression)} characters",
                hint=f"At most {_LONGEST_EXPRESSION}: state ranges and steps instead of each value.",
            )
        spaced = " ".join(self.expression.split())
        object.__setattr__(self, "expression", spaced.lower() if spaced.startswith("@") else spaced)
        self._zone  # noqa: B018 - it refuses an unknown zone
        if self._following_day(date(2024, 1, 1)) is None:
            raise InvalidInput(
                f"cron expression {self.expression!r} never runs: no date has that day, month and day of the week",
                hint="A day of the month and a day of the week must both match where one of them begins with *.",
            )

    @property
    def kind(self) -> str:
        """See `schedules.kind`."""
        return "cron"

    @property
    def spec(self) -> str:
        """See `schedules.spec`."""
        return f"{self.expression} {self.tz}"

    def after(self, moment: datetime, base: datetime) -> datetime:
        """The first time after `moment`."""
        moment = moment.astimezone(UTC)
        return self._matching_after(moment) if self._every_instant else self._slot_after(moment)

    def latest(self, moment: datetime, base: datetime) -> datetime:
        """The last time up to `moment`, not before `base`, which is one of the times."""
        # The latest time is halved in, since millions of times may lie between.
        found, end = base.astimezone(UTC), moment.astimezone(UTC)
        while end - found >= _MICROSECOND:
            middle = found + (end - found) / 2
            following = self.after(middle, base)
            if following <= moment:
                found = following
            elif (following := self.after(found, base)) > moment:
                break
            else:
                found, end = following, max(middle, following)
        return found

    def local(self, instant: datetime) -> datetime:
        """A time as it is given to the function: in the time zone of the schedule."""
        return self._zone.at(instant)

    @cached_property
    def _zone(self) -> Zone:
        return Zone(self.tz)

    @cached_property
    def _fields(self) -> CronSim:
        expression = _NICKNAMES.get(self.expression, self.expression)
        try:
            if expression.startswith("@"):
                raise CronSimError(f"unknown nickname, known are {', '.join(_NICKNAMES)}")
            return CronSim(_without_steps_of_one(expression), datetime(2024, 1, 1))
        except (CronSimError, ValueError) as error:
            raise InvalidInput(
                f"invalid cron expression {self.expression!r:.100}: {error}", hint='For example "0 4 * * *".'
            ) from None

    @cached_property
    def _every_instant(self) -> bool:
        return "*" in self._fields.parts[1] or "*" in self._fields.parts[2]

    @cached_property
    def _clock(self) -> tuple[list[int], list[int], list[int]]:
        """The hours, minutes and seconds, in their order."""
        return sorted(self._fields.hours), sorted(self._fields.minutes), sorted(self._fields.seconds)

    def _slot_after(self, moment: datetime) -> datetime:
        """The instant of the first slot after `moment`, of an expression that names its hours and minutes."""
        for slot in self._slots_from(self._not_run_before(moment)):
            instant = self._instant_of(slot)
            if instant is not None and instant > moment:
                return instant
        raise self._ends()

    def _not_run_before(self, moment: datetime) -> datetime:
        """A local time below which each slot has run at `moment`."""
        second = moment.replace(microsecond=0)
        start = self._zone.local(second)
        for change in self._zone.changes(second - LARGEST_CHANGE, second):
            if change.after < change.before:
                # What was reached before the clocks were put back does not run again.
                start = max(start, change.left)
            elif change.at == second:
                # The slots of the gap are about to follow each other.
                start = min(start, change.left)
        return start

    def _instant_of(self, slot: datetime) -> datetime | None:
        """When a slot runs; None: its date is one that the zone leaves out."""
        instant = self._zone.first(slot)
        if instant is None:
            gap = self._zone.gap(slot)
            return None if gap.skips_day_of(slot) else gap.at + self._slots_between(gap, slot) * _MICROSECOND
        change = self._zone.change(instant - _SECOND, instant)
        if change is not None and change.after > change.before:
            return instant + self._slots_between(change, slot) * _MICROSECOND
        return instant

    def _slots_between(self, gap: Change, end: datetime) -> int:
        """How many slots of a gap come before a local time."""
        found, day = 0, gap.left.date()
        while day <= end.date():
            midnight = datetime.combine(day, time())
            if self._fits(day) and not gap.skips_day_of(midnight):
                found += self._rank(min(end - midnight, _DAY)) - self._rank(max(gap.left - midnight, timedelta(0)))
            day += _DAY
        return found

    def _rank(self, since_midnight: timedelta) -> int:
        """How many slots of a day come before a time of it."""
        hours, minutes, seconds = self._clock
        if since_midnight >= _DAY:
            return len(hours) * len(minutes) * len(seconds)
        hour, rest = divmod(since_midnight // _SECOND, 3600)
        minute, second = divmod(rest, 60)
        full_hours, full_minutes = bisect_left(hours, hour), bisect_left(minutes, minute)
        found = full_hours * len(minutes) * len(seconds)
        if hour in self._fields.hours:
            found += full_minutes * len(seconds)
            if minute in self._fields.minutes:
                found += bisect_left(seconds, second)
        return found

    def _matching_after(self, moment: datetime) -> datetime:
        """The first instant after `moment` whose local time matches."""
        cursor = moment.replace(microsecond=0)
        while True:
            local = self._zone.local(cursor)
            match = next(self._slots_from(local + _SECOND), None)
            if match is None:
                raise self._ends()
            near = min(match - local, LARGEST_CHANGE)
            change = self._zone.change(cursor, cursor + near)
            if change is None and match - local > 3 * _DAY:
                # No local time comes back from here on before the days around the match.
                cursor += match - local - 2 * _DAY
            elif change is None and near == match - local:
                return cursor + near
            elif change is None:
                cursor += near
            elif self._matches(change.entered):
                return change.at
            else:
                cursor = change.at

    def _matches(self, local: datetime) -> bool:
        fields = self._fields
        of_clock = local.hour in fields.hours and local.minute in fields.minutes and local.second in fields.seconds
        return of_clock and self._fits(local.date())

    def _slots_from(self, start: datetime) -> Iterator[datetime]:
        """The local times that match, from `start` on."""
        day, since = self._following_day(start.date()), start.time()
        hours, minutes, seconds = self._clock
        while day is not None:
            if day > start.date():
                since = time()
            for hour in hours[bisect_left(hours, since.hour) :]:
                same_hour = hour == since.hour
                for minute in minutes[bisect_left(minutes, since.minute) if same_hour else 0 :]:
                    same_minute = same_hour and minute == since.minute
                    for second in seconds[bisect_left(seconds, since.second) if same_minute else 0 :]:
                        yield datetime.combine(day, time(hour, minute, second))
            day = self._following_day(day + _DAY)

    def _following_day(self, day: date) -> date | None:
        """The first date that matches, from `day` on; None: no date ever does."""
        end = day + _CYCLE
        while day < end:
            if self._fits(day):
                return day
            if day.month in self._fields.months:
                day += _DAY
            else:
                day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
        return None

    def _fits(self, day: date) -> bool:
        return day.month in self._fields.months and self._fields.match_day(day)

    def _ends(self) -> InvalidInput:
        return InvalidInput(f"cron expression {self.expression!r} has no further time", hint="Give it another day or month.")


def times_of(kind: str, spec: str) -> Every | Cron:
    """The times of a stored schedule. Raises `InvalidInput` when it was not written by a declaration of this library."""
    if kind == "cron":
        expression, _, tz = spec.rpartition(" ")
        return Cron(expression, tz)
    try:
        return Every(int(Decimal(spec) * 1_000_000) * _MICROSECOND)
    except (InvalidOperation, OverflowError, ValueError):
        raise InvalidInput(f"{spec!r:.100} is no number of seconds", hint="Declare the schedule again.") from None
