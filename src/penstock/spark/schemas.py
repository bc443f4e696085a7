"""The columns that a reader of each table gets, with their types in Spark and in Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

ARCHIVED_JOBS = {
    "id": "string",
    "name": "string",
    "status": "string",
    "key": "string",
    "unique_key": "string",
    "priority": "short",
    "attempt": "short",
    "max_attempts": "short",
    "worker": "string",
    "created_at": "timestamp",
    "run_after": "timestamp",
    "started_at": "timestamp",
    "finished_at": "timestamp",
    "expires_at": "timestamp",
    "data": "string",
    "errors": "string",
    "result": "string",
    "replay_of": "string",
    "xid": "long",
}
QUEUED_JOBS = {
    "id": "string",
    "name": "string",
    "status": "string",
    "key": "string",
    "unique_key": "string",
    "priority": "short",
    "attempt": "short",
    "max_attempts": "short",
    "seq": "long",
    "lease": "long",
    "created_at": "timestamp",
    "updated_at": "timestamp",
    "run_after": "timestamp",
    "expires_at": "timestamp",
    "cancel_requested_at": "timestamp",
    "data": "string",
    "errors": "string",
    "progress": "string",
    "replay_of": "string",
}
TABLES = {"archived_jobs": ARCHIVED_JOBS, "queued_jobs": QUEUED_JOBS}

SELDOM = {"unique_key", "errors", "result", "progress", "replay_of"}
"""Columns of text that few jobs have. They come from the database together, see `penstock.scan`."""


def columns_of(table: str, wanted: str | None = None) -> dict[str, str]:
    """Columns and their types, all or those of a list separated by commas. Raises `InvalidInput`."""
    columns = TABLES.get(table)
    if columns is None:
        raise InvalidInput(f"there is no table {table} to read", hint=f"Set the option table to {' or '.join(sorted(TABLES))}.")
    if wanted is None:
        return columns
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if unknown := [name for name in names if name not in columns]:
        raise InvalidInput(f"{table} has no column {unknown[0]}", hint=f"It has: {', '.join(columns)}.")
    if not names:
        raise InvalidInput("the option columns is empty", hint=f"Leave it out, or list some of: {', '.join(columns)}.")
    return {name: columns[name] for name in names}


def seldom_of(columns: Iterable[str]) -> list[str]:
    """The columns that come from the database together; none unless there are several."""
    found = [name for name in columns if name in SELDOM]
    return found if len(found) > 1 else []


def ddl(columns: dict[str, str]) -> str:
    """The columns as the text of a schema of Spark."""
    return ", ".join(f"`{name}` {kind}" for name, kind in columns.items())


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """The columns as the Arrow schema that Spark expects of a reader."""
    import pyarrow as pa

    kinds: dict[str, Any] = {
        "string": pa.string(),
        "short": pa.int16(),
        "long": pa.int64(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    return pa.schema([pa.field(name, kinds[kind]) for name, kind in columns.items()])
