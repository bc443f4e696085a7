"""One typed function for each SQL function about job types and their handlers. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import orjson

from penstock.core.serialization import dump_options, load_json
from penstock.jobs.options import Delivery
from penstock.jobs.records import HandlerRecord, JobCounts, JobTypeRecord
from penstock.postgres.database import Database

_OF_JOB_TYPE = tuple(column.name for column in fields(JobTypeRecord))


async def create_job_type(database: Database, name: str, options: dict[str, Any]) -> JobTypeRecord:
    """Create a job type. Raises `Conflict` when it exists."""
    row = await database.fetchrow(
        "select * from penstock.create_job_type($1, $2::jsonb)", name, dump_options(f"job type {name}", options)
    )
    return job_type_of(row)


async def change_job_type(database: Database, name: str, options: dict[str, Any]) -> JobTypeRecord:
    """Change the given options of a job type. Raises `NotFound`."""
    row = await database.fetchrow(
        "select * from penstock.change_job_type($1, $2::jsonb)", name, dump_options(f"job type {name}", options)
    )
    return job_type_of(row)


async def declare_job_type(
    database: Database, name: str, options: dict[str, Any], *, again: bool = True, retry: bool = False
) -> JobTypeRecord:
    """Create a job type, or change it when this declaration differs from the last one.

    `again`: also one that was dropped; otherwise that raises `NotFound`.
    """
    query = "select * from penstock.declare_job_type($1, $2::jsonb, $3)"
    row = await database.fetchrow(query, name, dump_options(f"job type {name}", options), again, retry=retry)
    return job_type_of(row)


async def job_types(database: Database, names: Sequence[str] | None = None) -> list[JobTypeRecord]:
    """Job types in the order of their names: these, or all."""
    rows = await database.fetch("select * from penstock.jobs where $1::text[] is null or name = any ($1) order by name", names)
    return [job_type_of(row) for row in rows]


async def note_handlers(database: Database, handlers: Sequence[HandlerRecord]) -> None:
    """Say which handlers a worker has that begins to work."""
    given = [{"kind": h.kind, "name": h.name, "schema": h.schema, "docs_url": h.docs_url, "owner": h.owner} for h in handlers]
    await database.fetch("select penstock.note_handlers($1::jsonb)", orjson.dumps(given).decode(), retry=True)


async def handlers(database: Database) -> list[HandlerRecord]:
    """What workers say of their handlers, by name."""
    rows = await database.fetch("select * from penstock.handler_list()")
    return [
        HandlerRecord(r["kind"], r["name"], None if r["schema"] is None else load_json(r["schema"]), *tuple(r)[3:]) for r in rows
    ]


async def drop_job_type(database: Database, name: str, *, force: bool = False) -> None:
    """Drop a job type. Raises `NotFound`, `Conflict`."""
    await database.fetch("select penstock.drop_job_type($1, $2)", name, force)


async def pause(database: Database, name: str) -> None:
    """Pause a job type. Raises `NotFound`."""
    await database.fetch("select penstock.pause($1)", name)


async def resume(database: Database, name: str) -> None:
    """Resume a job type. Raises `NotFound`, and `Conflict` when its concurrency is 0."""
    await database.fetch("select penstock.resume($1)", name)


async def counts(database: Database) -> list[JobCounts]:
    """Number of jobs of each type, by status."""
    return [JobCounts(*tuple(row)) for row in await database.fetch("select * from penstock.job_counts()")]


def job_type_of(row: Any) -> JobTypeRecord:
    """A row of `penstock.jobs` as a record."""
    columns = {column: row[column] for column in _OF_JOB_TYPE}
    return JobTypeRecord(**columns | {"delivery_strategy": Delivery(row["delivery_strategy"])})
