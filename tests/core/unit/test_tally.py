"""What a process counts of the attempts that end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from penstock.core import tally as tallies
from penstock.core.meter import Meter
from penstock.core.tally import OTHERS, TIMES, Tally


def ready(seconds_ago: float) -> tuple[datetime, datetime]:
    """The times of a job that could run from some moment on."""
    return datetime.now(UTC) - timedelta(seconds=seconds_ago), datetime(2020, 1, 1, tzinfo=UTC)


def test_what_is_taken_is_counted_once() -> None:
    tally = Tally()
    now = time.monotonic()
    tally.attempts("mail", "succeeded").ended(*ready(2.0), now, now + 0.02)
    tally.settled(["mail", "mail", "print"], [("mail", "retried"), ("print", "stale")])
    taken = tally.take()
    assert {name: dict(one.outcomes) for name, one in taken.items()} == {"mail": {"retried": 1, "succeeded": 1}}
    (mail,) = taken.values()
    assert (sum(mail.runs[:-1]), mail.runs[TIMES.index(0.025)], mail.runs[-1]) == (1.0, 1.0, pytest.approx(0.02))
    assert (sum(mail.waits[:-1]), mail.waits[TIMES.index(2.5)], mail.waits[-1]) == (1.0, 1.0, pytest.approx(2.0, abs=0.1))
    assert tally.take() == {}


def test_waits_are_by_the_clock_of_the_database() -> None:
    tally = Tally()
    tally.clock_is_ahead(-3600.0)
    now = time.monotonic()
    tally.attempts("mail", "succeeded").ended(*ready(3600.0 + 40.0), now, now)
    assert tally.take()["mail"].waits[-1] == pytest.approx(40.0, abs=1.0)


def test_a_tally_is_bounded_and_begins_again_when_it_is_taken() -> None:
    tally = Tally()
    for part in ("a", "b"):
        tally.settled([f"{part}{number}" for number in range(5_000)], [])
        taken = tally.take()
        assert (len(taken), taken[OTHERS].outcomes) == (1_001, Counter(succeeded=4_000))
        assert f"{part}0" in taken


def test_a_meter_counts_the_times_of_the_tallies_that_it_follows_until_it_is_closed() -> None:
    meter, one, other = Meter(), Tally(), Tally()
    now = time.monotonic()
    for tally in (one, other, one):
        meter.follow(tally)
        tally.attempts("mail", "succeeded").ended(*ready(0.0), now, now + 0.02)

    def runs() -> float:
        samples = [sample for family in meter.registry.collect() for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == "penstock_job_run_seconds_count")

    assert runs() == 3
    meter.close()
    one.attempts("mail", "succeeded").ended(*ready(0.0), now, now + 0.02)
    assert one.take()["mail"].runs[-1] == pytest.approx(0.06)
    assert runs() == 3


class Follower:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.waits: list[tuple[list[float], float]] = []

    def ran(self, name: str, outcome: str, runs: Sequence[float]) -> None:
        self.runs.append(len(runs))

    def waited(self, name: str, outcome: str, waits: Sequence[float], weight: float) -> None:
        self.waits.append((list(waits), weight))


def test_attempts_are_folded_many_at_a_time() -> None:
    tally, follower, now = Tally(), Follower(), time.monotonic()
    tally.follow(follower)
    for number in range(512):
        assert follower.runs == [], number
        tally.attempts("mail", "succeeded").ended(*ready(0.0), now, now)
        tally.settled(["mail"], [])
    assert follower.runs == [512]
    assert sum(tally.take()["mail"].runs[:-1]) == 512
    assert follower.runs == [512]


@pytest.mark.parametrize("attempts", [1, 32, 33, 63, 64, 500])
def test_each_wait_that_is_computed_stands_for_those_around_it(attempts: int) -> None:
    tally, follower, now = Tally(), Follower(), time.monotonic()
    tally.follow(follower)
    for number in range(attempts):
        tally.attempts("mail", "succeeded").ended(*ready(0.0 if number < 32 else 100.0), now, now)
    mail = tally.take()["mail"]
    assert sum(mail.waits[:-1]) == pytest.approx(attempts)
    first, *later = follower.waits
    assert len(first[0]) == min(attempts, 32)
    if attempts >= 64:
        assert mail.waits[TIMES.index(300)] == pytest.approx(attempts - 32)
        assert [len(times) for times, _ in later] == [attempts // 32 - 1]


def test_each_database_has_its_own() -> None:
    class Database:
        pass

    one, other = Database(), Database()
    assert tallies.of(one) is tallies.of(one) is not tallies.of(other)


def test_times_of_what_ran_elsewhere_count_by_type_unless_it_was_refused_or_handed_back() -> None:
    tally = Tally()
    tally.settled(["mail", "mail", "mail", "print"], [("mail", "retried"), ("mail", "stale"), ("print", "released")])
    tally.timed([("mail", "succeeded", 2.0, 0.02), ("mail", "retried", -0.5, 40.0), ("mail", "stale", 9.0, 9.0)])
    tally.timed([("print", "released", 1.0, 1.0), ("print", "unknown", 1.0, 1.0)])
    taken = tally.take()
    mail, printed = taken["mail"], taken["print"]
    assert (sum(mail.runs[:-1]), mail.runs[-1]) == (2.0, pytest.approx(40.02))
    assert (mail.runs[TIMES.index(0.025)], mail.runs[TIMES.index(60)]) == (1.0, 1.0)
    assert (sum(mail.waits[:-1]), mail.waits[-1]) == (2.0, pytest.approx(2.0)), "a clock that was set back makes no wait negative"
    assert (sum(printed.runs), sum(printed.waits), dict(printed.outcomes)) == (0.0, 0.0, {"released": 1})
