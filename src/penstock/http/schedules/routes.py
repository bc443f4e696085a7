"""Schedules: look at them and their last runs, and drop those that left the code."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Response

from penstock.errors import NotFound
from penstock.http.errors import not_found
from penstock.http.routing import ADMIN, READ, Instance, OpenDatabase, User, router
from penstock.schedules import queries as schedules
from penstock.schedules.schedule import ScheduleRecord

api = router("schedules")
ScheduleName = Annotated[str, Path(description="Schedule.", examples=["close-the-day"], max_length=200)]


async def _open(name: ScheduleName, user: User, path: Instance) -> str:
    user.require(name, path)
    return name


OpenSchedule = Annotated[str, Depends(_open)]


@api.get("/v1/schedules", dependencies=[READ])
async def list_schedules(user: User, database: OpenDatabase) -> list[ScheduleRecord]:
    """All timers and cron schedules that the user may see, by name, with their last run."""
    return [record for record in await schedules.schedules(database) if user.may(record.name)]


@api.get("/v1/schedules/{name:name}", dependencies=[READ])
async def get_schedule(name: OpenSchedule, database: OpenDatabase, path: Instance) -> ScheduleRecord:
    """One schedule with its last run."""
    for record in await schedules.schedules(database):
        if record.name == name:
            return record
    raise not_found(path)


@api.delete("/v1/schedules/{name:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_schedule(name: OpenSchedule, database: OpenDatabase, path: Instance) -> None:
    """Forget a schedule that left the code; its job type and the history of its runs stay.

    409 while a running worker declares it.
    """
    try:
        await schedules.drop(database, name)
    except NotFound:
        raise not_found(path) from None
