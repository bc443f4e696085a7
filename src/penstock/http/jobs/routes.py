"""Single jobs: enqueue, callback, look, wait, replay, cancel, result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Depends, Path, Query, Request, Response

from penstock.core.checks import check_text
from penstock.core.records import raw, to_json
from penstock.errors import Conflict, NotFound
from penstock.http import bodies, shapes
from penstock.http.auth import Role
from penstock.http.call import Call
from penstock.http.completion_waiter import JobWaiter
from penstock.http.errors import ApiError, not_found, other_name
from penstock.http.jobs.access import job_shown_to, why_shown_to
from penstock.http.jobs.enqueuing import SingleJobs
from penstock.http.jobs.models import (
    NEW_SIGNAL,
    ArchivedJob,
    Cancelled,
    MadeDue,
    NewJob,
    NewPriority,
    NewSignal,
    PrioritySet,
    QueuedJob,
    Signalled,
    Status,
)
from penstock.http.openapi import LINK, json_body
from penstock.http.routing import (
    ENQUEUE,
    READ,
    CurrentService,
    Details,
    Id,
    Instance,
    Name,
    RawBody,
    User,
    Wait,
    body,
    hot,
    listening,
    raw_answer,
    router,
)
from penstock.jobs import http_queries as http
from penstock.jobs import queries as jobs
from penstock.jobs.http_models import Result
from penstock.jobs.http_queries import StoredJob
from penstock.jobs.models import make_id
from penstock.jobs.records import Status as JobStatus
from penstock.jobs.steps import StepRecord
from penstock.workflows import queries as workflows

api = router("jobs")
_NEW = {"data": {"shipmentId": "shp_123"}, "run_after": "2026-01-11T18:26:26.000Z", "expires_at": "2026-01-11T20:26:26.000Z"}
# Of the results of the steps of a job in one answer: a job may have 10,000, of 256 KiB each.
_MOST_RESULTS = 1 << 20
Force = Annotated[
    bool,
    Query(description="true: also while an earlier replay waits, runs or has succeeded (409 otherwise)."),
]
NewId = Annotated[str | None, Query(description="Id of the copy, so that a repeated call replays once.")]


@hot(api, "PUT", "/v1/jobs/{name:name}/{id:job}", Role.ENQUEUE, takes=json_body(NewJob, _NEW), status=202, answers=QueuedJob)
async def enqueue(call: Call, name: Name, id: Id) -> None:
    """Enqueue a job. Idempotent: the same id again is the same job. The id `random_id` makes a new one, for load tests."""
    jobs = call.service.part(SingleJobs)
    job, outcome = await jobs.put(call.user, name, id, await call.body(), call.path, call.traceparent)
    await call.send_json(202, job, (b"penstock-outcome", outcome.encode()))


@hot(
    api,
    "POST",
    "/v1/jobs/{name:name}/{id:job}",
    Role.WORK,
    takes=json_body(Status, {"status": "succeeded", "attempt": 3}),
    said="Recorded.",
)
async def record_status(call: Call, name: Name, id: Id) -> None:
    """Record a job's success or failure: the callback of a downstream service. The attempt number must be the job's."""
    await call.service.part(SingleJobs).record_status(call.user, name, id, await call.body(), call.path)
    await call.send_json(200, b"")


class _StepPage:
    """Which durable steps of a job are wanted."""

    def __init__(
        self,
        after: Annotated[str | None, Query(description="The cursor of the last step of the page before.", max_length=300)] = None,
        limit: Annotated[int, Query(description="How many at most.", ge=1, le=1_000)] = 1_000,
    ) -> None:
        if after is not None:
            check_text("after", after)
        self.after = after
        self.limit = limit

    def link(self, path: str, response: Response, steps: Sequence[StepRecord]) -> None:
        """Lead to what follows these steps, when there may be more, in the header `Link`."""
        if len(steps) == self.limit:
            query = urlencode({"limit": self.limit, "after": steps[-1].cursor})
            response.headers["Link"] = f'<{path}?{query}>; rel="next"'


StepPage = Annotated[_StepPage, Depends()]


class _Jobs:
    """The job of a path, for the user who asks."""

    def __init__(self, service: CurrentService, user: User, path: Instance) -> None:
        self.database = service.database
        self._service = service
        self._user = user
        self.path = path

    async def find(self, name: str | None, given: str) -> StoredJob:
        """The job. Raises `ApiError`: no access to the name, no such job for this user, another name."""
        id = bodies.job_id(given)
        if name is not None:
            self._user.require(name, self.path)
        found = (await http.stored_jobs(self.database, [id], log=True)).get(id)
        # A user without access does not even learn that there is such a job.
        if found is None or not self._user.may(found.name):
            raise not_found(self.path)
        if name is not None and found.name != name:
            raise other_name(self.path)
        return job_shown_to(self._user, found)

    async def waited(self, request: Request, name: str | None, id: str, wait: str | None) -> StoredJob:
        """The job when it is finished, or as it is when the time is over."""
        service = self._service
        within = bodies.span(wait, "wait", service.settings.longest_wait)
        job = await self.find(name, id)
        if within and not job.status.finished:
            async with listening(request.scope["call"]) as gone:
                finished = asyncio.ensure_future(service.part(JobWaiter).finished(job.id, within))
                await asyncio.wait({finished, gone}, return_when=asyncio.FIRST_COMPLETED)
                finished.cancel()
                with suppress(asyncio.CancelledError):
                    await finished
                if gone.done():
                    return job
            job = await self.find(name, id)
        return job

    async def shown(self, job: StoredJob, details: bool) -> Response:
        """The job as an answer."""
        why = None
        if details and not job.status.finished:
            # A job in progress may wait too: a worker claims jobs of a key ahead. It may have been pruned since it was read.
            with suppress(NotFound):
                why = why_shown_to(self._user, await jobs.why(self.database, job.id))
        return raw_answer(to_json(shapes.job(job, details=details, why=why)))

    async def replay(self, name: str | None, id: str, given_new: str | None, force: bool, body: bytes) -> Response:
        """A copy of the job, as an answer."""
        new_id = bodies.job_id(given_new) if given_new is not None else make_id()
        data = bodies.replacement(body)
        job = await self.find(name, id)
        try:
            copy = await jobs.replay(self.database, job.id, new_id, data, force=force)
        except Conflict:
            if job.status not in (JobStatus.QUEUED, JobStatus.WAITING):
                raise
            raise ApiError(
                400, "invalid_replay_attempt", "Cannot replay a queued job. Wait for it to start", instance=self.path
            ) from None
        except NotFound:
            raise not_found(self.path) from None
        stored = (await http.stored_jobs(self.database, [copy]))[copy]
        if stored.replay_of != job.id:
            raise Conflict("new_id is the id of another job", hint="Take a new UUID for each replay.")
        return raw_answer(to_json(shapes.job(stored)), 201)

    async def cancel(self, name: str | None, id: str) -> Cancelled:
        """Cancel the job."""
        job = await self.find(name, id)
        try:
            status = await jobs.cancel(self.database, job.id)
        except NotFound:
            raise not_found(self.path) from None
        return Cancelled(id=shapes.job_id(job.id), status=status)

    async def signal(self, name: str | None, id: str, signal: str, body: bytes) -> Signalled:
        """Signal the job."""
        sent = bodies.field_text(body, "value")
        value = "null" if sent is None else bodies.check_data(sent)
        job = await self.find(name, id)
        try:
            first = await workflows.signal(self.database, job.id, signal, value)
        except NotFound:
            raise not_found(self.path) from None
        return Signalled(id=shapes.job_id(job.id), name=signal, first=first)

    async def steps(self, name: str | None, id: str, page: _StepPage, response: Response) -> list[StepRecord]:
        """A page of the job's durable steps. Their results are as they are stored; of encrypted ones the server has no key."""
        job = await self.find(name, id)
        steps = await workflows.steps_shown(self.database, job.id, _MOST_RESULTS, page.after, page.limit)
        page.link(self.path, response, steps)
        return [replace(step, result=raw(http.hidden_step(step.result) if job.encrypted else step.result)) for step in steps]

    async def set_priority(self, name: str | None, id: str, priority: int) -> PrioritySet:
        """Give the job another priority."""
        job = await self.find(name, id)
        changed = await jobs.set_priority(self.database, [job.id], priority)
        return PrioritySet(id=shapes.job_id(job.id), changed=job.id in changed)

    async def run_now(self, name: str | None, id: str) -> MadeDue:
        """Make the job due."""
        job = await self.find(name, id)
        changed = await jobs.run_now(self.database, [job.id])
        return MadeDue(id=shapes.job_id(job.id), changed=job.id in changed)


