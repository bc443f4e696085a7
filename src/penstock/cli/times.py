"""Times and spans of time as people read and write them at a terminal.

One rule holds everywhere: what is shown has its zone, and what is written has one too. Only a terminal reads a time without a
zone, since it has a zone of its own, the one in which the commands show times. Where the clocks of that zone change, such a time
may not exist, or may happen twice: it is refused, with the times that may be meant.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta

import typer

from penstock.core.checks import parse_time
from penstock.errors import InvalidInput

TIME = "A time, without a zone in that of the terminal; or +5m."
"""The help of an option that takes a `moment`."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def shown(time: datetime) -> str:
    """A time in the zone of the terminal, with its offset from UTC: 2026-01-31 13:00:00+01:00, which the commands also read."""
    with suppress(OverflowError, ValueError, OSError):  # too near to the end of time for a time zone
        return time.astimezone().isoformat(" ", "seconds")
    return time.isoformat(" ")


def local_time(text: str) -> datetime:
    """A time in ISO 8601 as it is typed: with a zone, or without one in the zone of the terminal.

    Raises:
        typer.BadParameter: It is not a time, or the clocks here skip it or show it twice.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time: write 2026-01-31T12:00:00Z or 2026-01-31T12:00") from None
    try:
        if time.utcoffset() is not None:
            return time.astimezone(UTC)
        # The same clock face before and after a change of the clocks; where they do not change, both are one.
        moments = sorted({time.replace(fold=fold).astimezone(UTC) for fold in (0, 1)})
        written = [moment.astimezone() for moment in moments]
    except (OverflowError, ValueError, OSError):
        raise typer.BadParameter(f"{text!r} is out of range: times lie in the years 1 to 9999") from None
    if len(moments) == 1:
        return moments[0]
    choice = " or ".join(shown(moment) for moment in written)
    if any(moment.replace(tzinfo=None, fold=0) == time for moment in written):
        raise typer.BadParameter(f"{text!r} happens twice in the time zone of this terminal: write {choice}")
    raise typer.BadParameter(f"{text!r} does not exist in the time zone of this terminal, whose clocks skip it: write {choice}")


def moment(text: str) -> datetime | timedelta:
    """A time as it is typed, see `local_time`, or +SPAN from now. Raises `typer.BadParameter`."""
    return span(text[1:]) if text.startswith("+") else local_time(text)


def moment_in_file(what: str, text: str) -> datetime | timedelta:
    """A time in a file: with its zone, since who wrote the file may have another one than this terminal; or +SPAN from now.

    Raises:
        InvalidInput: It is neither.
    """
    return span_in_file(what, text[1:]) if text.startswith("+") else parse_time(what, text)


def span(text: str) -> timedelta:
    """A span of time as people write it: 90, 90s, 5m, 2h, 30d. Raises `typer.BadParameter`."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        found = timedelta(seconds=float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a span of time: write 90s, 5m, 2h or 30d") from None
    if found < timedelta(0):
        raise typer.BadParameter(f"{text!r} is less than no time: write 90s, 5m, 2h or 30d")
    return found


def span_in_file(what: str, text: str) -> timedelta:
    """A span of time in a file. Raises `InvalidInput`."""
    try:
        return span(text)
    except typer.BadParameter as error:
        raise InvalidInput(f"{what} is not a span of time: {text!r:.100}", hint=str(error)) from None
