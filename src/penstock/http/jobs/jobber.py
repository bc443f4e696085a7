"""Jobber's one route."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from penstock.errors import Conflict
from penstock.http import bodies
from penstock.http.bodies import NewJobBody
from penstock.http.jobs.enqueuing import New, SingleJobs
from penstock.http.jobs.models import JobberJob
from penstock.http.openapi import json_body
from penstock.http.routing import ENQUEUE, CurrentService, Instance, RawBody, Traceparent, User, part, router
from penstock.jobs import http_queries as http
from penstock.jobs import type_queries
from penstock.jobs.models import make_id

api = router("jobber")
# Jobber gives a job to another worker for as long as it takes; without any end a poisonous one would go round for ever.
_ATTEMPTS = 25


@api.post(
    "/jobber/queue",
    dependencies=[ENQUEUE],
    status_code=201,
    responses={201: {"content": {"application/json": {"example": {"job-id": "0190b7a0-0000-7000-8000-000000000001"}}}}},
    openapi_extra=json_body(JobberJob, {"type": "send-mail", "payload": {"to": "ada@example.com"}}),
)
async def queue(
    service: CurrentService,
    single: Annotated[SingleJobs, part(SingleJobs)],
    user: User,
    path: Instance,
    sent: RawBody,
    traceparent: Traceparent,
) -> dict[str, str]:
    """Queue a job. The type is made on first use."""
    name, payload = bodies.jobber(sent)
    user.require(name, path)
    if await http.job_type(service.database, name) is None:
        timeout = service.settings.jobber_visibility_timeout.total_seconds()
        options = {"visibility_timeout": f"{timeout} seconds", "max_attempts": _ATTEMPTS}
        # Another request may make it in between.
        with suppress(Conflict):
            await type_queries.create_job_type(service.database, name, options)
    id = make_id()
    await single.enqueue(name, New(user, name, id, payload, NewJobBody(), path, traceparent))
    return {"job-id": str(id)}
