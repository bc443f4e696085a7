"""Structs, maps and arrays as JSON text. Values that JSON has no type for become what Spark's `to_json` makes of them."""

from __future__ import annotations

import base64
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def as_json(column: pa.Array) -> pa.Array:
    """A column of structs, maps or arrays as JSON text. A null stays null."""
    import orjson
    import pyarrow as pa

    values = column.to_pylist(maps_as_pydicts="strict")
    return pa.array([None if value is None else orjson.dumps(value, default=in_json).decode() for value in values], pa.string())


def in_json(value: Any) -> Any:
    """A value that JSON has no type for, in the form that orjson expects of its `default`."""
    import orjson

    if isinstance(value, Decimal):
        return orjson.Fragment(f"{value:f}")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
