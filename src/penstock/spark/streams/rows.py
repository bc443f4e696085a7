"""Events as the columns that Spark expects: Kafka's, and the fields of JSON payloads when a schema is given.

All work is by column. Arrow's parser parses JSON as far as it agrees with Spark's. A block in which a payload does not fit the
schema, or whose schema has types on which the two differ, is parsed row by row (`penstock.spark.json.from_json`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING, Any

import orjson

from penstock.errors import InvalidInput, Unreadable
from penstock.spark.json.from_json import CORRUPT, FromJson
from penstock.spark.streams.options import EventReadOptions
from penstock.streams.compression import unpack

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructField, StructType

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
# Other types that a given schema may have for a column.
_ALSO = {"key": ("binary",), "value": ("string",), "partition": ("bigint",)}
# The types of fields of a payload, beside structs and arrays.
_TAKEN = {
    "string", "binary", "boolean", "byte", "short", "integer", "long", "float", "double", "decimal", "date", "timestamp",
    "timestamp_ntz",
}  # fmt: skip
# Arrow reads times of this form as Spark does. A block with other times is parsed row by row.
_USUAL_TIME = r"^[12]\d{3}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-](0\d|1[0-7]):[0-5]\d)$"
_OBJECT = r"^[ \t\r\n]*\{"
_MINUS_ZERO = r"-0[ \t\r\n,\]}]"
# A reader does not know the largest payload that the stream allows.
_MOST_UNPACKED = 64 << 20
_PART_BYTES = 32 << 20
_USUAL_DATE = r"^[12]\d{3}-\d{2}-\d{2}$"


def columns_of(wanted: str | None, include_headers: bool) -> dict[str, str]:
    """Columns and their types, all or those of a list separated by commas. Raises `InvalidInput`."""
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


def check_schema(schema: StructType) -> None:
    """Raise `InvalidInput` when a column of a given schema has a type that it cannot have."""
    names = schema.fieldNames()
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InvalidInput(f"the column {repeated} occurs more than once", hint="Change the schema.")
    for field in schema.fields:
        name, kind = field.name, field.dataType.simpleString()
        if name in COLUMNS:
            if kind != COLUMNS[name] and kind not in _ALSO.get(name, ()):
                raise InvalidInput(f"the column {name} is {COLUMNS[name]}, not {kind}", hint="Change the schema.")
            continue
        if name == CORRUPT and kind != "string":
            raise InvalidInput(f"the column {name} is string, not {kind}", hint="It has the text of payloads that do not fit.")
        _check_field(field, name)


def _check_field(field: StructField, column: str) -> None:
    if not field.nullable:
        raise InvalidInput(
            f"in the column {column} {field.name} is not null, but a payload may lack it",
            hint="Leave NOT NULL out of the schema.",
        )
    kind = field.dataType
    while kind.typeName() == "array":
        if not kind.containsNull:  # type: ignore[attr-defined]
            raise InvalidInput(f"in the column {column} elements are not null, but may be", hint="Set containsNull.")
        kind = kind.elementType  # type: ignore[attr-defined]
    if kind.typeName() == "struct":
        for one in kind.fields:  # type: ignore[attr-defined]
            _check_field(one, column)
    elif kind.typeName() not in _TAKEN:
        article = "a map" if kind.typeName() == "map" else kind.simpleString()
        raise InvalidInput(
            f"the column {column} is {field.dataType.simpleString()}, and {article} cannot be taken from a payload",
            hint="Make it a struct, or use from_json on the column value.",
        )


def stored_columns(names: Sequence[str]) -> list[str]:
    """The columns that the database has to return for these columns of a reader."""
    found: list[str] = []
    for name in names:
        if name == "headers":
            found += ["header_keys", "header_values"]
        elif name != "topic":
            found.append(name if name in COLUMNS else "value")
    return list(dict.fromkeys(found))


def unpacked(batch: pa.RecordBatch, fail_fast: bool) -> Iterator[pa.RecordBatch]:
    """A batch of a compressed stream with its payloads unpacked, in parts, since a few kilobytes may unpack to gigabytes.

    Args:
        batch: The columns of `stored_columns`.
        fail_fast: Whether a payload that cannot be unpacked is an error; otherwise it is null.

    Raises:
        InvalidInput: A payload cannot be unpacked, with `fail_fast`.
    """
    import pyarrow as pa

    if "value" not in batch.schema.names:
        yield batch
        return
    place = batch.schema.get_field_index("value")
    payloads: list[bytes | None] = []
    size = begin = 0
    for row, value in enumerate(batch.column(place)):
        payload = None
        if value.is_valid:
            try:
                payload = unpack(value.as_py(), _MOST_UNPACKED)
            except Unreadable as error:
                if fail_fast:
                    raise InvalidInput(f"a payload of a compressed stream cannot be unpacked: {error.message}") from None
        payloads.append(payload)
        size += len(payload or b"")
        if size >= _PART_BYTES or row == batch.num_rows - 1:
            part = batch.slice(begin, len(payloads))
            yield part.set_column(place, "value", pa.array(payloads, pa.binary()))
            begin, size, payloads = row + 1, 0, []


def rows(batch: pa.RecordBatch, stream: str, schema: pa.Schema, options: EventReadOptions) -> pa.RecordBatch:
    """A batch from the database with the columns of a schema.

    Args:
        batch: The columns of `stored_columns`, payloads unpacked.
        stream: Name of the stream.
        schema: The columns to make.
        options: They say what to do with payloads that do not fit, and the zone of times that name none.

    Raises:
        InvalidInput: A payload does not fit, with `fail_fast`.
    """
    import pyarrow as pa

    size = batch.num_rows
    given = dict(zip(batch.schema.names, batch.columns, strict=True))
    typed = pa.schema([field for field in schema if field.name not in COLUMNS])
    fields = fields_of(given["value"], typed, options.fail_fast, options.zone) if typed.names else {}
    columns: list[Any] = []
    for field in schema:
        if field.name == "topic":
            columns.append(pa.repeat(pa.scalar(stream, field.type), size))
        elif field.name == "headers":
            columns.append(_headers(given["header_keys"], given["header_values"], field.type))
        else:
            column = fields[field.name] if field.name in fields else _plain(given[field.name])
            columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def fields_of(values: pa.Array, schema: pa.Schema, fail_fast: bool, zone: tzinfo) -> dict[str, pa.Array]:
    """The fields of JSON objects, by column, as Spark's `from_json` gives them. All fields of a null payload are null.

    Args:
        values: Payloads, text or bytes.
        schema: The fields.
        fail_fast: Whether a payload that does not fit is an error.
        zone: Zone of times that name none.

    Raises:
        InvalidInput: A payload does not fit, with `fail_fast`.
    """
    values = _plain(values)
    found = quick_fields(values, schema)
    return FromJson(schema, fail_fast, zone).columns(values.to_pylist()) if found is None else found


def quick_fields(values: pa.Array, schema: pa.Schema) -> dict[str, pa.Array] | None:
    """The same by Arrow's parser, for all payloads at once; None: they have to be parsed row by row.

    Arrow's parser refuses values that do not fit a type, but reads times and decimals in its own way. It therefore gets only
    types on which it agrees with Spark. It reads dates and times as text, which is cast when all of it has the usual form.
    """
    import io

    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    if not len(values):
        return {field.name: pa.nulls(0, field.type) for field in schema}
    if not all(_is_quick(field.type) or _is_time(field.type) for field in schema if field.name != CORRUPT):
        return None
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        # The database has not checked bytes. A payload that is no document, or two documents, would shift the rows.
        try:
            for value in values.to_pylist():
                if value is not None:
                    orjson.loads(value)
        except orjson.JSONDecodeError:
            return None
    wanted = [field.with_type(pa.string()) if _is_time(field.type) else field for field in schema if field.name != CORRUPT]
    try:
        texts = pc.fill_null(values.cast(pa.string()), "{}")
        # Arrow may skip a line that is no object; a null in the place of an object crashes the process.
        if not pc.all(pc.match_substring_regex(texts, _OBJECT)).as_py():
            return None
        # Arrow reads -0 as negative zero, and Spark as the integer 0.
        if pc.any(pc.match_substring_regex(texts, _MINUS_ZERO)).as_py():
            return None
        joined = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), "\n")[0].as_buffer()
        table = pj.read_json(
            io.BytesIO(joined),
            read_options=pj.ReadOptions(use_threads=False, block_size=joined.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(wanted), unexpected_field_behavior="ignore", newlines_in_values=True
            ),
        )
        if table.num_rows != len(values):
            return None
        found: dict[str, pa.Array] = {}
        for field in schema:
            if field.name == CORRUPT:
                found[field.name] = pa.nulls(len(values), field.type)
                continue
            column = table[field.name].combine_chunks()
            if _is_time(field.type):
                usual = _USUAL_DATE if pa.types.is_date(field.type) else _USUAL_TIME
                if not pc.all(pc.match_substring_regex(column, usual), min_count=0).as_py():
                    return None
            found[field.name] = column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    return found


def _is_quick(kind: pa.DataType) -> bool:
    """Whether Arrow's parser agrees with Spark's on a type."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return all(_is_quick(field.type) for field in kind)
    if pa.types.is_list(kind):
        return _is_quick(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_float64(kind))


def _is_time(kind: pa.DataType) -> bool:
    """Whether a type is a date, or a time with a zone."""
    import pyarrow as pa

    return bool(pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz))


def _plain(column: pa.Array) -> pa.Array:
    """The column without an extension type such as arrow.json."""
    import pyarrow as pa

    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _headers(keys: pa.Array, values: pa.Array, kind: Any) -> pa.Array:
    """The lists of names and of values of each row as one list of pairs."""
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
