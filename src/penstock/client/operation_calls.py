"""The calls of the HTTP API about operations, as data."""

from __future__ import annotations

from uuid import UUID

from penstock.client.answers import reader
from penstock.client.call import Call
from penstock.errors import InvalidInput
from penstock.jobs.models import make_id
from penstock.operations.models import JobFilter, OperationKind, OperationPreview, OperationRecord


def preview(kind: OperationKind, filter: JobFilter) -> Call[OperationPreview]:
    """What an operation would change."""
    return Call("POST", "/v1/operations/preview", reader(OperationPreview), {"kind": kind, "filter": filter.as_json()})


def start(kind: OperationKind, filter: JobFilter, id: UUID | str | None) -> Call[OperationRecord]:
    """Start an operation. The id is made here, so that it can be repeated."""
    body = {"id": str(make_id() if id is None else id), "kind": kind, "filter": filter.as_json()}
    return Call("POST", "/v1/operations", reader(OperationRecord), body)


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
