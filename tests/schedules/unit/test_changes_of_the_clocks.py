"""Cron schedules at every change of the clocks that the time zones know, compared with a search that looks at every second."""

from __future__ import annotations

import random
from bisect import bisect_right
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from penstock.schedules.times import Cron
from penstock.schedules.zones import STEP, Zone
from tests.schedules.calendar_by_seconds import (
    EPOCH,
    WINDOW_S,
    any_expression,
    changes_of,
    local_seconds,
    places,
    times_of,
)

SEED = random.randrange(2**32)


def compare(name: str, change: int, chosen: random.Random, expressions: int) -> int:
    """Compare some expressions around one change of a zone; returns how many questions were asked."""
    # Before the window is a day whose slots only tell what has run already.
    start, end = change - WINDOW_S, change + WINDOW_S
    readings = local_seconds(ZoneInfo(name), start, end)
    begin = datetime.fromtimestamp(start + 90_000, UTC)
    asked = 0
    for _ in range(expressions):
        near = (EPOCH + timedelta(seconds=int(readings[change - start - chosen.choice([1, 1, 1800, -1, -1800])]))).replace(
            tzinfo=None
        )
        expression, fields = any_expression(chosen, near)
        expected = times_of(fields, readings, start)
        cron = Cron(expression, name)
        last = EPOCH + timedelta(seconds=end - 90_000)
        at = bisect_right(expected, begin)
        moments = [begin] + [expected[at + chosen.randrange(len(expected) - at)] for _ in range(8) if at < len(expected)]
        moments += [begin + timedelta(seconds=chosen.uniform(0, (last - begin).total_seconds())) for _ in range(8)]
        moments += [EPOCH + timedelta(seconds=change + around) for around in (-3600, -1, 0, 1, 1800, 3600)]
        if len(expected) < 200:
            moments += [time for time in expected if begin <= time]
        for moment in moments:
            if moment >= last:
                continue
            asked += 1
            following = cron.after(moment, moment)
            assert following > moment
            place = bisect_right(expected, moment)
            if place < len(expected):
                assert following == expected[place], f"{expression} in {name} after {moment}"
            else:
                assert following >= EPOCH + timedelta(seconds=end - 60), f"{expression} in {name} after {moment}"
            if place > 0 and expected[place - 1] >= begin and at < len(expected):
                assert cron.latest(moment, expected[at]) == max(expected[place - 1], expected[at]), (
                    f"{expression} in {name} at {moment}"
                )
    return asked


def test_times_are_those_that_looking_at_every_second_finds() -> None:
    print(f"seed {SEED}")
    chosen = random.Random(SEED)
    # Some of those that leave out days, change by half an hour or at midnight, and any others.
    names = chosen.sample(["Pacific/Apia", "Pacific/Kwajalein", "Australia/Lord_Howe", "America/New_York", "Africa/Cairo"], 2)
    for name in names + chosen.sample(places(), 3):
        changes = changes_of(name)
        for change in chosen.sample(changes, min(len(changes), 2)):
            assert compare(name, change, chosen, 4) > 0


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_times_are_right_at_changes_of_every_zone(part: int) -> None:
    print(f"seed {SEED}")
    chosen = random.Random(SEED + part)
    asked, compared, seen = 0, 0, set()
    for name in places()[part::4]:
        changes = changes_of(name)
        if changes in seen:
            continue
        seen.add(changes)
        for change in chosen.sample(changes, min(len(changes), 2)):
            compared += 1
            asked += compare(name, change, chosen, 3)
    print(f"{compared} changes, {asked} questions")
    assert compared > 130


def test_no_zone_changes_twice_within_the_step_of_the_search() -> None:
    print(f"seed {SEED}")
    for name in random.Random(SEED).sample(places(), 4):
        changes = changes_of(name)
        assert all((after - before) > STEP.total_seconds() for before, after in pairwise(changes))
        found = Zone(name).changes(EPOCH, datetime(2037, 12, 31, 23, 59, 59, tzinfo=UTC))
        assert [round((change.at - EPOCH).total_seconds()) for change in found] == list(changes)
