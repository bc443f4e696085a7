"""The calls of the HTTP API about operations, as data."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from penstock.client.answers import reader
from penstock.client.call import Call
from penstock.errors import InvalidInput
from penstock.jobs.models import make_id
from penstock.operations.models import Erasure, ErasurePreview, JobFilter, OperationKind, OperationPreview, OperationRecord


def preview(kind: OperationKind, filter: JobFilter, priority: int | None) -> Call[OperationPreview]:
    """What an operation would change."""
    return Call("POST", "/v1/operations/preview", reader(OperationPreview), _wanted(kind, filter, priority))


def start(kind: OperationKind, filter: JobFilter, priority: int | None, id: UUID | str | None) -> Call[OperationRecord]:
    """Start an operation. The id is made here, so that it can be repeated."""
    body = {"id": str(make_id() if id is None else id)} | _wanted(kind, filter, priority)
    return Call("POST", "/v1/operations", reader(OperationRecord), body)


def _wanted(kind: OperationKind, filter: JobFilter, priority: int | None) -> dict[str, Any]:
    return {"kind": kind, "filter": filter.as_json()} | ({} if priority is None else {"priority": priority})


def preview_erasure(erasure: Erasure) -> Call[ErasurePreview]:
    """What an erasure would remove."""
    return Call("POST", "/v1/erasures/preview", reader(ErasurePreview), erasure.as_json())


def erase(erasure: Erasure, id: UUID | str | None) -> Call[OperationRecord]:
    """Start an erasure. The id is made here, so that it can be repeated."""
    return Call("POST", "/v1/erasures", reader(OperationRecord), {"id": str(make_id() if id is None else id)} | erasure.as_json())


def find(id: UUID | str) -> Call[OperationRecord]:
    """One operation."""
    return Call("GET", f"/v1/operations/{_id(id)}", reader(OperationRecord))


def operations(running: bool, limit: int) -> Call[list[OperationRecord]]:
    """All operations."""
    params = {"running": str(running).lower(), "limit": str(limit)}
    return Call("GET", "/v1/operations", reader(list[OperationRecord]), params=params)


def cancel(id: UUID | str) -> Call[OperationRecord]:
    """End an operation."""
    return Call("POST", f"/v1/operations/{_id(id)}/cancel", reader(OperationRecord))


def _id(id: UUID | str) -> UUID:
    try:
        return UUID(str(id))
    except ValueError:
        raise InvalidInput(f"invalid id of an operation: {str(id)[:100]!r}", hint="It is a UUID.") from None
