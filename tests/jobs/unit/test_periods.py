"""Percentiles of histograms, and the last hour and day as a place for each part."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest

from penstock.core.tally import TIMES, TypeTally, buckets, observe
from penstock.jobs.rates import NOTHING, Rate, RateAt, percentile, period, rate_of, total

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)


def rate(succeeded: int, failed: int = 0) -> Rate:
    return rate_of(TypeTally(Counter(succeeded=succeeded, failed=failed)))


def test_a_percentile_is_in_the_bucket_of_the_exact_one() -> None:
    seed = random.randrange(1 << 30)
    made = random.Random(seed)
    times = sorted(made.lognormvariate(0.0, 2.0) for _ in range(2_000))
    series = buckets()
    observe(series, times)
    for share in (0.01, 0.5, 0.95, 0.99):
        found, exact = percentile(series[:-1], share), times[int(share * len(times)) - 1]
        assert found is not None
        below = max((bound for bound in TIMES if bound < exact), default=0.0)
        assert below <= found <= min(bound for bound in TIMES if bound >= exact), (seed, share)


def test_a_percentile_of_nothing_is_none_and_beyond_the_last_bound_that_bound() -> None:
    assert percentile(NOTHING.waits, 0.5) is None
    series = buckets()
    observe(series, [99_999.0])
    assert percentile(series[:-1], 0.5) == 7200.0


def test_outcomes_are_those_of_the_jobs() -> None:
    found = rate_of(TypeTally(Counter(succeeded=5, failed=2, quarantined=1, retried=3, cancelled=4, released=1)))
    assert (found.succeeded, found.failed, found.retried, found.others, found.finished) == (5, 3, 3, 5, 8)


def test_histograms_of_several_rates_are_added_up() -> None:
    one, other = buckets(), buckets()
    observe(one, [0.5])
    observe(other, [0.5, 20.0])
    both = total(rate_of(TypeTally(Counter(), one, series)) for series in (one, other))
    assert sum(both.waits) == 2 and sum(both.runs) == 3 and both.run_s == pytest.approx(21.0)


@pytest.mark.parametrize(("wide", "step", "size"), [(False, timedelta(minutes=1), 60), (True, timedelta(minutes=15), 96)])
def test_each_part_of_a_period_has_its_place(wide: bool, step: timedelta, size: int) -> None:
    begun = NOW.replace(second=0)
    rates = [RateAt(begun - place * step, rate(place + 1, failed=1)) for place in (0, 3, size - 1, size + 5)]
    found = period(NOW, rates, wide=wide)
    assert len(found.parts) == size
    assert [place for place, part in enumerate(found.parts) if part.finished] == [0, size - 4, size - 1]
    assert found.bars[-1] == (1, 1) and found.most == size + 1
    assert found.whole.finished == 2 + 5 + size + 1
    assert found.per_s == pytest.approx(found.whole.finished / (size * step.total_seconds()))
