"""Parses dates and times as Spark's cast and its `from_json` do.

A task in Python cannot call Spark, so this module follows `SparkDateTimeUtils` of Spark 4: its grammar, in which parts may be
missing, its zones, and its years beyond those of Python. Results are the numbers that Arrow stores: days, or microseconds,
since 1970.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.errors import InvalidInput

_EPOCH = date(1970, 1, 1).toordinal()
_CYCLE_DAYS = 146_097  # of 400 years, after which the calendar repeats itself
_MICROS = 1_000_000
_LONG = 1 << 63
_START = datetime(1970, 1, 1)
_USUAL = re.compile(r"([12][0-9]{3}-[0-9]{2}-[0-9]{2}[T ](?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,6}))?(Z?)")
_BLANK = bytes([*range(0x21), 0x7F])
_DASH, _PLUS, _COLON, _DOT, _SPACE, _T = b"-+:. T"
# Java's ZoneId.SHORT_IDS.
_SHORT = {
    "ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires", "ART": "Africa/Cairo",
    "AST": "America/Anchorage", "BET": "America/Sao_Paulo", "BST": "Asia/Dhaka", "CAT": "Africa/Harare",
    "CNT": "America/St_Johns", "CST": "America/Chicago", "CTT": "Asia/Shanghai", "EAT": "Africa/Addis_Ababa",
    "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis", "IST": "Asia/Kolkata", "JST": "Asia/Tokyo",
    "MIT": "Pacific/Apia", "NET": "Asia/Yerevan", "NST": "Pacific/Auckland", "PLT": "Asia/Karachi",
    "PNT": "America/Phoenix", "PRT": "America/Puerto_Rico", "PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal",
    "VST": "Asia/Ho_Chi_Minh", "EST": "-05:00", "MST": "-07:00", "HST": "-10:00",
}  # fmt: skip
_OFFSET = re.compile(r"([+-])(?:(\d)|(\d\d)(?::?(\d\d)(?::?(\d\d))?)?)")
_REGION = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")


def zone(name: str) -> tzinfo:
    """A time zone by a name that Spark accepts: Europe/Berlin, UTC, +01:00, GMT+1. Raises `InvalidInput`."""
    try:
        return _zone(name)
    except ValueError:
        raise InvalidInput(f"there is no time zone {name[:60]!r}", hint="It looks like Europe/Berlin, UTC or +01:00.") from None


@lru_cache(1000)
def _zone(name: str) -> tzinfo:
    text = re.sub(r"([+-])(\d):", r"\g<1>0\2:", name, count=1)
    text = re.sub(r"([+-])(\d\d):(\d)$", r"\1\2:0\3", text)
    text = _SHORT.get(text, text)
    if text == "Z":
        return UTC
    if text[:1] in ("+", "-"):
        return _offset(text)
    for prefix in ("UTC", "GMT", "UT"):
        if text == prefix:
            return UTC
        if text.startswith(prefix) and text[len(prefix)] in "+-":
            return _offset(text[len(prefix) :])
    if _REGION.fullmatch(text) is None:
        raise ValueError(name)
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, OSError):
        raise ValueError(name) from None


def _offset(text: str) -> tzinfo:
    match = _OFFSET.fullmatch(text)
    # Hours, minutes and seconds are written with colons or without, but not mixed.
    if match is None or (match[5] and (text.count(":") == 1)):
        raise ValueError(text)
    hours, minutes, seconds = int(match[2] or match[3]), int(match[4] or 0), int(match[5] or 0)
    span = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if minutes > 59 or seconds > 59 or span > timedelta(hours=18):
        raise ValueError(text)
    return timezone(-span if match[1] == "-" else span)


def days(text: str) -> int:
    """A date as days since 1970. Raises `ValueError`."""
    raw = text.encode("utf-8", "replace").strip(_BLANK)
    sign, at = (-1 if raw[:1] == b"-" else 1), (1 if raw[:1] in (b"-", b"+") else 0)
    parts = [1, 1, 1]
    place = value = digits = 0
    while at < len(raw) and raw[at] not in (_SPACE, _T):
        byte = raw[at]
        if place < 2 and byte == _DASH:
            _check(place, digits, 7)
            parts[place] = value
            place, value, digits = place + 1, 0, 0
        elif 48 <= byte <= 57:
            value, digits = value * 10 + byte - 48, digits + 1
        else:
            raise ValueError(text)
        at += 1
    _check(place, digits, 7)
    if place < 2 and at < len(raw):
        raise ValueError(text)
    parts[place] = value
    return _days(sign * parts[0], parts[1], parts[2])


def legacy_days(text: str) -> int:
    """A date, or the number of days as text, which Spark 1.5 wrote, as days since 1970. Raises `ValueError`."""
    try:
        return days(text)
    except ValueError:
        pass
    try:
        return days(text.replace("GMT", ""))
    except ValueError:
        if re.fullmatch(r"[+-]?\d{1,18}", text) is None or not -(1 << 31) <= int(text) < 1 << 31:
            raise
        return _from_julian(int(text))


def micros(text: str, local: tzinfo) -> int:
    """A time as microseconds since 1970. `local` is the zone of a time that names none. Raises `ValueError`."""
    if (usual := _USUAL.fullmatch(text)) is not None:
        # The usual form is parsed several times as fast in this way.
        whole, fraction, utc = usual.groups()
        since = datetime.fromisoformat(whole) - _START
        where = UTC if utc else local
        ahead = 0 if where is UTC else _offset_at(where, since.days, since.seconds)
        return (since.days * 86_400 + since.seconds - ahead) * _MICROS + int((fraction or "0").ljust(6, "0"))
    parts, named, only_time = _parsed(text)
    where = local if named is None else named
    if only_time:
        today = datetime.now(where)
        parts[:3] = [today.year, today.month, today.day]
    days = _days(parts[0], parts[1], parts[2])
    seconds = _seconds(parts)
    return _in_range((days * 86_400 + seconds - _offset_at(where, days, seconds)) * _MICROS + parts[6])


def legacy_micros(text: str, local: tzinfo) -> int:
    """A time, also in the form of Spark 2, with GMT before an offset, as microseconds since 1970. Raises `ValueError`."""
    try:
        return micros(text, local)
    except ValueError:
        if "GMT" not in text:
            raise
        return micros(text.replace("GMT", ""), local)


def local_micros(text: str) -> int:
    """A time without a zone, as microseconds since 1970 without a zone. Raises `ValueError`."""
    parts, named, only_time = _parsed(text)
    if named is not None or only_time:
        raise ValueError(text)
    return _in_range((_days(parts[0], parts[1], parts[2]) * 86_400 + _seconds(parts)) * _MICROS + parts[6])


def _parsed(text: str) -> tuple[list[int], tzinfo | None, bool]:
    """Year, month, day, hour, minute, second and microsecond; the zone, if it is named; and whether the date is missing."""
    raw = text.encode("utf-8", "replace")
    end = len(raw.rstrip(_BLANK))
    at = len(raw) - len(raw.lstrip(_BLANK))
    if at >= end:
        raise ValueError(text)
    parts = [1, 1, 1, 0, 0, 0, 0, 0, 0]
    sign: int | None = None
    if raw[at] in (_DASH, _PLUS):
        sign = -1 if raw[at] == _DASH else 1
        at += 1
    place = value = digits = fraction = 0
    only_time = False
    named: str | None = None
    while at < end:
        byte = raw[at]
        if 48 <= byte <= 57:
            fraction += place == 6
            if place != 6 or digits < 6:
                value = value * 10 + byte - 48
            digits += 1
            at += 1
            continue
        if at == 0 and byte == _T:
            only_time, place = True, 3
            at += 1
            continue
        checked = place
        if place < 2 and byte == _DASH:
            following = place + 1
        elif place == 0 and byte == _COLON and sign is None:
            only_time, checked, following = True, 3, 4
        elif (place == 2 and byte in (_SPACE, _T)) or (place in (3, 4) and byte == _COLON):
            following = place + 1
        elif place == 5 and byte == _DOT:
            following = 6
        elif place in (5, 6):
            named = raw[at:end].decode("utf-8", "replace")
            following = 7
        else:
            raise ValueError(text)
        _check(checked, digits, 6)
        parts[checked] = value
        place, value, digits = following, 0, 0
        at = end if named is not None else at + 1
    _check(place, digits, 6)
    parts[place] = value
    parts[6] *= 10 ** max(0, 6 - fraction)
    parts[0] *= sign or 1
    return parts, None if named is None else _zone(named.strip(_BLANK.decode())), only_time


def _check(place: int, digits: int, year_digits: int) -> None:
    """Raise `ValueError` unless a part of a date or a time can have this number of digits."""
    if place == 0:
        good = 4 <= digits <= year_digits
    elif place == 6:
        good = True
    elif place == 7:
        good = digits <= 2
    else:
        good = 0 < digits <= 2
    if not good:
        raise ValueError(digits)


def _seconds(parts: list[int]) -> int:
    hour, minute, second = parts[3:6]
    if hour > 23 or minute > 59 or second > 59:
        raise ValueError(parts)
    return hour * 3600 + minute * 60 + second


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970 in the Gregorian calendar, continued into the past and the future. Raises `ValueError`."""
    cycles = (year - 1) // 400
    return date(year - cycles * 400, month, day).toordinal() - _EPOCH + cycles * _CYCLE_DAYS


