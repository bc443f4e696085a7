"""The Delta tables of a lake, without a JVM: what the manifest has is what a reader of Delta sees."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import NotFound
from penstock.history.delta import DeltaLog
from penstock.history.lake import Lake
from penstock.history.lake_queries import LakeFile

pytestmark = pytest.mark.no_jvm
DAY = date(2026, 3, 1)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake("main", str(tmp_path / "a lake"))


def written(lake: Lake, name: str, numbers: range, type: str = "ship/ment") -> LakeFile:
    path = f"jobs/day={DAY}/type={type.replace('/', '%2F')}/{name}.parquet"
    moments = pa.array([datetime(2026, 3, 1, tzinfo=UTC)] * len(numbers), pa.timestamp("ns", tz="UTC"))
    table = pa.table({"id": [str(n) for n in numbers], "n": pa.array(numbers, pa.int64()), "finished_at": moments})
    return LakeFile("jobs", DAY, type, path, len(numbers), lake.write(path, table))


def seen(lake: Lake, version: int | None = None) -> list[tuple[int, str, date]]:
    import deltalake

    table = deltalake.DeltaTable(f"{lake.uri}/jobs", version=version)
    return sorted((row["n"], row["type"], row["day"]) for row in table.to_pyarrow_table().to_pylist())


def rows(numbers: range, type: str = "ship/ment") -> list[tuple[int, str, date]]:
    return [(n, type, DAY) for n in numbers]


def test_batches_become_transactions_once(lake: Lake) -> None:
    log = DeltaLog(lake)
    assert not log.exists() and log.follow("jobs", [], 0) is None
    files = [written(lake, "b0", range(10))]
    first = log.follow("jobs", files, 0)
    files.append(written(lake, "b1", range(10, 15), "mail"))
    second = log.follow("jobs", files, 1)
    # Repeated, as after a crash: nothing happens.
    assert log.follow("jobs", files, 1) == second
    assert seen(lake) == sorted(rows(range(10)) + rows(range(10, 15), "mail"))
    assert seen(lake, first) == rows(range(10))
    assert [(v.batch, v.files) for v in log.versions("jobs")[:2]] == [(1, 2), (0, 1)]
    assert log.exists()


def test_compaction_changes_no_data_and_the_past_stays_until_it_is_vacuumed(lake: Lake) -> None:
    log = DeltaLog(lake)
    small = [written(lake, f"b{n}", range(n * 5, n * 5 + 5)) for n in range(4)]
    before = log.follow("jobs", small, 3)
    compacted = log.follow("jobs", [written(lake, "b3c4", range(20))], 3)
    assert compacted is not None and before is not None and compacted > before
    assert seen(lake) == seen(lake, before) == rows(range(20))
    assert len(log.files("jobs")) == 1 and len(log.files("jobs", before)) == 4
    assert log.vacuum(timedelta(days=7)) == 0
    assert log.vacuum(timedelta(0)) == 4
    assert not any(lake.has(file.path) for file in small)
    assert seen(lake) == rows(range(20))


def test_versions_that_are_not_there_are_refused(lake: Lake) -> None:
    log = DeltaLog(lake)
    with pytest.raises(NotFound, match="no Delta table of jobs"):
        log.versions("jobs")
    log.follow("jobs", [written(lake, "b0", range(3))], 0)
    with pytest.raises(NotFound, match="no version 99"):
        log.files("jobs", 99)
