"""What is refused before Spark or a database is asked."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock import InvalidInput
from penstock.spark.history import read_lake
from penstock.spark.jobs.sink import as_staged


@pytest.mark.parametrize("priority", [2**15, -(2**15) - 1, 2**40])
def test_a_priority_out_of_range_is_refused_with_its_row(priority: int) -> None:
    batch = pa.RecordBatch.from_pydict({"data": ["1", "2", "3"], "priority": pa.array([7, None, priority], pa.int64())})
    with pytest.raises(InvalidInput, match=rf"priority of row 12 of the task is out of range: {priority}\n.*-32768 to 32767"):
        as_staged(batch, "invoice", "writer", "part", 10)


def test_priorities_within_the_range_are_staged() -> None:
    batch = pa.RecordBatch.from_pydict({"data": ["1", "2", "3"], "priority": pa.array([-(2**15), None, 2**15 - 1], pa.int64())})
    assert as_staged(batch, "invoice", "writer", "part", 0).column("priority").to_pylist() == [-(2**15), None, 2**15 - 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "job"}, "kind must be jobs, attempts, rollups or runs, not 'job'"),
        ({"types": "invoice"}, "types must be a list, not 'invoice'"),
        ({"days": ("2026-01-01", "2026-01-31")}, "days must be two dates"),
    ],
)
def test_what_a_lake_cannot_be_read_by_is_refused(options: dict[str, Any], message: str) -> None:
    spark: Any = None
    with pytest.raises(InvalidInput, match=message):
        read_lake(spark, "postgresql://127.0.0.1:1/none", **options)
