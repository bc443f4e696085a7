"""One typed function for each SQL function about operations."""

from __future__ import annotations

from dataclasses import fields
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import load_json
from penstock.errors import NotFound
from penstock.operations.models import JobFilter, OperationPreview, OperationRecord
from penstock.postgres.database import Database

_FIELDS = tuple(column.name for column in fields(OperationRecord))


async def preview(database: Database, kind: str, filter: JobFilter) -> OperationPreview:
    """How many jobs an operation would change now. Raises `InvalidInput`, `NotFound`."""
    row = await database.fetchrow("select * from penstock.preview_operation($1, $2::jsonb)", kind, _dump(filter))
    return OperationPreview(row["jobs"], row["whole"], row["sample"] or [])


async def start(database: Database, kind: str, filter: JobFilter, id: UUID) -> OperationRecord:
    """Start an operation; the same id again is the same operation. Raises `InvalidInput`, `NotFound`, `Conflict`."""
    return _record(
        await database.fetchrow("select * from penstock.start_operation($1, $2::jsonb, $3)", kind, _dump(filter), id, retry=True)
    )


async def find(database: Database, id: UUID) -> OperationRecord:
    """One operation. Raises `NotFound`."""
    row = await database.fetchrow("select * from penstock.operations where id = $1", id)
    if row is None:
        raise NotFound(f"no such operation: {id}", hint="See: penstock operations list")
    return _record(row)


async def operations(database: Database, limit: int, running: bool) -> list[OperationRecord]:
    """Operations, the latest first: all, or only those that run."""
    query = "select * from penstock.operations where state = 'running' or not $2 order by started_at desc, id desc limit $1"
    return [_record(row) for row in await database.fetch(query, limit, running)]


async def cancel(database: Database, id: UUID) -> OperationRecord:
    """End an operation after its current batch. Raises `NotFound`."""
    return _record(await database.fetchrow("select * from penstock.cancel_operation($1)", id, retry=True))


async def advance(database: Database, limit: int = 1_000) -> OperationRecord | None:
    """Do the next batch of an operation. Returns it; None: there is nothing to do now."""
    row = await database.fetchrow("select * from penstock.advance_operation($1)", limit)
    return None if row is None or row["id"] is None else _record(row)


def _dump(filter: JobFilter) -> str:
    return orjson.dumps(filter.as_json()).decode()


def _record(row: Any) -> OperationRecord:
    values = {name: row[name] for name in _FIELDS}
    if isinstance(values["filter"], str):
        values["filter"] = load_json(values["filter"])
    return OperationRecord(**values)
