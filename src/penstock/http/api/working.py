"""Workers over HTTP, for languages without a driver: claim, extend, settle, heartbeat. The same leases and fences."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Annotated
from uuid import UUID

import orjson
from fastapi import Path, Request, Response

from penstock.errors import Conflict
from penstock.http import bodies, shapes
from penstock.http.api.common import Name, answer, body_of, listening, needs, principal_of, read, router, service_of
from penstock.http.api.jobs import dump_error
from penstock.http.auth import Principal, Role
from penstock.http.errors import no_such_type, not_found
from penstock.http.models import Beat, Claim, ClaimedJobs, Extend, Extended, Heartbeat, Settle, Settled, Settlement, Worker
from penstock.http.service import Service
from penstock.job import ClaimedJob, Outcome
from penstock.job import Settlement as JobSettlement
from penstock.payload import dump_json
from penstock.postgres import http, jobs

api = router("workers")
_HELD = {"id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "attempt": 3, "lease": 17}
WorkerId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Id of the worker process.", examples=["billing-1"])
]


@api.post(
    "/v1/jobs/{name:name}/claim",
    response_model=ClaimedJobs,
    openapi_extra=body_of(Claim, {"worker": "billing-1", "limit": 10, "wait": "20s"}),
)
@needs(Role.WORK)
async def claim(request: Request, name: Name) -> Response:
    """Claim jobs of a type, and wait for one when there is none. They belong to the worker for `lease_s` seconds."""
    service = service_of(request)
    principal_of(request).require(name, request.url.path)
    wanted = await read(request, Claim)
    within = bodies.span(wanted.wait, "wait", service.settings.longest_wait)
    claimed = await service.claims.claim(wanted.worker, name, wanted.limit)
    if not claimed:
        if await http.job_type(service.database, name) is None:
            raise no_such_type(name)
        if within > 0:
            async with listening(request) as gone:
                claimed = await service.claims.wait(wanted.worker, name, wanted.limit, within, gone)
    if claimed:
        service.metrics.claimed(name, len(claimed))
    return answer({"jobs": [_claimed(job) for job in claimed]})


@api.post(
    "/v1/jobs/{name:name}/extend",
    response_model=Extended,
    openapi_extra=body_of(Extend, {"jobs": [_HELD], "for_s": 300}),
)
@needs(Role.WORK)
async def extend(request: Request, name: Name) -> Response:
    """Keep jobs for longer. Each gets a new lease; one that is missing belongs to somebody else now."""
    service = service_of(request)
    principal_of(request).require(name, request.url.path)
    wanted = await read(request, Extend)
    held = {bodies.job_id(job.id): job for job in wanted.jobs}
    own = await http.names_of(service.database, list(held))
    ids = [id for id in held if own.get(id) == name]
    attempts, old = [held[id].attempt for id in ids], [held[id].lease for id in ids]
    span = None if wanted.for_s is None else timedelta(seconds=wanted.for_s)
    leases = await service.patiently(jobs.extend_many(service.database, ids, attempts, old, span))
    return answer({"leases": {held[id].id: lease for id, lease in leases.items()}})


@api.post(
    "/v1/jobs/{name:name}/settle",
    response_model=Settled,
    openapi_extra=body_of(Settle, {"jobs": [{**_HELD, "outcome": "succeeded", "result": {"price": 17.15}}]}),
)
@needs(Role.WORK)
async def settle(request: Request, name: Name) -> Response:
    """Say what became of jobs. `stale`: the job was no longer the worker's, and nothing changed."""
    service = service_of(request)
    principal_of(request).require(name, request.url.path)
    given = {bodies.job_id(job.id): job for job in (await read(request, Settle)).jobs}
    own = await http.names_of(service.database, list(given))
    keeps = any(job.result is not None for job in given.values()) and await _keeps_results(service, name)
    settlements = [_settlement(id, job, keeps) for id, job in given.items() if own.get(id) == name]
    changed = await service.patiently(jobs.settle(service.database, settlements)) if settlements else {}
    settled = {settlement.id for settlement in settlements}
    outcomes = {id: changed.get(id, "succeeded") if id in settled else "stale" for id in given}
    for outcome in set(outcomes.values()):
        service.metrics.settled(name, outcome, sum(one == outcome for one in outcomes.values()))
    service.claims.wake(name)
    return answer({"outcomes": {given[id].id: outcome for id, outcome in outcomes.items()}})


