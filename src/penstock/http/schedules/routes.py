"""Schedules: look at them and their runs, run them now, and drop those that left the code."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Response
from pydantic import BaseModel, Field

from penstock.core.records import example
from penstock.errors import NotFound
from penstock.http.errors import not_found
from penstock.http.models import Model
from penstock.http.routing import ADMIN, ENQUEUE, READ, Instance, OpenDatabase, User, body, router
from penstock.jobs.records import JobId
from penstock.schedules import queries as schedules
from penstock.schedules.schedule import ScheduleRecord, ScheduleRun

api = router("schedules")
ScheduleName = Annotated[str, Path(description="Schedule.", examples=["close-the-day"], max_length=200)]


RunStatus = Annotated[str | None, Query(description="Only runs with this status.", examples=["failed"])]
RunLimit = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]


class RequestedRun(BaseModel):
    """The run that was asked for; `job_id` null: a worker runs it in place."""

    model_config = example({"name": "close-the-day", "job_id": "job_282227eb-3c76-4ef7-af7e-25dff933077f"})

    name: str
    job_id: JobId | None


class RunOptions(Model):
    """Options of a run; none are needed."""

    key: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None, description="Key of its job; none: none. A run in place has no key."
    )


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


@api.get("/v1/schedules/{name:name}/runs", dependencies=[READ])
async def list_runs(
    name: OpenSchedule, database: OpenDatabase, status: RunStatus = None, limit: RunLimit = 20
) -> list[ScheduleRun]:
    """The last runs of a schedule, latest first, as far as the archive goes; none when it runs in place."""
    return await schedules.runs(database, name, status, limit)


@api.post("/v1/schedules/{name:name}/run", dependencies=[ENQUEUE], status_code=202)
async def run_schedule(
    name: OpenSchedule,
    database: OpenDatabase,
    path: Instance,
    wanted: Annotated[RunOptions, body(RunOptions, {"key": "2026-01"}, required=False)],
) -> RequestedRun:
    """Run a schedule now, beside its times. 409 while a run has not ended."""
    try:
        id = await schedules.run_now(database, name, wanted.key)
    except NotFound:
        raise not_found(path) from None
    return RequestedRun(name=name, job_id=id)


@api.delete("/v1/schedules/{name:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_schedule(name: OpenSchedule, database: OpenDatabase, path: Instance) -> None:
    """Forget a schedule that left the code; its job type and the history of its runs stay.

    409 while a running worker declares it.
    """
    try:
        await schedules.drop(database, name)
    except NotFound:
        raise not_found(path) from None
