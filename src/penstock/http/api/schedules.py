"""Schedules: look at them and their last runs, and drop those that left the code."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Request, Response

from penstock.errors import NotFound
from penstock.http import shapes
from penstock.http.api.common import answer, needs, principal_of, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import not_found
from penstock.http.models import Schedule
from penstock.postgres import schedules

api = router("schedules")
ScheduleName = Annotated[str, Path(description="Schedule.", examples=["close-the-day"], max_length=200)]


@api.get("/v1/schedules", response_model=list[Schedule])
@needs(Role.READ)
async def list_schedules(request: Request) -> Response:
    """All timers and cron schedules that the user may see, by name, with their last run."""
    principal = principal_of(request)
    found = await schedules.schedules(service_of(request).database)
    return answer([shapes.schedule(record) for record in found if principal.may(record.name)])


@api.get("/v1/schedules/{name:name}", response_model=Schedule)
@needs(Role.READ)
async def get_schedule(request: Request, name: ScheduleName) -> Response:
    """One schedule with its last run."""
    principal_of(request).require(name, request.url.path)
    for record in await schedules.schedules(service_of(request).database):
        if record.name == name:
            return answer(shapes.schedule(record))
    raise not_found(request.url.path)


@api.delete("/v1/schedules/{name:name}", status_code=204, response_class=Response)
@needs(Role.ADMIN)
async def drop_schedule(request: Request, name: ScheduleName) -> Response:
    """Forget a schedule that left the code; its job type and the history of its runs stay.

    409 while a running worker declares it.
    """
    principal_of(request).require(name, request.url.path)
    try:
        await schedules.drop(service_of(request).database, name)
    except NotFound:
        raise not_found(request.url.path) from None
    return Response(status_code=204)