def _offset_at(where: tzinfo, days: int, seconds: int) -> int:
    """Seconds by which a zone is ahead of UTC at a local time.

    For a local time that occurs twice, the first counts; for one that a change of the clock skips, the offset before the change.
    """
    # A year that Python does not support counts as the same year of the nearest cycle of 400 years that it supports. In the
    # first cycle no zone has rules yet.
    year_day = days + _EPOCH
    while year_day < 1:
        year_day += _CYCLE_DAYS
    if year_day > 3_652_059 - _CYCLE_DAYS:
        year_day = 3_652_059 - 2 * _CYCLE_DAYS + (year_day - 3_652_059) % _CYCLE_DAYS
    local = datetime.fromordinal(year_day) + timedelta(seconds=seconds)
    ahead = where.utcoffset(local.replace(tzinfo=where))
    return 0 if ahead is None else round(ahead.total_seconds())


def _in_range(value: int) -> int:
    if not -_LONG <= value < _LONG:
        raise ValueError(value)
    return value


def _from_julian(number: int) -> int:
    """The day of the same date in the Gregorian calendar, for days before 1582-10-15, as Spark rebases them."""
    if number >= -141_427:
        return number
    # Richards' algorithm, from the number of a Julian day.
    shifted = number + 2_440_588 + 1401
    inner = 4 * shifted + 3
    year_day = (inner % 1461) // 4
    month_day = 5 * year_day + 2
    month = (month_day // 153 + 2) % 12 + 1
    year = inner // 1461 - 4716 + (14 - month) // 12
    return _days(year, month, (month_day % 153) // 5 + 1)
