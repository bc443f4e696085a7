"""Jobber's one route."""

from __future__ import annotations

from contextlib import suppress

from fastapi import Request, Response

from penstock.errors import Conflict
from penstock.http import bodies
from penstock.http.api.common import answer, body_of, needs, principal_of, router, service_of
from penstock.http.auth import Role
from penstock.http.bodies import NewJobBody
from penstock.http.models import JobberJob
from penstock.job import make_id
from penstock.postgres import http, jobs

api = router("jobber")
# Jobber gives a job to another worker for as long as it takes; without any end a poisonous one would go round for ever.
_ATTEMPTS = 25


@api.post(
    "/jobber/queue",
    status_code=201,
    responses={201: {"content": {"application/json": {"example": {"job-id": "0190b7a0-0000-7000-8000-000000000001"}}}}},
    openapi_extra=body_of(JobberJob, {"type": "send-mail", "payload": {"to": "ada@example.com"}}),
)
@needs(Role.ENQUEUE)
async def queue(request: Request) -> Response:
    """Queue a job. The type is made on first use."""
    service = service_of(request)
    name, payload = bodies.jobber(await request.body())
    principal_of(request).require(name, request.url.path)
    if await http.job_type(service.database, name) is None:
        timeout = service.settings.jobber_visibility_timeout.total_seconds()
        options = {"visibility_timeout": f"{timeout} seconds", "attempts": _ATTEMPTS}
        # Another request may make it in between.
        with suppress(Conflict):
            await jobs.create_job_type(service.database, name, options)
    id = make_id()
    await service.enqueue(name, id, payload, NewJobBody())
    return answer({"job-id": str(id)}, 201)