@api.get("/v1/workers", response_model=list[Worker])
@needs(Role.READ)
async def list_workers(request: Request) -> Response:
    """All worker processes that work on types which the user may see."""
    principal = principal_of(request)
    return answer([worker for worker in await http.workers(service_of(request).database) if _open_to(principal, worker)])


@api.post(
    "/v1/workers/{id}/heartbeat",
    response_model=Beat,
    openapi_extra=body_of(Heartbeat, {"names": ["invoice-shipments"], "in_flight": 2}, required=False),
)
@needs(Role.WORK)
async def heartbeat(request: Request, id: WorkerId) -> Response:
    """Say that a worker lives. The first one registers it; from then on silence means that its jobs go to others.

    A worker that never sends one keeps its jobs until their leases end.
    """
    database = service_of(request).database
    beat = await read(request, Heartbeat)
    for name in beat.names:
        principal_of(request).require(name, request.url.path)
    await _own_worker(request, id)
    seen = await jobs.heartbeat(database, id, beat.in_flight, beat.state)
    if not seen.known:
        # What it does not name is what its user may work on, so that it is its user's.
        names = beat.names or sorted(principal_of(request).types or ())
        span = timedelta(seconds=beat.dead_after_s)
        # A second heartbeat at the same moment may be faster.
        with suppress(Conflict):
            await jobs.register_worker(database, id, names, beat.host, beat.pid, beat.concurrency, span)
    return answer({"known": seen.known, "cancelled": [shapes.job_id(job) for job in seen.cancelled], "leases": seen.leases})


@api.delete("/v1/workers/{id}", status_code=204, response_class=Response)
@needs(Role.WORK)
async def unregister(request: Request, id: WorkerId) -> Response:
    """The orderly end of a worker. What it still holds is given to others at once."""
    database = service_of(request).database
    if not await _own_worker(request, id):
        raise not_found(request.url.path)
    await jobs.unregister_worker(database, id)
    return Response(status_code=204)


def _open_to(principal: Principal, worker: http.WorkerRecord) -> bool:
    # A worker that named no types may work on any: it is nobody's who may not see all.
    return principal.types is None or (bool(worker["names"]) and principal.types.issuperset(worker["names"]))


async def _own_worker(request: Request, id: str) -> bool:
    """Whether there is such a worker. Raises `ApiError` 403 when it works on types that are not open to the user."""
    worker = next((one for one in await http.workers(service_of(request).database, id)), None)
    if worker is None:
        return False
    for name in worker["names"]:
        principal_of(request).require(name, request.url.path)
    if not worker["names"]:
        principal_of(request).require_all(request.url.path)
    return True


def _claimed(job: ClaimedJob) -> dict[str, object]:
    return {
        "id": shapes.job_id(job.id),
        "name": job.name,
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "priority": job.priority,
        "key": job.key,
        "data": orjson.Fragment(job.data),
        "created_at": job.created_at,
        "run_after": job.run_after,
        "lease": job.lease,
        "lease_s": job.lease_s,
    }


async def _keeps_results(service: Service, name: str) -> bool:
    job_type = await http.job_type(service.database, name)
    return job_type is not None and job_type.options.keep_result


def _settlement(id: UUID, job: Settlement, keeps: bool) -> JobSettlement:
    if job.outcome == "succeeded":
        detail = None if job.result is None or not keeps else dump_json(job.result, "the result")
    else:
        detail = dump_error(job.error)
    after = None if job.retry_after_s is None else timedelta(seconds=job.retry_after_s)
    return JobSettlement(id, job.attempt, job.lease, Outcome(job.outcome), detail, after)
