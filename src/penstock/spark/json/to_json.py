"""Structs, maps and arrays as JSON text. Values that JSON has no type for become what Spark's `to_json` makes of them."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa


OUT_OF_RANGE = "Times lie in the years 1 to 9999; leave the time out, or write it as text or as a number."


def as_json(column: pa.Array, rows: Sequence[int] | None = None) -> pa.Array:
    """A column of structs, maps or arrays as JSON text. A null stays null; NaN and infinity become text, as in Spark.

    Args:
        column: The values.
        rows: The number of each row, for errors; None: they are counted.

    Raises:
        InvalidInput: A date or a time lies outside the years that Python has.
    """
    import orjson
    import pyarrow as pa

    try:
        values = column.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError) as error:
        raise _odd_time(column, rows, error) from None
    if _has_odd_numbers(column):
        values = [_in_words(value) for value in values]
    return pa.array([None if value is None else orjson.dumps(value, default=in_json).decode() for value in values], pa.string())


def _odd_time(column: pa.Array, rows: Sequence[int] | None, error: Exception) -> Exception:
    for place, value in enumerate(column):
        try:
            value.as_py()
        except (ValueError, OverflowError):
            row = place if rows is None else rows[place]
            return InvalidInput(f"row {row} of the task has a date or a time that is out of range", hint=OUT_OF_RANGE)
    return error


def _has_odd_numbers(column: pa.Array) -> bool:
    """Whether some number in the column may be none that JSON has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.invert(pc.is_finite(column))).as_py())
    if pa.types.is_struct(kind):
        return any(_has_odd_numbers(column.field(place)) for place in range(kind.num_fields))
    if pa.types.is_map(kind):
        return _has_odd_numbers(column.keys) or _has_odd_numbers(column.items)
    return pa.types.is_list(kind) and _has_odd_numbers(column.values)


def _in_words(value: Any) -> Any:
    """The value with numbers that JSON does not have as Spark's `to_json` writes them."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _in_words(one) for key, one in value.items()}
    return [_in_words(one) for one in value] if isinstance(value, list) else value


def in_json(value: Any) -> Any:
    """A value that JSON has no type for, in the form that orjson expects of its `default`."""
    import orjson

    if isinstance(value, Decimal):
        return orjson.Fragment(f"{value:f}")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
