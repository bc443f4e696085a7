"""One typed function for each SQL function about operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import load_json
from penstock.errors import NotFound
from penstock.operations.models import Erasure, ErasurePreview, JobFilter, OperationPreview, OperationRecord
from penstock.postgres.database import Database

_FIELDS = tuple(column.name for column in fields(OperationRecord))


async def preview(database: Database, kind: str, filter: JobFilter, priority: int | None = None) -> OperationPreview:
    """How many jobs an operation would change now. Raises `InvalidInput`, `NotFound`."""
    row = await database.fetchrow("select * from penstock.preview_operation($1, $2::jsonb)", kind, _dump(filter, priority))
    return OperationPreview(row["jobs"], row["whole"], row["sample"] or [])


async def start(database: Database, kind: str, filter: JobFilter, id: UUID, priority: int | None = None) -> OperationRecord:
    """Start an operation; the same id again is the same operation. Raises `InvalidInput`, `NotFound`, `Conflict`."""
    document = _dump(filter, priority)
    return _record(
        await database.fetchrow("select * from penstock.start_operation($1, $2::jsonb, $3)", kind, document, id, retry=True)
    )


async def preview_erasure(database: Database, erasure: Erasure) -> ErasurePreview:
    """What an erasure would remove now. Raises `InvalidInput`."""
    rows = await database.fetch(
        "select kind, found from penstock.preview_erasure($1::jsonb)", orjson.dumps(erasure.as_json()).decode()
    )
    found = {row["kind"]: row["found"] for row in rows}
    return ErasurePreview(**{column.name: found.get(column.name, 0) for column in fields(ErasurePreview)})


async def erase(database: Database, erasure: Erasure, id: UUID) -> OperationRecord:
    """Start an erasure; the same id again is the same operation. Raises `InvalidInput`, `Conflict`."""
    document = orjson.dumps(erasure.as_json()).decode()
    return _record(await database.fetchrow("select * from penstock.start_erasure($1::jsonb, $2)", document, id, retry=True))


async def erasures(database: Database, phase: str) -> list[OperationRecord]:
    """The erasures that are in a phase, the oldest first."""
    query = "select * from penstock.operations where kind = 'erase' and state = 'running' and phase = $1 order by started_at, id"
    return [_record(row) for row in await database.fetch(query, phase)]


async def may_vacuum(database: Database) -> bool:
    """Whether this process may vacuum the tables, that is whether its role owns them."""
    query = "select pg_has_role(current_user, relowner, 'usage') from pg_class where oid = 'penstock.operations'::regclass"
    return bool(await database.fetchval(query))


async def vacuum_waits(database: Database, id: UUID) -> bool:
    """Whether a transaction is open that still sees what an erasure has deleted."""
    return bool(await database.fetchval("select penstock.vacuum_waits($1)", id))


async def tables_to_vacuum(database: Database, id: UUID) -> list[str]:
    """The tables from which an erasure may have deleted rows."""
    return [row[0] for row in await database.fetch("select penstock.tables_to_vacuum($1)", id)]


async def finish_erasure(database: Database, id: UUID) -> OperationRecord:
    """End an erasure whose tables have been vacuumed."""
    return _record(await database.fetchrow("select * from penstock.finish_erasure($1)", id, retry=True))


async def find(database: Database, id: UUID) -> OperationRecord:
    """One operation. Raises `NotFound`."""
    row = await database.fetchrow("select * from penstock.operations where id = $1", id)
    if row is None:
        raise NotFound(f"no such operation: {id}", hint="See: penstock operations list")
    return _record(row)


async def operations(database: Database, limit: int, running: bool, names: Sequence[str] | None = None) -> list[OperationRecord]:
    """Operations, the latest first: all, or only those that run, on jobs of any type or only of these."""
    query = """
        select * from penstock.operations
        where (state = 'running' or not $2) and ($3::text[] is null or filter ->> 'name' = any($3))
        order by started_at desc, id desc
        limit $1
        """
    return [_record(row) for row in await database.fetch(query, limit, running, names)]


async def cancel(database: Database, id: UUID) -> OperationRecord:
    """End an operation after its current batch. Raises `NotFound`."""
    # Those who may start an erasure may end it.
    erases = (await find(database, id)).kind == "erase"
    query = "select * from penstock.cancel_erasure($1)" if erases else "select * from penstock.cancel_operation($1)"
    return _record(await database.fetchrow(query, id, retry=True))


async def advance(database: Database, limit: int = 1_000) -> OperationRecord | None:
    """Do the next batch of an operation. Returns it; None: there is nothing to do now."""
    row = await database.fetchrow("select * from penstock.advance_operation($1)", limit)
    return None if row is None or row["id"] is None else _record(row)


def _dump(filter: JobFilter, priority: int | None) -> str:
    change = {} if priority is None else {"new_priority": str(priority)}
    return orjson.dumps(filter.as_json() | change).decode()


def _record(row: Any) -> OperationRecord:
    values = {name: row[name] for name in _FIELDS}
    for name in ("filter", "counts"):
        if isinstance(values[name], str):
            values[name] = load_json(values[name])
    return OperationRecord(**values)
