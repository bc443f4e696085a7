"""Job types: create, look, change, pause, resume, drop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import ValidationError

from penstock.errors import Conflict, InvalidInput, NotFound
from penstock.http import bodies
from penstock.http.errors import ApiError, bad_json, invalid_parameter, missing, no_such_type, not_found
from penstock.http.jobs.models import JobType, JobTypeOptions, NewJobType
from penstock.http.openapi import json_body
from penstock.http.routing import (
    ADMIN,
    READ,
    CurrentService,
    Details,
    Instance,
    OpenDatabase,
    OpenType,
    RawBody,
    User,
    body,
    router,
    unfit,
)
from penstock.jobs import http_queries as http
from penstock.jobs import type_queries
from penstock.jobs.records import HandlerRecord, JobTypeRecord
from penstock.postgres.database import Database
from penstock.worker.leader import LeaderRecord

api = router("job types")
_EXAMPLE = {"name": "invoice-shipments", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
_CHANGE = {"concurrency": 20, "visibility_timeout_s": 600}
_NEW = json_body(NewJobType, _EXAMPLE)
# Rickover gives up on a callback after five minutes and on a dead dequeuer after seven.
_RICKOVER = {"visibility_timeout": "7 minutes", "time_limit": "5 minutes"}


@api.post("/v1/jobs", dependencies=[ADMIN], status_code=201, openapi_extra=_NEW)
@api.post("/v2/job-types", dependencies=[ADMIN], status_code=201, openapi_extra=_NEW)
async def create_job_type(
    database: OpenDatabase, user: User, path: Instance, sent: RawBody, details: Details = False
) -> JobType | JobTypeRecord:
    """Create a job type. Takes the options of `PATCH` as well."""
    name, options = new_type(bodies.json_object(sent), path)
    user.require(name, path)
    try:
        created = await type_queries.create_job_type(database, name, _RICKOVER | options)
    except Conflict:
        raise invalid_parameter(f"A name already exists with this value ({name})", path) from None
    return _shown(created, details)


@api.get("/v1/jobs", dependencies=[READ])
@api.get("/v2/job-types", dependencies=[READ])
async def list_job_types(service: CurrentService, user: User) -> list[JobTypeRecord]:
    """All job types that the user may see, by name."""
    return [record for record in await service.app.job_types() if user.may(record.name)]


@api.get("/v1/handlers", dependencies=[READ])
async def list_handlers(service: CurrentService, user: User) -> list[HandlerRecord]:
    """What workers say of those handlers that the user may see: schema of the payloads, documentation, owner."""
    return [record for record in await service.app.handlers() if user.may(record.name)]


@api.get("/v1/leaders", dependencies=[READ])
async def list_leaders(service: CurrentService, user: User) -> list[LeaderRecord]:
    """Those tasks of the leader that the user may see: which worker leads, since when, and what became of the task."""
    return [record for record in await service.app.leaders() if user.may(record.name)]


@api.get("/v1/jobs/{name:name}", dependencies=[READ])
@api.get("/v2/job-types/{name:name}", dependencies=[READ])
async def get_job_type(
    name: OpenType, database: OpenDatabase, path: Instance, details: Details = False
) -> JobType | JobTypeRecord:
    """One job type."""
    return _shown(await _find(database, name, path), details)


@api.patch("/v1/jobs/{name:name}", dependencies=[ADMIN])
async def change_job_type(
    name: OpenType, database: OpenDatabase, options: Annotated[JobTypeOptions, body(JobTypeOptions, _CHANGE)]
) -> JobTypeRecord:
    """Change options of a job type; takes effect with the next claim."""
    try:
        return await type_queries.change_job_type(database, name, options.as_options())
    except NotFound:
        raise no_such_type(name) from None


@api.delete("/v1/jobs/{name:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_job_type(
    name: OpenType,
    database: OpenDatabase,
    force: Annotated[bool, Query(description="Also while jobs wait; they are archived as cancelled.")] = False,
) -> None:
    """Drop a job type; what is archived of its jobs stays.

    409 while jobs run, while jobs wait unless forced, and for a pool, the queue of a subscriber and the type of a schedule.
    """
    try:
        await type_queries.drop_job_type(database, name, force=force)
    except NotFound:
        raise no_such_type(name) from None


@api.post("/v1/jobs/{name:name}/pause", dependencies=[ADMIN])
async def pause(name: OpenType, service: CurrentService, path: Instance) -> JobTypeRecord:
    """Start no more jobs of a type; running ones go on. Idempotent."""
    try:
        await service.app.pause(name)
    except (NotFound, InvalidInput):
        raise no_such_type(name) from None
    return await _find(service.database, name, path)


@api.post("/v1/jobs/{name:name}/resume", dependencies=[ADMIN])
async def resume(name: OpenType, service: CurrentService, path: Instance) -> JobTypeRecord:
    """End a pause. 409 while concurrency 0 is what holds the type."""
    try:
        await service.app.resume(name)
    except (NotFound, InvalidInput):
        raise no_such_type(name) from None
    return await _find(service.database, name, path)


async def _find(database: Database, name: str, path: str) -> JobTypeRecord:
    """The job type of that name. Raises `ApiError` 404."""
    found = await http.job_type(database, name)
    if found is None:
        raise not_found(path)
    return found


def _shown(record: JobTypeRecord, details: bool) -> JobType | JobTypeRecord:
    return record if details else JobType.of(record)


def new_type(given: dict[str, Any], path: str) -> tuple[str, dict[str, Any]]:
    """Name and options, checked in Rickover's order and words."""
    name = given.pop("name", None) or given.pop("id", None) or ""
    given.pop("id", None)
    strategy = given.get("delivery_strategy") or ""
    # Without a limit: null, which Rickover does not have.
    unlimited = "concurrency" in given and given["concurrency"] is None
    # Rickover calls it attempts.
    if (attempts := given.pop("attempts", None)) is not None:
        given["max_attempts"] = attempts
    attempts, concurrency = (0 if given.get(field) is None else given[field] for field in ("max_attempts", "concurrency"))
    if not isinstance(name, str) or not isinstance(strategy, str):
        raise bad_json()
    for number in (attempts, concurrency):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= 32_767:
            raise bad_json()
    if not name:
        raise missing("name", path)
    if not strategy:
        raise missing("delivery_strategy", path)
    if strategy not in ("at_least_once", "at_most_once"):
        raise ApiError(400, "invalid_delivery_strategy", f"Invalid delivery strategy: {strategy}", instance=path)
    if strategy == "at_most_once" and attempts > 1:
        raise ApiError(
            400,
            "invalid_attempts",
            "Cannot set retry attempts to a number greater than 1 if the delivery strategy is at_most_once",
            detail="The at_most_once strategy implies only one attempt will be made.",
            instance=path,
        )
    if attempts == 0:
        raise invalid_parameter("Attempts must be set to a number greater than zero", path)
    if concurrency == 0 and not unlimited:
        raise invalid_parameter("Concurrency must be set to a number greater than zero", path)
    known = {field: value for field, value in given.items() if field in JobTypeOptions.model_fields}
    try:
        return name, JobTypeOptions.model_validate(known).as_options()
    except ValidationError as error:
        raise unfit(error, path) from None
