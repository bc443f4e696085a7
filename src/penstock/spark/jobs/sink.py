"""Writes a DataFrame to the queue: each row becomes one job, exactly once, by the method of `penstock.spark.writing`."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput
from penstock.spark import staging
from penstock.spark.jobs.options import JobWriteOptions
from penstock.spark.json.to_json import as_json
from penstock.spark.writing import Stage, Staged, check_times, copy

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

COLUMNS = {
    "name": "string",
    "data": "string",
    "id": "string",
    "key": "string",
    "priority": "short",
    "run_after": "timestamp",
    "expires_at": "timestamp",
    "unique_key": "string",
}
_HINT = (
    f"The columns are {', '.join(COLUMNS)}. All but data may be left out, name when the option job is set. data is a struct, "
    "a map, or JSON text."
)


def job_stage(options: JobWriteOptions, schema: StructType) -> Stage:
    """How rows with this schema are staged as jobs. Raises `InvalidInput` unless the columns are those of jobs."""
    check_schema(options, schema)
    return partial(stage, options)


def check_schema(options: JobWriteOptions, schema: StructType) -> None:
    """Raise `InvalidInput` unless the columns are those of jobs."""
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if unknown := [name for name in kinds if name not in COLUMNS]:
        raise InvalidInput(f"a job has no column {unknown[0]}", hint=_HINT)
    if "data" not in kinds:
        raise InvalidInput("the column data is missing", hint=_HINT)
    if options.job is None and "name" not in kinds:
        raise InvalidInput(
            "neither an option nor a column says which job type the rows are",
            hint='Set option("job", "..."), or have a column name.',
        )
    for name, kind in kinds.items():
        wanted = COLUMNS[name]
        fits = {
            "string": kind == "string" or (name == "data" and kind.startswith(("struct<", "map<string,"))),
            "short": kind in ("tinyint", "smallint", "int", "bigint"),
            "timestamp": kind == "timestamp",
        }
        if not fits[wanted]:
            raise InvalidInput(f"the column {name} is {kind}", hint=f"It has to be {wanted}. {_HINT}")


def stage(options: JobWriteOptions, of: staging.Batch, batches: Iterator[pa.RecordBatch]) -> Staged:
    """Copy the rows of a task to the staging table, under a name of this attempt."""
    part = of.part()
    rows = 0
    named: Counter[str] = Counter()
    first = next(batches, None)
    if first is None:
        return Staged(of, part, {})

    def staged() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        batch: pa.RecordBatch | None = first
        while batch is not None:
            if batch.num_rows:
                made = as_staged(batch, options.job, of.writer, part, rows)
                for one in made.column("name").value_counts().to_pylist():
                    named[one["values"]] += one["counts"]
                yield made
                rows += batch.num_rows
            batch = next(batches, None)

    copy(options.url, staging.TABLE, as_staged(first.slice(0, 0), options.job, of.writer, part, 0).schema, staged())
    return Staged(of, part, {name: staging.Rows(number) for name, number in named.items()})


def as_staged(batch: pa.RecordBatch, job: str | None, writer: str, part: str, before: int) -> pa.RecordBatch:
    """Rows with the columns of the staging table. Raises `InvalidInput` for a row without data or job type."""
    import pyarrow as pa

    kinds = {"string": pa.string(), "short": pa.int16(), "timestamp": pa.timestamp("us", tz="UTC")}
    size = batch.num_rows
    given = dict(zip(batch.schema.names, batch.columns, strict=True))
    rows = range(before, before + size)
    columns: dict[str, Any] = {
        "writer": pa.repeat(writer, size),
        "part": pa.repeat(part, size),
        "place": pa.array(rows, pa.int64()),
    }
    for name, kind in COLUMNS.items():
        if name in given:
            column = given[name]
            if name == "data" and not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                column = as_json(column, rows)
            if kind == "short":
                _check_short(column, name, rows)
            columns[name] = column if column.type == kinds[kind] else column.cast(kinds[kind])
            if kind == "timestamp":
                check_times(columns[name], name, rows)
    if "id" not in columns:
        columns["made"] = ids(size)
    if job is not None:
        columns["name"] = pa.repeat(job, size)
    for name in ("data", "name"):
        if columns[name].null_count:
            raise InvalidInput(f"a row has no {name}", hint=_HINT)
    return pa.RecordBatch.from_pydict(
        {name: columns[name] for name in ("writer", "part", "place", "made", *COLUMNS) if name in columns}
    )


def _check_short(column: pa.Array, name: str, rows: Sequence[int]) -> None:
    import pyarrow.compute as pc

    wrong = pc.or_(pc.less(column, -(2**15)), pc.greater(column, 2**15 - 1))
    if (place := pc.index(wrong, True).as_py()) >= 0:
        raise InvalidInput(
            f"{name} of row {rows[place]} of the task is out of range: {column[place]}", hint="It is from -32768 to 32767."
        )


def ids(size: int) -> pa.Array:
    """New ids of 16 bytes: UUIDv7 (RFC 9562), with an ascending number in the bits behind the milliseconds."""
    import numpy as np
    import pyarrow as pa

    made = np.frombuffer(secrets.token_bytes(16 * size), np.uint8).reshape(size, 16).copy()
    # 48 bits of milliseconds, then 12 and 6 bits that count, so that ids are in the order of the rows.
    count = np.arange(size, dtype=np.uint64)
    moment = np.uint64(time.time_ns() // 1_000_000) + count // np.uint64(1 << 18)
    for place in range(6):
        made[:, place] = moment >> np.uint64(40 - 8 * place) & np.uint64(0xFF)
    made[:, 6] = 0x70 | (count >> np.uint64(14) & np.uint64(0x0F))
    made[:, 7] = count >> np.uint64(6) & np.uint64(0xFF)
    made[:, 8] = 0x80 | (count & np.uint64(0x3F))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), size, [None, pa.py_buffer(made.tobytes())]).cast(pa.binary())
