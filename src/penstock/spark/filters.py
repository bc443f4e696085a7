"""Spark's filters in the form that the database takes. It gets only filters that mean exactly the same there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pyspark.sql import datasource

_COMPARISONS: dict[type[datasource.Filter], str] = {
    datasource.EqualTo: "=",
    datasource.GreaterThan: ">",
    datasource.GreaterThanOrEqual: ">=",
    datasource.LessThan: "<",
    datasource.LessThanOrEqual: "<=",
}
_TEXTUAL: dict[type[datasource.Filter], str] = {
    datasource.StringStartsWith: "starts with",
    datasource.StringEndsWith: "ends with",
    datasource.StringContains: "contains",
}
# These columns are text in Spark but JSON in the database, where one value has several texts.
_JSON = {"data", "errors", "result", "progress"}
_IDS = {"id", "replay_of"}


def divide(
    filters: Iterable[datasource.Filter], columns: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[datasource.Filter]]:
    """The filters that the database applies, see `pushed`, and those that Spark applies itself."""
    given = [(filter, pushed(filter, columns)) for filter in filters]
    return [taken for _, taken in given if taken is not None], [filter for filter, taken in given if taken is None]


def pushed(filter: datasource.Filter, columns: Mapping[str, str]) -> dict[str, Any] | None:
    """The filter in the form that `penstock.scan` takes; None: Spark has to apply it.

    Args:
        filter: A filter of Spark.
        columns: Columns of the table and their types.
    """
    if isinstance(filter, datasource.Not):
        inner = pushed(filter.child, columns)
        return None if inner is None else {"column": inner["column"], "op": "not", "value": inner}
    path: tuple[str, ...] = getattr(filter, "attribute", ())
    if len(path) != 1 or path[0] not in columns:
        return None
    name = path[0]
    kind = columns[name]
    if isinstance(filter, (datasource.IsNull, datasource.IsNotNull)):
        return {"column": name, "op": "is null" if isinstance(filter, datasource.IsNull) else "is not null", "value": None}
    if name in _JSON:
        return None
    if operation := _COMPARISONS.get(type(filter)):
        text = _text(getattr(filter, "value", None), kind)
        if text is None or (name in _IDS and not (operation == "=" and _is_id(text))):
            return None
        return {"column": name, "op": operation, "value": text}
    if isinstance(filter, datasource.In):
        texts = [_text(value, kind) for value in filter.value]
        return None if None in texts or not texts else {"column": name, "op": "in", "value": texts}
    if kind == "string" and (operation := _TEXTUAL.get(type(filter))):
        value = getattr(filter, "value", None)
        return {"column": name, "op": operation, "value": value} if isinstance(value, str) and value else None
    return None


def _text(value: Any, kind: str) -> str | None:
    if kind == "string":
        # A text of PostgreSQL has no NUL character, so none equals such a value; Spark applies the filter.
        return value if isinstance(value, str) and "\0" not in value else None
    if kind == "timestamp":
        return value.astimezone(UTC).isoformat() if isinstance(value, datetime) and value.tzinfo is not None else None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**62 else None


def _is_id(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
