"""Single jobs: enqueue, callback, look, wait, replay, cancel, result."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Any

from fastapi import Query, Request, Response

from penstock.errors import Conflict, NotFound
from penstock.http import bodies, shapes
from penstock.http.api.common import (
    Details,
    Id,
    Name,
    Wait,
    answer,
    body_of,
    listening,
    needs,
    principal_of,
    raw_answer,
    router,
    service_of,
)
from penstock.http.auth import Role
from penstock.http.errors import ApiError, not_found, other_name
from penstock.http.models import ArchivedJob, Cancelled, NewJob, QueuedJob, Result, Status
from penstock.job import Status as JobStatus
from penstock.job import make_id
from penstock.payload import dump_json
from penstock.postgres import http, jobs
from penstock.postgres.http import StoredJob

api = router("jobs")
_NEW = {"data": {"shipmentId": "shp_123"}, "run_after": "2026-01-11T18:26:26.000Z", "expires_at": "2026-01-11T20:26:26.000Z"}
Force = Annotated[
    bool, Query(description="false: refused (409) while an earlier replay of the job waits, runs or has succeeded.")
]
NewId = Annotated[str | None, Query(description="Id of the copy, so that a repeated call replays once.")]


@api.put("/v1/jobs/{name:name}/{id:job}", status_code=202, response_model=QueuedJob, openapi_extra=body_of(NewJob, _NEW))
@needs(Role.ENQUEUE)
async def enqueue(request: Request, name: Name, id: Id) -> Response:
    """Enqueue a job. Idempotent: the same id again is the same job. The id `random_id` makes a new one, for load tests."""
    path, body = request.url.path, await request.body()
    job, admission = await service_of(request).put(principal_of(request), name, id, body, path)
    return raw_answer(job, 202, {"penstock-outcome": admission})


@api.post(
    "/v1/jobs/{name:name}/{id:job}",
    responses={200: {"description": "Recorded.", "content": {}}},
    response_class=Response,
    openapi_extra=body_of(Status, {"status": "succeeded", "attempt": 3}),
)
@needs(Role.WORK)
async def record_status(request: Request, name: Name, id: Id) -> Response:
    """Record a job's success or failure: the callback of a downstream service. The attempt number must be the job's."""
    await service_of(request).record_status(principal_of(request), name, id, await request.body(), request.url.path)
    return Response(status_code=200, headers={"content-type": "application/json; charset=utf-8"})


@api.get("/v1/jobs/{id:only_job}", response_model=QueuedJob | ArchivedJob)
@needs(Role.READ)
async def get_job_by_id(request: Request, id: Id, details: Details = False, wait: Wait = None) -> Response:
    """One job, queued or archived. With `wait` answers when it is finished, or as it is when the time is over."""
    return await _shown(request, await _waited(request, None, id, wait), details)


@api.get("/v1/jobs/{name:name}/{id:job}", response_model=QueuedJob | ArchivedJob)
@needs(Role.READ)
async def get_job(request: Request, name: Name, id: Id, details: Details = False, wait: Wait = None) -> Response:
    """One job of a type. With `wait` answers when it is finished, or as it is when the time is over."""
    return await _shown(request, await _waited(request, name, id, wait), details)


@api.get(
    "/v1/jobs/{name:name}/{id:job}/result",
    response_model=Result,
    responses={202: {"model": Result, "description": "Not finished yet."}},
)
@needs(Role.READ)
async def get_result(request: Request, name: Name, id: Id, wait: Wait = None) -> Response:
    """What became of a job: its status, result and errors. 202 while it is not finished."""
    job = await _waited(request, name, id, wait)
    found = {
        "id": shapes.job_id(job.id),
        "status": job.status,
        "result": shapes.raw(job.result),
        "errors": shapes.raw(job.errors, []),
    }
    return answer(found, 200 if job.status.finished else 202)


@api.post("/v1/jobs/{id:only_job}/replay", status_code=201, response_model=QueuedJob)
@needs(Role.ENQUEUE)
async def replay_by_id(request: Request, id: Id, new_id: NewId = None, force: Force = True) -> Response:
    """Enqueue a copy of a running or finished job under a new id; with another payload when there is a body `{"data": ...}`."""
    return await _replay(request, None, id, new_id, force)


@api.post("/v1/jobs/{name:name}/{id:job}/replay", status_code=201, response_model=QueuedJob)
@needs(Role.ENQUEUE)
async def replay(request: Request, name: Name, id: Id, new_id: NewId = None, force: Force = True) -> Response:
    """Enqueue a copy of a running or finished job of a type under a new id."""
    return await _replay(request, name, id, new_id, force)


@api.post("/v1/jobs/{id:only_job}/cancel", response_model=Cancelled)
@needs(Role.ENQUEUE)
async def cancel_by_id(request: Request, id: Id) -> Response:
    """Cancel a job: a queued one at once; of a running one the handler is told."""
    return await _cancel(request, None, id)


@api.post("/v1/jobs/{name:name}/{id:job}/cancel", response_model=Cancelled)
@needs(Role.ENQUEUE)
async def cancel(request: Request, name: Name, id: Id) -> Response:
    """Cancel a job of a type: a queued one at once; of a running one the handler is told."""
    return await _cancel(request, name, id)


async def _find(request: Request, name: str | None, given: str) -> StoredJob:
    """The job of a path. Raises `ApiError`: no such job, another name, no access."""
    path = request.url.path
    id = bodies.job_id(given)
    found = (await http.stored_jobs(service_of(request).database, [id])).get(id)
    if found is None:
        raise not_found(path)
    # A user without access learns nothing about the name of the job's type.
    if name is not None and found.name != name:
        principal_of(request).require(name, path)
        raise other_name(path)
    principal_of(request).require_job(found.name, path)
    return found


async def _shown(request: Request, job: StoredJob, details: bool) -> Response:
    waits = None
    if details and job.status is JobStatus.QUEUED:
        # It may have been started, or even pruned, since it was read.
        with suppress(NotFound):
            waits = await jobs.why(service_of(request).database, job.id)
    return answer(shapes.job(job, details=details, waits=waits))


async def _waited(request: Request, name: str | None, id: str, wait: str | None) -> StoredJob:
    service = service_of(request)
    within = bodies.span(wait, "wait", service.settings.longest_wait)
    job = await _find(request, name, id)
    if within and not job.status.finished:
        async with listening(request) as gone:
            finished = asyncio.ensure_future(service.watch.finished(job.id, within))
            await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            with suppress(asyncio.CancelledError):
                await finished
            if gone.done():
                return job
        job = await _find(request, name, id)
    return job


async def _replay(request: Request, name: str | None, id: str, given_new: str | None, force: bool) -> Response:
    service = service_of(request)
    new_id = bodies.job_id(given_new) if given_new is not None else make_id()
    data = bodies.replacement(await request.body())
    job = await _find(request, name, id)
    try:
        copy = await jobs.replay(service.database, job.id, new_id, data, force=force)
    except Conflict:
        if str(job.status) != "queued":
            raise
        raise ApiError(
            400,
            "invalid_replay_attempt",
            "Cannot replay a queued job. Wait for it to start",
            instance=request.url.path,
        ) from None
    except NotFound:
        raise not_found(request.url.path) from None
    stored = (await http.stored_jobs(service.database, [copy]))[copy]
    if stored.replay_of != job.id:
        raise Conflict("new_id is the id of another job", hint="Take a new UUID for each replay.")
    return answer(shapes.job(stored), 201)


async def _cancel(request: Request, name: str | None, id: str) -> Response:
    job = await _find(request, name, id)
    try:
        status = await jobs.cancel(service_of(request).database, job.id)
    except NotFound:
        raise not_found(request.url.path) from None
    return answer({"id": shapes.job_id(job.id), "status": status})


def dump_error(error: Any) -> str | None:
    """The error that a worker gives as JSON text of an object. Raises `InvalidInput`."""
    if error is None:
        return None
    return bodies.failure(dump_json(error, "the error"))