async def _jobs(service: CurrentService, user: User, path: Instance) -> _Jobs:
    return _Jobs(service, user, path)


Jobs = Annotated[_Jobs, Depends(_jobs)]
SignalName = Annotated[str, Path(description="Name of the signal.", examples=["approved"], max_length=255)]
SignalBody = Annotated[NewSignal, body(NewSignal, NEW_SIGNAL, required=False)]
PriorityBody = Annotated[NewPriority, body(NewPriority, {"priority": -10})]


@api.get("/v1/jobs/{id:only_job}", dependencies=[READ], response_model=QueuedJob | ArchivedJob)
async def get_job_by_id(request: Request, jobs: Jobs, id: Id, details: Details = False, wait: Wait = None) -> Response:
    """One job, queued or archived. With `wait` answers when it is finished, or as it is when the time is over."""
    return await jobs.shown(await jobs.waited(request, None, id, wait), details)


@api.get("/v1/jobs/{name:name}/{id:job}", dependencies=[READ], response_model=QueuedJob | ArchivedJob)
async def get_job(request: Request, jobs: Jobs, name: Name, id: Id, details: Details = False, wait: Wait = None) -> Response:
    """One job of a type. With `wait` answers when it is finished, or as it is when the time is over."""
    return await jobs.shown(await jobs.waited(request, name, id, wait), details)


