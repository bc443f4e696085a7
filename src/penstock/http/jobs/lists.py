"""Lists of jobs, by page, and statistics."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Depends, Query, Request, Response

from penstock.core import checks
from penstock.core.records import to_json
from penstock.errors import InvalidInput
from penstock.http import shapes
from penstock.http.auth import Principal
from penstock.http.errors import ApiError, invalid_parameter, no_such_type, not_found
from penstock.http.jobs.access import job_shown_to
from penstock.http.jobs.models import ArchivedJob, QueuedJob
from penstock.http.openapi import LINK
from penstock.http.routing import READ, CurrentService, Details, Instance, OpenDatabase, OpenType, User, raw_answer, router
from penstock.http.service import Service
from penstock.jobs import http_queries as http
from penstock.jobs import type_queries
from penstock.jobs.http_models import JobStatistics
from penstock.jobs.top import TopRecord, top
from penstock.postgres.database import Database

api = router("lists")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
Type = Annotated[str | None, Query(alias="name", description="Only this job type.", examples=["invoice-shipments"])]
QueuedStatus = Annotated[str | None, Query(description="queued, in-progress or waiting.", examples=["queued"])]
ArchivedStatus = Annotated[str | None, Query(description="succeeded, failed, expired or cancelled.", examples=["failed"])]
Key = Annotated[str | None, Query(description="Only jobs with this key.")]
Reason = Annotated[str | None, Query(description="Only jobs that ended for this reason: quarantined.", examples=["quarantined"])]
Workflow = Annotated[UUID | None, Query(description="Only jobs of this workflow: the id of a job group.")]
Since = Annotated[str | None, Query(description="Enqueued (archived: finished) not before.", examples=["2026-01-11T18:26:26Z"])]
Until = Annotated[str | None, Query(description="Enqueued (archived: finished) before.", examples=["2026-01-12T00:00:00Z"])]
Limit = Annotated[str | None, Query(description="Most jobs on a page: 1 to 100.", examples=["100"])]
Order = Annotated[
    Literal["ready", "oldest", "busy"],
    Query(description="ready: most ready jobs first; oldest: the longest wait first; busy: most finished jobs first."),
]
Cursor = Annotated[str | None, Query(description="Where the page before ended: the cursor of its `Link` header.")]


@dataclass(frozen=True, slots=True)
class Page:
    """Which jobs of a list are wanted: what both lists take."""

    name: str | None
    key: str | None
    workflow: UUID | None
    since: datetime | None
    until: datetime | None
    limit: int
    before: tuple[datetime, UUID] | None
    details: bool


async def _page(
    user: User, path: Instance, name: Type = None, key: Key = None, since: Since = None, until: Until = None,
    limit: Limit = None, cursor: Cursor = None, details: Details = False, workflow: Workflow = None,
) -> Page:  # fmt: skip
    if name is not None:
        user.require(name, path)
    size = _limit(limit)
    return Page(name, key, workflow, parse_time(since, "since"), parse_time(until, "until"), size, parse_cursor(cursor), details)


WantedPage = Annotated[Page, Depends(_page)]


@dataclass(frozen=True, slots=True)
class Top:
    """Which top is wanted, of the types that the user may see."""

    order: str
    names: list[str] | None
    limit: int


async def _top(
    user: User, path: Instance, order: Order = "ready", name: Type = None,
    limit: Annotated[int, Query(ge=1, le=1_000, description="Most records.")] = 20,
) -> Top:  # fmt: skip
    if name is not None:
        user.require(name, path)
        return Top(order, [name], limit)
    return Top(order, None if user.types is None else sorted(user.types), limit)


WantedTop = Annotated[Top, Depends(_top)]


@api.get("/v1/queued-jobs", dependencies=[READ], response_model=list[QueuedJob], responses=LINK)
async def list_queued_jobs(
    request: Request, database: OpenDatabase, user: User, page: WantedPage, status: QueuedStatus = None
) -> Response:
    """Jobs that are not finished, latest enqueued first. The header `Link` leads to the next page."""
    return await _shown(request, database, user, page, status, archived=False)


@api.get("/v1/archived-jobs", dependencies=[READ], response_model=list[ArchivedJob], responses=LINK)
async def list_archived_jobs(
    request: Request, database: OpenDatabase, user: User, page: WantedPage, status: ArchivedStatus = None, reason: Reason = None
) -> Response:
    """Finished jobs, latest finished first. The header `Link` leads to the next page."""
    return await _shown(request, database, user, page, status, reason, archived=True)


@api.get("/v1/stats", dependencies=[READ])
async def get_stats(service: CurrentService, user: User) -> list[JobStatistics]:
    """How each job type is doing: depth, oldest waiting, rates; counted every few seconds, however many ask."""
    return await _stats(service, user)


@api.get("/v1/jobs/{name:name}/stats", dependencies=[READ])
async def get_stats_of_type(name: OpenType, service: CurrentService, user: User, path: Instance) -> JobStatistics:
    """How one job type is doing."""
    found = [one for one in await _stats(service, user, name) if one.name == name]
    if found:
        return found[0]
    records = await type_queries.job_types(service.database, [name])
    if not records:
        raise not_found(path)
    # The type is newer than the last count, which is not repeated for every new type.
    paused = records[0].paused_at is not None or records[0].concurrency == 0
    return JobStatistics(name, paused, 0, 0, 0, 0, None, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


@api.get("/v1/top/types", dependencies=[READ])
async def top_of_types(database: OpenDatabase, wanted: WantedTop) -> list[TopRecord]:
    """The job types that fill the queue. A large queue is looked at in part: see `looked_at`."""
    return await top(database, "types", order=wanted.order, names=wanted.names, limit=wanted.limit)


@api.get("/v1/top/keys", dependencies=[READ])
async def top_of_keys(database: OpenDatabase, wanted: WantedTop) -> list[TopRecord]:
    """The keys that fill the queue, such as tenants. A large queue is looked at in part: see `looked_at`."""
    return await top(database, "keys", order=wanted.order, names=wanted.names, limit=wanted.limit)


async def _stats(service: Service, user: Principal, name: str | None = None) -> list[JobStatistics]:
    """Statistics of the types that the user may see, `name` among them if it exists."""
    counts, rates = await service.statistics(name)
    none = http.Rates("", 0.0, 0.0, 0.0)
    return [JobStatistics(**{**asdict(rates.get(count.name, none)), **asdict(count)}) for count in counts if user.may(count.name)]


async def _shown(
    request: Request, database: Database, user: Principal, page: Page, status: str | None, reason: str | None = None, *,
    archived: bool,
) -> Response:  # fmt: skip
    found = await http.page_of_jobs(
        database,
        archived=archived,
        names=[page.name] if page.name is not None else (None if user.types is None else sorted(user.types)),
        status=status,
        key=page.key,
        since=page.since,
        until=page.until,
        limit=page.limit,
        before=page.before,
        reason=reason,
        workflow=page.workflow,
    )
    # Rickover answers an empty list of finished jobs for every name, so that list is stricter only with its further fields.
    if page.name is not None and not found and (page.details or not archived):
        await _require_type(database, user, page.name)
    jobs = await http.stored_jobs(database, [id for id, _ in found])
    # A job that finished in between is in the other list now.
    there = [job_shown_to(user, jobs[id]) for id, _ in found if id in jobs and jobs[id].status.finished is archived]
    headers = {}
    if len(found) == page.limit:
        query = {k: v for k, v in request.query_params.items() if k != "cursor"} | {"cursor": _cursor(found[-1])}
        headers["Link"] = f'<{request.url.path}?{urlencode(query)}>; rel="next"'
    return raw_answer(to_json([shapes.job(job, details=page.details) for job in there]), headers=headers)


async def _require_type(database: Database, user: Principal, name: str) -> None:
    """Raise `ApiError` unless there is this job type, or a finished job of it. Only names that the user may see are suggested."""
    known = [type.name for type in await type_queries.job_types(database)]
    if name not in known and not await http.page_of_jobs(database, archived=True, names=[name], limit=1):
        raise no_such_type(name, checks.did_you_mean(name, filter(user.may, known)))


def _limit(given: str | None) -> int:
    if given is None:
        return 100
    if not _INTEGER.fullmatch(given):
        raise _bad(f"limit is not a number: {given[:100]}")
    limit = int(given)
    if limit <= 0:
        raise _bad("limit cannot be negative")
    if limit > 100:
        raise _bad("limit cannot be greater than 100")
    return limit


def _bad(title: str) -> ApiError:
    return ApiError(400, "invalid_parameter", title, in_body=True)


def parse_time(given: str | None, name: str) -> datetime | None:
    """A time of a query. Raises `ApiError` for one that is none, or has no zone."""
    if given is None:
        return None
    try:
        # A plus sign that was not escaped arrives as a space.
        return checks.parse_time(name, given.strip().replace(" ", "+") if "T" in given else given)
    except InvalidInput as error:
        raise invalid_parameter(f"Invalid {name}: {error.message}", detail=error.hint) from None


def _cursor(last: tuple[UUID, datetime]) -> str:
    id, at = last
    return base64.urlsafe_b64encode(f"{at.isoformat()} {id}".encode()).decode().rstrip("=")


def parse_cursor(given: str | None) -> tuple[datetime, UUID] | None:
    """Where a page before ended. Raises `ApiError`."""
    if given is None:
        return None
    try:
        at, _, id = (
            base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True).decode("ascii").partition(" ")
        )
        time = datetime.fromisoformat(at)
        if time.tzinfo is None:
            raise ValueError(at)
        return time.astimezone(UTC), UUID(id)
    except (ValueError, OverflowError, binascii.Error):
        raise invalid_parameter(
            f"Invalid cursor: {given[:100]}", detail="Take it from the Link header of the page before"
        ) from None
