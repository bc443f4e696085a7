"""Time zones as schedules need them: the local time of an instant, the instant of a local time, and the changes in between.

`zoneinfo` knows the offset at each instant, but has no list of the changes. They are found by comparing offsets: no zone changes
twice within the step of the search, which a test asserts for every zone of the installed data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.errors import InvalidInput

_SECOND = timedelta(seconds=1)
# No change of a zone is larger, and none follows another one within it.
STEP = timedelta(days=1)
LARGEST_CHANGE = timedelta(hours=25)
# The years whose changes are compared between machines.
_COMPARED = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2038, 1, 1, tzinfo=UTC))
# They depend on the machine, or count leap seconds, which no other time here does.
_OF_NO_PLACE = ("localtime", "posixrules", "Factory", "posix/", "right/")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a zone's offset.

    Attributes:
        at: The first instant of the new offset.
        before: Offset before it.
        after: Offset from it on.
    """

    at: datetime
    before: timedelta
    after: timedelta

    @property
    def left(self) -> datetime:
        """The local time at which the clocks are changed."""
        return self.at.replace(tzinfo=None) + self.before

    @property
    def entered(self) -> datetime:
        """The local time to which they are changed."""
        return self.at.replace(tzinfo=None) + self.after

    def skips(self, local: datetime) -> bool:
        """Whether there is no such local time, since the clocks are put forward over it."""
        return self.left <= local < self.entered

    def skips_day_of(self, local: datetime) -> bool:
        """Whether the whole date of a local time is left out."""
        midnight = local.replace(hour=0, minute=0, second=0)
        return self.left <= midnight and midnight + timedelta(days=1) <= self.entered


class Zone:
    """A time zone.

    Args:
        name: Name in the IANA database, such as "Europe/Berlin".

    Raises:
        InvalidInput: There is no such zone, or it is the one that a machine happens to have.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            if name.startswith(_OF_NO_PLACE):
                raise ValueError(name)
            self._zone = ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise InvalidInput(f"unknown time zone: {name!r:.100} (tz)", hint='For example "Europe/Berlin" or "UTC".') from None

    def at(self, instant: datetime) -> datetime:
        """An instant, with its local time and its offset."""
        return instant.astimezone(self._zone)

    def local(self, instant: datetime) -> datetime:
        """The local time of an instant, without a zone."""
        return instant.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def first(self, local: datetime) -> datetime | None:
        """The first instant with a local time; None: there is none, since the clocks are put forward over it."""
        instant = local.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        return instant if self.local(instant) == local else None

    def gap(self, local: datetime) -> Change:
        """The change that puts the clocks forward over a local time which `first` does not find."""
        around = local.replace(tzinfo=self._zone, fold=0).astimezone(UTC)
        return next(change for change in self.changes(around - LARGEST_CHANGE, around + LARGEST_CHANGE) if change.skips(local))

    def change(self, start: datetime, end: datetime) -> Change | None:
        """The first change after `start` and up to `end`, both whole seconds in UTC; None: the offset stays."""
        before = self._offset(start)
        while start < end:
            following = min(start + STEP, end)
            if self._offset(following) != before:
                return self._between(start, following, before)
            start = following
        return None

    def changes(self, start: datetime, end: datetime) -> list[Change]:
        """All changes after `start` and up to `end`, both whole seconds in UTC."""
        found = []
        while (change := self.change(start, end)) is not None:
            found.append(change)
            start = change.at
        return found

    def _between(self, start: datetime, end: datetime, before: timedelta) -> Change:
        while end - start > _SECOND:
            middle = start + timedelta(seconds=(end - start) // _SECOND // 2)
            start, end = (middle, end) if self._offset(middle) == before else (start, middle)
        return Change(end, before, self._offset(end))

    def _offset(self, instant: datetime) -> timedelta:
        return instant.astimezone(self._zone).utcoffset() or timedelta(0)


@cache
def rules_of(name: str) -> str:
    """A digest of the changes of a zone from 2020 to 2037, by which machines whose data differ are told apart."""
    zone = Zone(name)
    start, end = _COMPARED
    changes = [(change.at.isoformat(), str(change.after)) for change in zone.changes(start, end)]
    return hashlib.sha256(repr((str(zone.at(start).utcoffset()), changes)).encode()).hexdigest()[:12]
