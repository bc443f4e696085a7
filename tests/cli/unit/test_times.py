"""Times at a terminal: shown with their zone, and read in that zone where they have none."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TypeAlias
from zoneinfo import ZoneInfo

import pytest
import typer

from penstock.cli.times import local_time, moment, moment_in_file, shown, span
from penstock.errors import InvalidInput

At: TypeAlias = Callable[[str], None]
ZONES = (
    "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Africa/Cairo", "Pacific/Chatham",
    "Asia/Kolkata", "Pacific/Apia", "UTC",
)  # fmt: skip


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Iterator[At]:
    """Moves this process into a time zone."""

    def move(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("zone", ZONES)
def test_a_time_without_a_zone_is_the_one_moment_at_which_the_clocks_of_the_terminal_show_it(at: At, zone: str) -> None:
    at(zone)
    seed = random.randrange(2**32)
    chance, judge = random.Random(seed), ZoneInfo(zone)
    print("seed", seed)
    # Whole quarters of an hour of seven years, so that some are near to a change of the clocks; and all near to one of each year.
    first = datetime(2009, 1, 1)
    faces = [first + timedelta(minutes=15 * chance.randrange(7 * 365 * 96)) for _ in range(500)]
    hours = [datetime(2011, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(8_785)]
    for before, after in pairwise(hours):
        if before.astimezone(judge).utcoffset() != after.astimezone(judge).utcoffset():
            faces += [after.astimezone(judge).replace(tzinfo=None) + timedelta(minutes=15 * n) for n in range(-12, 13)]
    found = []
    for face in faces:
        face = face.replace(fold=0)
        near = [face.replace(tzinfo=UTC) + timedelta(minutes=15 * n) for n in range(-4 * 27, 4 * 27)]
        meant = [one for one in near if one.astimezone(judge).replace(tzinfo=None, fold=0) == face]
        if len(meant) == 1:
            assert local_time(face.isoformat()) == meant[0], face
            assert shown(meant[0]) == meant[0].astimezone(judge).isoformat(" ", "seconds")
        else:
            with pytest.raises(typer.BadParameter, match="happens twice" if meant else "does not exist") as refused:
                local_time(face.isoformat())
            # What it advises is read, and for a time that happens twice these are the two.
            advised = re.findall(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d", refused.value.message.partition(": write ")[2])
            assert len(advised) == 2 and (not meant or sorted(map(local_time, advised)) == meant)
        found.append(len(meant))
    assert found.count(1) > 400
    if zone in ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Santiago", "Pacific/Chatham"):
        assert found.count(0) > 1 and found.count(2) > 1


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_a_time_with_a_zone_is_the_same_at_every_terminal(at: At, zone: str) -> None:
    at(zone)
    for text in ("2026-10-25T01:30:00Z", "2026-10-25T02:30:00+01:00", "2026-10-24 20:30-05:00"):
        assert local_time(text) == datetime(2026, 10, 25, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("text", ["soon", "", "infinity", "-infinity", "nan", "25:00", "2026-02-30T12:00"])
def test_what_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a time"):
        moment(text)


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_beyond_the_years_that_can_be_shown_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="out of range"):
        moment(text)
    with pytest.raises(InvalidInput, match="out of range"):
        moment_in_file("line 1: run_after", text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "-5", "-5m", "-0.001s", "nand", "", "m"])
def test_a_span_is_a_number_that_is_not_less_than_nothing(text: str) -> None:
    for parse in (span, lambda text: moment(f"+{text}")):
        with pytest.raises(typer.BadParameter, match="span of time|less than no time"):
            parse(text)
    with pytest.raises(InvalidInput, match="line 3: run_after is not a span of time"):
        moment_in_file("line 3: run_after", f"+{text}")


@pytest.mark.parametrize("text", ["2026-11-28 15:30", "2026-11-28", "2026-11-28T15:30:00.5"])
def test_a_time_in_a_file_has_its_zone(text: str) -> None:
    with pytest.raises(InvalidInput, match=f"line 2: expires_at has no time zone: '{text}'\n.*2026-01-31T12:00:00Z"):
        moment_in_file("line 2: expires_at", text)
    assert moment_in_file("line 2: expires_at", "+5m") == timedelta(minutes=5)
    assert moment_in_file("line 2: expires_at", "2026-11-28 15:30+01:00") == datetime(2026, 11, 28, 14, 30, tzinfo=UTC)
