"""Answers: the JSON shapes, Rickover's first. Fields that Rickover does not have appear on request (`?details=true`)."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.job import JobTypeRecord, Why
from penstock.postgres.http import Put, StoredJob
from penstock.postgres.pool_views import KeyState
from penstock.schedule import ScheduleRecord

_OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE


def dumps(value: Any) -> bytes:
    """JSON with a newline; times end in Z, spans are seconds."""
    return orjson.dumps(value, default=_default, option=_OPTIONS)


def _default(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):  # the driver's own kind
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def job_id(id: UUID) -> str:
    """An id as Rickover writes it."""
    return f"job_{id}"


def put_job(put: Put, data: str) -> bytes:
    """Rickover's QueuedJob as bytes, from a put."""
    return orjson.dumps(
        {
            "id": f"job_{put.id}",
            "name": put.name,
            "attempts": put.attempts,
            "run_after": put.run_after,
            "expires_at": put.expires_at,
            "created_at": put.created_at,
            "updated_at": put.updated_at,
            "status": put.status,
            "data": orjson.Fragment(put.data if put.data is not None else data),
        },
        option=_OPTIONS,
    )


def why(why: Why | None) -> dict[str, Any] | None:
    """Why a job waits."""
    return None if why is None else plain(why) | {"by_job": None if why.by_job is None else job_id(why.by_job)}


def schedule(record: ScheduleRecord) -> dict[str, Any]:
    """A schedule with its last run."""
    return plain(record) | {"job_id": None if record.job_id is None else job_id(record.job_id)}


def key(key: str, state: KeyState) -> dict[str, Any]:
    """Where a key of a pool is, and what it waits for."""
    next_job = None if state.next_job is None else job_id(state.next_job)
    return {"key": key, **plain(state), "next_job": next_job, "why": why(state.why)}


def job(record: StoredJob, *, details: bool = False, waits: Why | None = None) -> dict[str, Any]:
    """Rickover's QueuedJob or ArchivedJob. `waits`: why it waits, if it does and its details are wanted."""
    shape: dict[str, Any] = {"id": job_id(record.id), "name": record.name, "attempts": record.attempts}
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
            "status": record.status,
            "data": orjson.Fragment(record.data),
        }
    if details:
        shape |= {
            "run_after": record.run_after,
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
            "why": why(waits),
        }
    return shape


def raw(text: str | None, default: Any = None) -> Any:
    """JSON text as part of an answer."""
    return default if text is None else orjson.Fragment(text)


def job_type(record: JobTypeRecord, *, details: bool = False) -> dict[str, Any]:
    """Rickover's Job."""
    options = record.options
    shape: dict[str, Any] = {
        "name": record.name,
        "delivery_strategy": options.delivery,
        "attempts": options.attempts,
        "concurrency": options.concurrency,
        "created_at": record.created_at,
    }
    if details:
        shape |= {
            "visibility_timeout_s": options.visibility_timeout,
            "time_limit_s": options.time_limit,
            "backoff_base_s": options.backoff.base,
            "backoff_factor": options.backoff.factor,
            "backoff_cap_s": options.backoff.cap,
            "backoff_jitter": options.backoff.jitter,
            "rate_limit": options.rate_limit.limit if options.rate_limit else None,
            "rate_period_s": options.rate_limit.period if options.rate_limit else None,
            "keep_result": options.keep_result,
            "paused_at": record.paused_at,
            "updated_at": record.updated_at,
        }
    return shape


def plain(record: Any) -> dict[str, Any]:
    """A flat dataclass as an object."""
    return {field.name: getattr(record, field.name) for field in fields(record)}
