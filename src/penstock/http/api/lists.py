"""Lists of jobs, by page, and statistics."""

from __future__ import annotations

import base64
import binascii
import re
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import Query, Request, Response

from penstock.http import shapes
from penstock.http.api.common import Details, Name, answer, needs, principal_of, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import ApiError, invalid_parameter, not_found
from penstock.http.models import ArchivedJob, QueuedJob, Stats
from penstock.postgres import http

api = router("lists")
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
Type = Annotated[str | None, Query(alias="name", description="Only this job type.", examples=["invoice-shipments"])]
QueuedStatus = Annotated[str | None, Query(description="queued or in-progress.", examples=["queued"])]
ArchivedStatus = Annotated[str | None, Query(description="succeeded, failed, expired or cancelled.", examples=["failed"])]
Key = Annotated[str | None, Query(description="Only jobs with this key.")]
Reason = Annotated[str | None, Query(description="Only jobs that ended for this reason: quarantined.", examples=["quarantined"])]
Since = Annotated[str | None, Query(description="Enqueued (archived: finished) not before.", examples=["2026-01-11T18:26:26Z"])]
Until = Annotated[str | None, Query(description="Enqueued (archived: finished) before.", examples=["2026-01-12T00:00:00Z"])]
Limit = Annotated[str | None, Query(description="Most jobs on a page: 1 to 100.", examples=["100"])]
Cursor = Annotated[str | None, Query(description="Where the page before ended: the cursor of its `Link` header.")]
_LINK: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"Link": {"description": 'The next page: `<...>; rel="next"`.', "schema": {"type": "string"}}}}
}


@api.get("/v1/queued-jobs", response_model=list[QueuedJob], responses=_LINK)
@needs(Role.READ)
async def list_queued_jobs(
    request: Request, name: Type = None, status: QueuedStatus = None, key: Key = None, since: Since = None,
    until: Until = None, limit: Limit = None, cursor: Cursor = None, details: Details = False,
) -> Response:  # fmt: skip
    """Jobs that are not finished, latest enqueued first. The header `Link` leads to the next page."""
    return await _page(request, False, name, status, key, since, until, limit, cursor, details)


@api.get("/v1/archived-jobs", response_model=list[ArchivedJob], responses=_LINK)
@needs(Role.READ)
async def list_archived_jobs(
    request: Request, name: Type = None, status: ArchivedStatus = None, key: Key = None, since: Since = None,
    until: Until = None, limit: Limit = None, cursor: Cursor = None, details: Details = False, reason: Reason = None,
) -> Response:  # fmt: skip
    """Finished jobs, latest finished first. The header `Link` leads to the next page."""
    return await _page(request, True, name, status, key, since, until, limit, cursor, details, reason)


@api.get("/v1/stats", response_model=list[Stats])
@needs(Role.READ)
async def get_stats(request: Request) -> Response:
    """How each job type is doing: depth, oldest waiting, rates; counted every few seconds, however many ask."""
    return answer(await stats(request))


@api.get("/v1/jobs/{name:name}/stats", response_model=Stats)
@needs(Role.READ)
async def get_stats_of_type(request: Request, name: Name) -> Response:
    """How one job type is doing."""
    principal_of(request).require(name, request.url.path)
    found = [one for one in await stats(request, name) if one["name"] == name]
    if not found:
        raise not_found(request.url.path)
    return answer(found[0])


async def stats(request: Request, name: str | None = None) -> list[dict[str, object]]:
    """Statistics of the types that the user may see, `name` among them if it exists."""
    principal = principal_of(request)
    counts, rates = await service_of(request).statistics(name)
    return [
        shapes.plain(count) | (shapes.plain(rates[count.name]) if count.name in rates else {})
        for count in counts
        if principal.may(count.name)
    ]


async def _page(
    request: Request, archived: bool, name: str | None, status: str | None, key: str | None, since: str | None,
    until: str | None, limit: str | None, cursor: str | None, details: bool, reason: str | None = None,
) -> Response:  # fmt: skip
    path, principal, service = request.url.path, principal_of(request), service_of(request)
    if name is not None:
        principal.require(name, path)
    names = [name] if name is not None else (None if principal.types is None else sorted(principal.types))
    size = _limit(limit)
    page = await http.page_of_jobs(
        service.database,
        archived=archived,
        names=names,
        status=status,
        key=key,
        since=parse_time(since, "since"),
        until=parse_time(until, "until"),
        limit=size,
        before=parse_cursor(cursor),
        reason=reason,
    )
    found = await http.stored_jobs(service.database, [id for id, _ in page])
    # A job that finished in between is in the other list now.
    shown = [shapes.job(found[id], details=details) for id, _ in page if id in found and found[id].status.finished is archived]
    headers = {}
    if len(page) == size:
        query = {k: v for k, v in request.query_params.items() if k != "cursor"} | {"cursor": _cursor(page[-1])}
        headers["Link"] = f'<{path}?{urlencode(query)}>; rel="next"'
    return answer(shown, headers=headers)


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
    """A time of a query. Raises `ApiError`."""
    if given is None:
        return None
    try:
        # A plus sign that was not escaped arrives as a space.
        time = datetime.fromisoformat(given.strip().replace(" ", "+") if "T" in given else given)
        if time.tzinfo is None:
            raise ValueError(given)
        time = time.astimezone(UTC)
    except (ValueError, OverflowError):
        raise invalid_parameter(f"Invalid {name}: {given[:100]}", detail="Write a time such as 2026-01-11T18:26:26Z") from None
    return time


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
