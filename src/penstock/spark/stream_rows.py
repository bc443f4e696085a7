"""Events as the columns that Spark expects: Kafka's, and the fields of JSON payloads when a schema is given.

Everything is done by column. JSON is parsed by Arrow's own parser; only a block in which something does not fit the schema is
looked at row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

import orjson

from penstock.errors import InvalidInput
from penstock.spark.stream_offsets import Run

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = {
    "key": "string",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "happened_at": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
}
# What a given schema may say instead.
_ALSO = {"key": ("binary",), "value": ("string",), "partition": ("bigint",)}


def columns_of(wanted: str | None, include_headers: bool) -> dict[str, str]:
    """Columns and their types, all or those of a list with commas. Raises `InvalidInput`."""
    known = {name: kind for name, kind in COLUMNS.items() if name != "headers" or include_headers}
    if wanted is None:
        return known
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names or (unknown := [name for name in names if name not in known]):
        raise InvalidInput(
            f"an event has no column {unknown[0]}" if names else "the option columns is empty",
            hint=f"It has: {', '.join(known)}; for fields of the payload give a schema.",
        )
    return {name: known[name] for name in names}


def check_kinds(kinds: Mapping[str, str]) -> None:
    """Raise `InvalidInput` when a column of a given schema is not what it can be."""
    for name, kind in kinds.items():
        if name in COLUMNS and kind != COLUMNS[name] and kind not in _ALSO.get(name, ()):
            raise InvalidInput(f"the column {name} is {COLUMNS[name]}, not {kind}", hint="Change the schema.")
        if name not in COLUMNS and "map<" in kind:
            raise InvalidInput(
                f"the column {name} is {kind}, and a map cannot be taken from a payload",
                hint="Make it a struct, or use from_json on the column value.",
            )


def stored_columns(names: Sequence[str]) -> list[str]:
    """What has to be asked of the database for these columns."""
    found: list[str] = []
    for name in names:
        if name == "headers":
            found += ["header_keys", "header_values"]
        elif name not in ("topic", "partition"):
            found.append(name if name in COLUMNS else "value")
    return list(dict.fromkeys(found))


def rows(batch: pa.RecordBatch, run: Run, schema: pa.Schema, fail_fast: bool) -> pa.RecordBatch:
    """A batch from the database with the columns of a schema.

    Args:
        batch: The columns of `stored_columns`.
        run: Where it is from.
        schema: What is wanted.
        fail_fast: Whether a payload that does not fit is an error (`InvalidInput`) rather than null.
    """
    import pyarrow as pa

    size = batch.num_rows
    given = dict(zip(batch.schema.names, batch.columns, strict=True))
    if "value" in given and run.compressed:
        given["value"] = _decompressed(given["value"])
    typed = pa.schema([field for field in schema if field.name not in COLUMNS])
    fields = fields_of(given["value"], typed, fail_fast) if typed.names else {}
    columns: list[Any] = []
    for field in schema:
        if field.name == "topic":
            columns.append(pa.repeat(pa.scalar(run.stream, field.type), size))
        elif field.name == "partition":
            columns.append(pa.repeat(pa.scalar(run.partition, field.type), size))
        elif field.name == "headers":
            columns.append(_headers(given["header_keys"], given["header_values"], field.type))
        else:
            column = fields[field.name] if field.name in fields else _plain(given[field.name])
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def fields_of(values: pa.Array, schema: pa.Schema, fail_fast: bool) -> dict[str, pa.Array]:
    """The fields of JSON objects, by column. A payload that is null has none."""
    import io

    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    if not len(values):
        return {field.name: pa.nulls(0, field.type) for field in schema}
    values = _plain(values)
    # Arrow does not parse days and bytes from text, but casts text to them.
    parsed = pa.schema(
        [field if not (pa.types.is_date(field.type) or pa.types.is_binary(field.type)) else _text(field) for field in schema]
    )
    try:
        texts = pc.fill_null(values.cast(pa.string()), "{}")
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), "\n")[0].as_buffer()
        table = pj.read_json(
            io.BytesIO(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=joined.size + 1),
            parse_options=pj.ParseOptions(explicit_schema=parsed, unexpected_field_behavior="ignore", newlines_in_values=True),
        )
        if table.num_rows == len(values):
            return {field.name: table[field.name].combine_chunks().cast(field.type) for field in schema}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    return _one_by_one(values, schema, fail_fast)


def _one_by_one(values: pa.Array, schema: pa.Schema, fail_fast: bool) -> dict[str, pa.Array]:
    import pyarrow as pa

    found: dict[str, list[Any]] = {field.name: [] for field in schema}
    for value in values.to_pylist():
        document: Any = None
        if value is not None:
            try:
                document = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                if fail_fast:
                    raise InvalidInput(f"a payload is not JSON: {error}", hint="Read it without a schema, or set mode.") from None
            if fail_fast and not isinstance(document, dict):
                raise InvalidInput("a payload is no JSON object", hint="Read it without a schema, or set mode to PERMISSIVE.")
        if not isinstance(document, dict):
            document = {}
        for field in schema:
            try:
                converted = _converted(document.get(field.name), field.type)
                pa.scalar(converted, field.type)
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                if fail_fast:
                    raise InvalidInput(
                        f"the field {field.name} of a payload is not {field.type}: {error}",
                        hint="Change the schema, or set mode.",
                    ) from None
                converted = None
            found[field.name].append(converted)
    return {field.name: pa.array(found[field.name], field.type) for field in schema}


def _converted(value: Any, kind: Any) -> Any:
    """A value of JSON as Arrow takes it for a type."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        text = value if isinstance(value, str) else orjson.dumps(value).decode()
        return text if pa.types.is_string(kind) else text.encode()
    special: dict[Callable[[Any], bool], Callable[[Any], Any]] = {
        pa.types.is_timestamp: datetime.fromisoformat,
        pa.types.is_date: date.fromisoformat,
    }
    for is_kind, convert in special.items():
        if is_kind(kind):
            return convert(value)
    if isinstance(value, bool) != pa.types.is_boolean(kind):
        raise TypeError(f"{value!r}")
    return value


def _text(field: Any) -> Any:
    import pyarrow as pa

    return field.with_type(pa.string())


def _plain(column: pa.Array) -> pa.Array:
    """Without an extension type such as arrow.json."""
    import pyarrow as pa

    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _decompressed(values: pa.Array) -> pa.Array:
    import pyarrow as pa
    import zstandard

    unpack = zstandard.ZstdDecompressor().decompress
    try:
        return pa.array([None if value is None else unpack(value) for value in values.to_pylist()], pa.binary())
    except zstandard.ZstdError as error:
        raise InvalidInput(f"a payload of a compressed stream is not compressed by zstd: {error}") from None


def _headers(keys: pa.Array, values: pa.Array, kind: Any) -> pa.Array:
    """Two lists of a row as one list of pairs."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(keys), 0).to_numpy(zero_copy_only=False)
    edges = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    pair = kind.value_type
    pairs = pa.StructArray.from_arrays(
        [keys.flatten().cast(pair.field(0).type), values.flatten().cast(pair.field(1).type)],
        fields=[pair.field(0), pair.field(1)],
    )
    return pa.ListArray.from_arrays(pa.array(edges), pairs, type=kind, mask=pc.is_null(keys))
