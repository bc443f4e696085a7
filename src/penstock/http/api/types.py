"""Job types: create, look, change, pause, resume."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError

from penstock.errors import Conflict, InvalidInput, NotFound
from penstock.http import bodies, shapes
from penstock.http.api.common import Details, Name, answer, body_of, needs, principal_of, read, router, service_of, unfit
from penstock.http.auth import Role
from penstock.http.errors import ApiError, bad_json, invalid_parameter, missing, no_such_type, not_found
from penstock.http.models import JobType, JobTypeDetails, JobTypeOptions, NewJobType
from penstock.job import JobTypeRecord
from penstock.postgres import http, jobs

api = router("job types")
_EXAMPLE = {"name": "invoice-shipments", "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
# Rickover gives up on a callback after five minutes and on a dead dequeuer after seven.
_RICKOVER = {"visibility_timeout": "7 minutes", "time_limit": "5 minutes"}


@api.post("/v1/jobs", status_code=201, response_model=JobType | JobTypeDetails, openapi_extra=body_of(NewJobType, _EXAMPLE))
@api.post("/v2/job-types", status_code=201, response_model=JobType | JobTypeDetails, openapi_extra=body_of(NewJobType, _EXAMPLE))
@needs(Role.ADMIN)
async def create_job_type(request: Request, details: Details = False) -> Response:
    """Create a job type. Takes the options of `PATCH` as well."""
    service, path = service_of(request), request.url.path
    given = bodies.json_object(await request.body())
    name, options = new_type(given, path)
    principal_of(request).require(name, path)
    try:
        created = await jobs.create_job_type(service.database, name, _RICKOVER | options)
    except Conflict:
        raise invalid_parameter(f"A name already exists with this value ({name})", path) from None
    return answer(shapes.job_type(created, details=details), 201)


@api.get("/v1/jobs", response_model=list[JobTypeDetails])
@api.get("/v2/job-types", response_model=list[JobTypeDetails])
@needs(Role.READ)
async def list_job_types(request: Request) -> Response:
    """All job types that the user may see, by name."""
    principal = principal_of(request)
    found = await service_of(request).app.job_types()
    return answer([shapes.job_type(record, details=True) for record in found if principal.may(record.name)])


@api.get("/v1/jobs/{name:name}", response_model=JobType | JobTypeDetails)
@api.get("/v2/job-types/{name:name}", response_model=JobType | JobTypeDetails)
@needs(Role.READ)
async def get_job_type(request: Request, name: Name, details: Details = False) -> Response:
    """One job type."""
    principal_of(request).require(name, request.url.path)
    return answer(shapes.job_type(await find_type(request, name), details=details))


@api.patch(
    "/v1/jobs/{name:name}",
    response_model=JobTypeDetails,
    openapi_extra=body_of(JobTypeOptions, {"concurrency": 20, "visibility_timeout_s": 600}),
)
@needs(Role.ADMIN)
async def change_job_type(request: Request, name: Name) -> Response:
    """Change options of a job type; takes effect with the next claim."""
    principal_of(request).require(name, request.url.path)
    options = (await read(request, JobTypeOptions)).as_options()
    try:
        changed = await jobs.change_job_type(service_of(request).database, name, options)
    except NotFound:
        raise no_such_type(name) from None
    return answer(shapes.job_type(changed, details=True))


@api.post("/v1/jobs/{name:name}/pause", response_model=JobTypeDetails)
@needs(Role.ADMIN)
async def pause(request: Request, name: Name) -> Response:
    """Start no more jobs of a type; running ones go on. Idempotent."""
    principal_of(request).require(name, request.url.path)
    try:
        await service_of(request).app.pause(name)
    except (NotFound, InvalidInput):
        raise no_such_type(name) from None
    return answer(shapes.job_type(await find_type(request, name), details=True))


@api.post("/v1/jobs/{name:name}/resume", response_model=JobTypeDetails)
@needs(Role.ADMIN)
async def resume(request: Request, name: Name) -> Response:
    """End a pause. 409 while concurrency 0 is what holds the type."""
    principal_of(request).require(name, request.url.path)
    try:
        await service_of(request).app.resume(name)
    except (NotFound, InvalidInput):
        raise no_such_type(name) from None
    return answer(shapes.job_type(await find_type(request, name), details=True))


async def find_type(request: Request, name: str) -> JobTypeRecord:
    """The job type of that name. Raises `ApiError` 404."""
    found = await http.job_type(service_of(request).database, name)
    if found is None:
        raise not_found(request.url.path)
    return found


def new_type(given: dict[str, Any], path: str) -> tuple[str, dict[str, Any]]:
    """Name and options, checked in Rickover's order and words."""
    name = given.pop("name", None) or given.pop("id", None) or ""
    given.pop("id", None)
    strategy = given.get("delivery_strategy") or ""
    # Without a limit: null, which Rickover does not have.
    unlimited = "concurrency" in given and given["concurrency"] is None
    attempts, concurrency = (0 if given.get(field) is None else given[field] for field in ("attempts", "concurrency"))
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
