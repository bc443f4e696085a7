"""Jobs as JSON, in Rickover's shape. Fields that Rickover does not have appear on request (`?details=true`)."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import orjson

from penstock.core.records import raw
from penstock.jobs.http_queries import Put, StoredJob
from penstock.jobs.records import Status, Why

_OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE


def job_id(id: UUID) -> str:
    """An id as Rickover writes it."""
    return f"job_{id}"


def put_job(put: Put, data: str) -> bytes:
    """Rickover's QueuedJob as bytes, from a put."""
    return orjson.dumps(
        {
            "id": f"job_{put.id}",
            "name": put.name,
            "attempts": put.attempts_left,
            "run_after": put.run_after,
            "expires_at": put.expires_at,
            "created_at": put.created_at,
            "updated_at": put.updated_at,
            "status": "queued" if put.status == "waiting" else put.status,
            "data": orjson.Fragment(put.data if put.data is not None else data),
        },
        option=_OPTIONS,
    )


def job(record: StoredJob, *, details: bool = False, why: Why | None = None) -> dict[str, Any]:
    """Rickover's QueuedJob or ArchivedJob. `why`: why it waits, or that it runs, unless it is finished."""
    shape: dict[str, Any] = {"id": job_id(record.id), "name": record.name, "attempts": record.attempts_left}
    if record.status.finished:
        shape |= {
            "status": record.status,
            "created_at": record.created_at,
            "data": orjson.Fragment(record.data),
            "expires_at": record.expires_at,
        }
    else:
        shape |= {
            "run_after": record.run_after,
            "expires_at": record.expires_at,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
            # Rickover's clients know no other status of a job that has not started.
            "status": Status.QUEUED if record.status is Status.WAITING and not details else record.status,
            "data": orjson.Fragment(record.data),
        }
    if details:
        shape |= {
            "run_after": record.run_after,
            "attempt": record.attempt,
            "max_attempts": record.max_attempts,
            "priority": record.priority,
            "key": record.key,
            "unique": record.unique,
            "started_at": record.started_at,
            "finished_at": record.finished_at,
            "worker": record.worker,
            "errors": raw(record.errors, []),
            "result": raw(record.result),
            "progress": raw(record.progress),
            "replay_of": None if record.replay_of is None else job_id(record.replay_of),
            "replayed_by": [job_id(replay) for replay in record.replayed_by],
            "cancel_requested_at": record.cancel_requested_at,
            "reason": record.reason,
            "time_limit_s": record.time_limit_s,
            "snoozes": record.snoozes,
            "log": raw(record.log, []),
            "encrypted": record.encrypted,
            "after": [job_id(other) for other in record.after],
            "when": record.when,
            "workflow": record.workflow,
            "why": why,
        }
    return shape
