"""One typed function for each SQL function about single jobs: enqueue, find, cancel, replay.

No logic beyond converting rows to models. `retry=True` marks calls that a worker's loops repeat until the database is reachable
again; all calls here are safe to repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import load_json
from penstock.errors import InvalidInput
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.records import JobRecord, LogLine, Status, Why
from penstock.postgres.database import Database, in_parts


@dataclass(frozen=True, slots=True)
class JobColumns:
    """Jobs of one type as columns, the form in which they travel to the database.

    `data` is JSON text; None instead of a column means the default for all jobs; a timedelta counts from now. `options` has the
    `OWN_OPTIONS` of the jobs that have any, spans in seconds, and may have the `traceparent` of a job. `traceparent` is that of
    all jobs.
    """

    name: str
    ids: Sequence[UUID]
    data: Sequence[str]
    keys: Sequence[str | None] | None = None
    priorities: Sequence[int] | None = None
    run_after: Sequence[datetime | timedelta | None] | None = None
    expires_at: Sequence[datetime | timedelta | None] | None = None
    unique: Sequence[str | None] | None = None
    options: Sequence[Mapping[str, Any] | None] | None = None
    traceparent: str | None = None

    @property
    def options_text(self) -> list[str | None] | None:
        """The options as JSON text."""
        shared = {} if self.traceparent is None else {"traceparent": self.traceparent}
        if self.options is None:
            return [orjson.dumps(shared).decode()] * len(self.ids) if shared else None
        return [orjson.dumps({**shared, **(own or {})}).decode() if own or shared else None for own in self.options]


_ENQUEUE = "select * from penstock.enqueue_many($1, $2::jsonb[], $3::uuid[], $4, $5::smallint[], $6, $7, $8)"


_ENQUEUE_WITH_OPTIONS = _ENQUEUE.removesuffix(")") + ", p_options => $9::jsonb[])"


_ENQUEUE_JSON = "select * from penstock.enqueue_json($1, $2::jsonb) where outcome <> 'queued'"


def enqueue_call(batch: JobColumns) -> tuple[Any, ...]:
    """The statement that enqueues a batch, and its parameters. `exceptions_by_index` reads its rows."""
    if any(isinstance(time, timedelta) for column in (batch.run_after, batch.expires_at) for time in column or ()):
        return _ENQUEUE_JSON, batch.name, as_json(batch)
    if batch.options is not None or batch.traceparent is not None:
        return _ENQUEUE_WITH_OPTIONS, *enqueue_arguments(batch), batch.options_text
    return _ENQUEUE, *enqueue_arguments(batch)


def enqueue_arguments(batch: JobColumns) -> tuple[Any, ...]:
    """A batch as the parameters of `penstock.enqueue_many`, which does not accept intervals; without the options of its jobs."""
    return (
        batch.name,
        batch.data,
        batch.ids,
        batch.keys,
        batch.priorities,
        batch.run_after,
        batch.expires_at,
        batch.unique,
    )


def as_json(batch: JobColumns) -> str:
    """A batch as the document of `penstock.enqueue_json`, in which a timedelta is a number of seconds."""
    columns = {
        "key": batch.keys,
        "priority": batch.priorities,
        "run_after": batch.run_after,
        "expires_at": batch.expires_at,
        "unique_key": batch.unique,
    }
    documents = []
    for index, (id, data) in enumerate(zip(batch.ids, batch.data, strict=True)):
        document: dict[str, Any] = {"id": str(id), "data": orjson.Fragment(data)}
        if batch.traceparent is not None:
            document["traceparent"] = batch.traceparent
        for name, values in columns.items():
            if values is not None and values[index] is not None:
                document[name] = values[index]
        if batch.options is not None:
            document.update(batch.options[index] or {})
        documents.append(document)
    return orjson.dumps(documents, default=timedelta.total_seconds).decode()


async def enqueue_many(database: Database, batch: JobColumns, *, retry: bool = False) -> dict[int, tuple[UUID, EnqueueOutcome]]:
    """Enqueue up to 100,000 jobs. Returns those with another outcome than `queued`, by their index from 0."""
    return exceptions_by_index(await database.fetch(*enqueue_call(batch), retry=retry))


async def own_ids(database: Database, purpose: str, texts: Sequence[str]) -> list[UUID]:
    """Ids that follow from texts, the same in each call of this role, which no other one can find out. See `penstock.own_ids`."""
    ids: list[UUID] = await database.fetchval("select penstock.own_ids($1, $2)", purpose, texts, retry=True)
    return ids


def exceptions_by_index(rows: Sequence[Any]) -> dict[int, tuple[UUID, EnqueueOutcome]]:
    """The rows of `enqueue_call`, by index from 0."""
    return {row["ordinal"] - 1: (row["id"], EnqueueOutcome(row["outcome"])) for row in rows}


async def run_now(database: Database, ids: Sequence[UUID]) -> set[UUID]:
    """Make deferred jobs due at once, at most 10,000 in one call. Returns those that were deferred."""
    return {row["run_now"] for row in await database.fetch("select * from penstock.run_now($1)", ids, retry=True)}


async def set_priority(database: Database, ids: Sequence[UUID], priority: int) -> set[UUID]:
    """Give jobs that wait another priority, at most 10,000 in one call. Returns those that it changed. Raises `InvalidInput`."""
    rows = await database.fetch("select * from penstock.set_priority($1, $2)", ids, priority, retry=True)
    return {row["set_priority"] for row in rows}


async def cancel(database: Database, id: UUID) -> str:
    """Cancel a job. Returns "cancelled", "cancelling", or the status of a finished job. Raises `NotFound`."""
    return str(await database.fetchval("select penstock.cancel($1)", id, retry=False))


async def replay(database: Database, id: UUID, new_id: UUID, data: str | None = None, *, force: bool = True) -> UUID:
    """Enqueue a copy of a running or finished job, with its own payload or another (JSON text). Raises `NotFound`, `Conflict`.

    Without `force`, the database refuses the replay while an earlier one waits, runs or has succeeded.
    """
    replayed: UUID = await database.fetchval("select penstock.replay($1, $2, $3::jsonb, $4)", id, new_id, data, force)
    return replayed


async def find(database: Database, ids: Sequence[UUID], *, log: bool = False) -> dict[UUID, JobRecord]:
    """The records of these jobs, with or without the lines of their logs; unknown ids are left out."""
    found: dict[UUID, JobRecord] = {}
    for some in in_parts(ids):
        rows = await database.fetch("select * from penstock.find_jobs($1, $2)", some, log)
        found |= {row["id"]: _record(row) for row in rows}
    return found


async def why(database: Database, id: UUID) -> Why:
    """Why a job waits. Raises `NotFound`."""
    return Why(*tuple(await database.fetchrow("select * from penstock.why($1)", id)))


async def list_ids(
    database: Database,
    name: str | None,
    status: str | None,
    key: str | None,
    limit: int,
    reason: str | None = None,
    workflow: UUID | None = None,
) -> list[UUID]:
    """Ids of jobs, latest first."""
    query = "select * from penstock.list_jobs($1, $2, $3, $4, p_reason => $5, p_workflow => $6)"
    rows = await database.fetch(query, name, status, key, limit, reason, workflow)
    return [row[0] for row in rows]


def load_or_text(text: str | None) -> Any:
    """The value of a JSON text for display: the text itself when it cannot be parsed."""
    if text is None:
        return None
    try:
        return load_json(text)
    except InvalidInput:
        return text


def log_of(text: str | None) -> tuple[LogLine, ...]:
    """The lines of a log, from JSON text."""
    lines = [] if text is None else orjson.loads(text)
    return tuple(LogLine(datetime.fromisoformat(line["at"]), line["attempt"], _text_of(line)) for line in lines)


def _text_of(line: dict[str, Any]) -> str:
    """The text of a line: its envelope when it is encrypted."""
    return line["line"] if "line" in line else orjson.dumps({"penstock": line["penstock"]}).decode()


def _record(row: Any) -> JobRecord:
    return JobRecord(
        id=row["id"],
        name=row["name"],
        status=Status(row["status"]),
        attempt=row["attempt"],
        max_attempts=row["max_attempts"],
        priority=row["priority"],
        key=row["key"],
        unique=row["unique_key"],
        data=load_or_text(row["data"]),
        created_at=row["created_at"],
        run_after=row["run_after"],
        expires_at=row["expires_at"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        worker=row["worker"],
        errors=load_or_text(row["errors"]) or [],
        result=load_or_text(row["result"]),
        progress=load_or_text(row["progress"]),
        replay_of=row["replay_of"],
        replayed_by=tuple(row["replayed_by"]),
        cancel_requested_at=row["cancel_requested_at"],
        reason=row["reason"],
        time_limit=None if row["time_limit_s"] is None else timedelta(seconds=row["time_limit_s"]),
        snoozes=row["snoozes"],
        log=log_of(row["log"]),
        encrypted=row["encrypted"],
        after=tuple(row["after"]),
        when=row["run_when"],
        workflow=row["workflow"],
    )
