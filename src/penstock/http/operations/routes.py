"""Operations on all jobs that match a filter: preview, start, look at and cancel them."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import Path, Query
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from penstock.core.records import example
from penstock.errors import NotFound
from penstock.http.auth import Principal, Role
from penstock.http.errors import ApiError, not_found
from penstock.http.routing import ADMIN, AUDITED, ENQUEUE, READ, Instance, OpenDatabase, User, body, router
from penstock.jobs.models import make_id
from penstock.operations import queries
from penstock.operations.models import (
    Erasure,
    ErasurePreview,
    JobFilter,
    OperationKind,
    OperationPreview,
    OperationRecord,
    check_priority_of,
)
from penstock.postgres.database import Database

api = router("operations")
_FILTER = {"name": "invoice-shipments", "status": "failed", "since": "2026-01-11T18:26:26Z"}
Running = Annotated[bool, Query(description="Only operations that have not ended.")]
OperationId = Annotated[str, Path(description="Operation.", examples=["0199f7c2-6a40-7cc1-a3c5-0f3f3c0ad0b5"])]
Most = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]


class Conditions(BaseModel):
    """Which jobs: those that meet all conditions that are given. Without access to all job types, `name` is one of them."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    status: str | None = None
    key: str | None = None
    reason: str | None = None
    error: str | None = None
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    workflow: UUID | None = None
    signature: str | None = None


class OperationWanted(BaseModel):
    """What an operation does, and on which jobs."""

    model_config = example({"kind": "replay", "filter": _FILTER}) | ConfigDict(extra="forbid")

    kind: OperationKind
    filter: Conditions
    priority: int | None = Field(None, ge=-100, le=100, description="Of set-priority: the new priority, lower first.")

    @property
    def wanted(self) -> JobFilter:
        """The filter as a record."""
        given = self.filter
        return JobFilter(
            given.name,
            given.status,
            given.key,
            given.reason,
            given.error,
            given.since,
            given.until,
            given.workflow,
            given.signature,
        )


class NewOperation(OperationWanted):
    """An operation that is to be started. The `id` makes that a repeated request starts one."""

    model_config = example({"kind": "replay", "filter": _FILTER}) | ConfigDict(extra="forbid")

    id: UUID | None = None


class ErasureWanted(BaseModel):
    """What an erasure removes: all that belongs to `key`, or all whose payload has `value` in `field`, or one `job`."""

    model_config = example({"field": "customer.id", "value": "acme"}) | ConfigDict(extra="forbid")

    key: str | None = None
    field: str | None = None
    value: str | None = None
    job: UUID | None = None
    rewrite: bool = False
    skip_unseen: bool = False

    @property
    def wanted(self) -> Erasure:
        """The erasure as a record."""
        return Erasure(self.key, self.field, self.value, self.job, self.rewrite, self.skip_unseen)


class NewErasure(ErasureWanted):
    """An erasure that is to be started. The `id` makes that a repeated request starts one."""

    model_config = example({"field": "customer.id", "value": "acme"}) | ConfigDict(extra="forbid")

    id: UUID | None = None


ErasureBody = Annotated[ErasureWanted, body(ErasureWanted, {"field": "customer.id", "value": "acme"})]
NewErasureBody = Annotated[NewErasure, body(NewErasure, {"field": "customer.id", "value": "acme"})]
WantedBody = Annotated[OperationWanted, body(OperationWanted, {"kind": "replay", "filter": _FILTER})]
NewBody = Annotated[NewOperation, body(NewOperation, {"kind": "replay", "filter": _FILTER})]


@api.post("/v1/operations/preview", dependencies=[ENQUEUE])
async def preview_operation(wanted: WantedBody, database: OpenDatabase, user: User, path: Instance) -> OperationPreview:
    """How many jobs an operation would change now, and up to ten of them. Nothing is changed."""
    _require(user, wanted.filter.name, path)
    check_priority_of(wanted.kind, wanted.priority)
    return await queries.preview(database, wanted.kind, wanted.wanted, wanted.priority)


@api.post("/v1/operations", dependencies=[ENQUEUE, AUDITED], status_code=202)
async def start_operation(new: NewBody, database: OpenDatabase, user: User, path: Instance) -> OperationRecord:
    """Start an operation on all jobs that match now; workers do it in batches."""
    _require(user, new.filter.name, path)
    check_priority_of(new.kind, new.priority)
    return await queries.start(database, new.kind, new.wanted, new.id or make_id(), new.priority)


@api.post("/v1/erasures/preview", dependencies=[ADMIN])
async def preview_erasure(wanted: ErasureBody, database: OpenDatabase, user: User, path: Instance) -> ErasurePreview:
    """What an erasure would remove now. It reads all jobs and events, and does not look into lakes. Nothing is changed."""
    _require_all(user, path)
    return await queries.preview_erasure(database, wanted.wanted)


@api.post("/v1/erasures", dependencies=[ADMIN], status_code=202)
async def start_erasure(new: NewErasureBody, database: OpenDatabase, user: User, path: Instance) -> OperationRecord:
    """Start to remove all that belongs to a key or to a value of a field; workers do it in steps, as an operation."""
    _require_all(user, path)
    return await queries.erase(database, new.wanted, new.id or make_id())


@api.get("/v1/operations", dependencies=[READ])
async def list_operations(
    user: User, database: OpenDatabase, running: Running = False, limit: Most = 50
) -> list[OperationRecord]:
    """The operations that the user may see, latest first."""
    return await queries.operations(database, limit, running, None if user.types is None else sorted(user.types))


@api.get("/v1/operations/{id:name}", dependencies=[READ])
async def get_operation(id: OperationId, user: User, database: OpenDatabase, path: Instance) -> OperationRecord:
    """One operation, and how far it is."""
    return await _found(id, user, database, path)


@api.post("/v1/operations/{id:name}/cancel", dependencies=[ENQUEUE, AUDITED])
async def cancel_operation(id: OperationId, user: User, database: OpenDatabase, path: Instance) -> OperationRecord:
    """End an operation after its current batch. What it has changed stays so; one that has ended stays as it is."""
    record = await _found(id, user, database, path)
    if record.kind == "erase" and user.role < Role.ADMIN:
        raise ApiError(
            403, "forbidden", f"User {user.name} has the role {user.role.name.lower()}; this needs admin", instance=path
        )
    return await queries.cancel(database, record.id)


async def _found(id: str, user: Principal, database: Database, path: str) -> OperationRecord:
    try:
        record = await queries.find(database, UUID(id))
    except (ValueError, NotFound):
        raise not_found(path) from None
    if not _may(user, record):
        raise not_found(path)
    return record


def _may(user: Principal, record: OperationRecord) -> bool:
    name = record.filter.get("name")
    return user.types is None or (name is not None and user.may(name))


def _require_all(user: Principal, path: str) -> None:
    if user.types is not None:
        title = f"User {user.name} has access to some job types only, and an erasure removes from all"
        raise ApiError(403, "forbidden", title, instance=path, in_body=True)


def _require(user: Principal, name: str | None, path: str) -> None:
    if name is not None:
        user.require(name, path)
    elif user.types is not None:
        title = f"User {user.name} has access to some job types only: name one in the filter"
        raise ApiError(403, "forbidden", title, instance=path, in_body=True)
