"""What `python -m benchmarks.handlers` makes of its values."""

import math
import random

import pytest

from benchmarks.handlers import PARTS, Measured, interval, rows
from benchmarks.variants import VARIANTS


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([3.0], (3.0, 3.0)),
        ([1.0, 2.0, 3.0], (1.0, 3.0)),  # too few for any confidence: the extremes
        ([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0], (2.0, 8.0)),
        (list(range(1, 22)), (6, 16)),
    ],
)
def test_the_interval_is_that_of_the_order_statistics(values, found):
    assert interval(values) == found


@pytest.mark.parametrize("number", [6, 9, 15, 21])
def test_the_median_lies_in_the_interval_in_95_of_100_runs(number):
    low, high = interval(range(number))
    # It lies outside when too few values are on one side of it.
    outside = sum(math.comb(number, below) for below in range(low + 1)) / 2**number
    assert (high, 2 * outside <= 0.05) == (number - 1 - low, True)


def test_each_variant_is_compared_with_the_first_of_the_same_round():
    chance = random.Random(1)
    # A machine whose speed changes from round to round, while the second variant always takes a tenth more.
    speeds = [chance.uniform(1, 10) for _ in range(9)]
    first = Measured("first", [1 / speed for speed in speeds], speeds, speeds)
    second = Measured(
        "second", [1 / speed / 1.1 for speed in speeds], [1.1 * speed for speed in speeds], [1.1 * speed for speed in speeds]
    )
    assert rows([first, second])[1][-2:] == ("0.909 (0.909 to 0.909)", "1.100 (1.100 to 1.100)")


def test_no_two_variants_have_one_name():
    assert len(VARIANTS) == sum(map(len, PARTS.values()))
