"""The budgets of micro-batches: `python -m benchmarks.spark` ends with 1 when one of them is not met."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks import spark as benchmark
from benchmarks.spark_batches import missed

pytestmark = pytest.mark.no_jvm
WITHIN = {1: (0.2, 0), 16: (0.25, 0), 128: (0.4, 0)}


@pytest.mark.parametrize(
    ("by_width", "idle", "words"),
    [
        (WITHIN, 5.0, []),
        ({**WITHIN, 128: (0.41, 0)}, 0.5, ["a batch over 128 partitions takes 2.05"]),
        ({**WITHIN, 16: (0.2, 1)}, 0.5, ["batches over 16 partitions open 1 connections"]),
        ({**WITHIN, 1: (0.2, 2)}, 0.5, ["batches over 1 partitions open 2 connections"]),
        (WITHIN, 5.1, ["an idle query takes 5.1 transactions a second"]),
        ({1: (0.1, 1), 128: (1.0, 1)}, 90.0, ["128 partitions takes 10.00", "over 1 ", "over 128 ", "90.0"]),
    ],
)
def test_budgets_that_are_not_met_are_named(by_width: dict[int, tuple[float, int]], idle: float, words: list[str]) -> None:
    found = missed(by_width, idle)
    assert len(found) == len(words) and all(word in line for word, line in zip(words, found, strict=True)), found


@pytest.mark.parametrize("over", [[], ["a batch is slow"]])
def test_the_benchmark_ends_with_one_when_a_budget_is_not_met(
    over: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    """The real program, but for what it measures, which takes minutes."""

    class Measured(benchmark.Bench):
        def __init__(self, *_: Any) -> None:
            self.rows, self.missed, self.spark = [], [], self

        def stop(self) -> None: ...

        def batches(self) -> None:
            self.missed += over

    @contextmanager
    def there(url: str) -> Any:
        yield url

    monkeypatch.setattr(benchmark, "Bench", Measured)
    monkeypatch.setattr(benchmark, "over_tcp", there)
    monkeypatch.setattr(sys, "argv", ["benchmarks.spark", "--jobs", "10", "--only", "batches"])
    assert benchmark.main() == (1 if over else 0)
    assert capsys.readouterr().err.splitlines() == [f"over the budget: {one}" for one in over]