@api.get(
    "/v1/jobs/{name:name}/{id:job}/result",
    dependencies=[READ],
    responses={202: {"model": Result, "description": "Not finished yet."}},
)
async def get_result(request: Request, response: Response, jobs: Jobs, name: Name, id: Id, wait: Wait = None) -> Result:
    """What became of a job: its status, result and errors. 202 while it is not finished."""
    job = await jobs.waited(request, name, id, wait)
    if not job.status.finished:
        response.status_code = 202
    # As they are stored: no parser rounds their numbers.
    return Result(job.id, job.status, raw(job.result), raw(job.errors, []))


@api.post("/v1/jobs/{id:only_job}/replay", dependencies=[ENQUEUE], status_code=201, response_model=QueuedJob)
async def replay_by_id(jobs: Jobs, id: Id, body: RawBody, new_id: NewId = None, force: Force = False) -> Response:
    """Enqueue a copy of a running or finished job under a new id; with another payload when there is a body `{"data": ...}`."""
    return await jobs.replay(None, id, new_id, force, body)


@api.post("/v1/jobs/{name:name}/{id:job}/replay", dependencies=[ENQUEUE], status_code=201, response_model=QueuedJob)
async def replay(jobs: Jobs, name: Name, id: Id, body: RawBody, new_id: NewId = None, force: Force = False) -> Response:
    """Enqueue a copy of a running or finished job of a type under a new id."""
    return await jobs.replay(name, id, new_id, force, body)


@api.post("/v1/jobs/{id:only_job}/cancel", dependencies=[ENQUEUE])
async def cancel_by_id(jobs: Jobs, id: Id) -> Cancelled:
    """Cancel a job: a queued one at once; of a running one the handler is told."""
    return await jobs.cancel(None, id)


@api.post("/v1/jobs/{name:name}/{id:job}/cancel", dependencies=[ENQUEUE])
async def cancel(jobs: Jobs, name: Name, id: Id) -> Cancelled:
    """Cancel a job of a type: a queued one at once; of a running one the handler is told."""
    return await jobs.cancel(name, id)


@api.post("/v1/jobs/{id:only_job}/signals/{signal:key}", dependencies=[ENQUEUE])
async def signal_by_id(jobs: Jobs, id: Id, signal: SignalName, new: SignalBody, sent: RawBody) -> Signalled:
    """Send a signal to a job, whose handler waits for it, or will. The first of a name counts."""
    return await jobs.signal(None, id, signal, sent)


@api.post("/v1/jobs/{name:name}/{id:job}/signals/{signal:key}", dependencies=[ENQUEUE])
async def signal(jobs: Jobs, name: Name, id: Id, signal: SignalName, new: SignalBody, sent: RawBody) -> Signalled:
    """Send a signal to a job of a type. The first of a name counts."""
    return await jobs.signal(name, id, signal, sent)


@api.get("/v1/jobs/{id:only_job}/steps", dependencies=[READ], responses=LINK)
async def get_steps_by_id(response: Response, jobs: Jobs, id: Id, page: StepPage) -> list[StepRecord]:
    """The durable steps of a job, in their order, and signals for which it does not wait yet.

    The header `Link` leads to the next page.
    """
    return await jobs.steps(None, id, page, response)


@api.get("/v1/jobs/{name:name}/{id:job}/steps", dependencies=[READ], responses=LINK)
async def get_steps(response: Response, jobs: Jobs, name: Name, id: Id, page: StepPage) -> list[StepRecord]:
    """The durable steps of a job of a type, in their order. The header `Link` leads to the next page."""
    return await jobs.steps(name, id, page, response)


@api.post("/v1/jobs/{id:only_job}/priority", dependencies=[ENQUEUE])
async def set_priority_by_id(jobs: Jobs, id: Id, wanted: PriorityBody) -> PrioritySet:
    """Give a job that waits another priority. A job that runs or has ended stays as it is, and so does one of a pool."""
    return await jobs.set_priority(None, id, wanted.priority)


@api.post("/v1/jobs/{name:name}/{id:job}/priority", dependencies=[ENQUEUE])
async def set_priority(jobs: Jobs, name: Name, id: Id, wanted: PriorityBody) -> PrioritySet:
    """Give a job of a type that waits another priority."""
    return await jobs.set_priority(name, id, wanted.priority)


@api.post("/v1/jobs/{id:only_job}/run-now", dependencies=[ENQUEUE])
async def run_now_by_id(jobs: Jobs, id: Id) -> MadeDue:
    """Make a job that waits for its time, or for a further attempt, due at once. Any other job stays as it is."""
    return await jobs.run_now(None, id)


@api.post("/v1/jobs/{name:name}/{id:job}/run-now", dependencies=[ENQUEUE])
async def run_now(jobs: Jobs, name: Name, id: Id) -> MadeDue:
    """Make a deferred job of a type due at once."""
    return await jobs.run_now(name, id)
