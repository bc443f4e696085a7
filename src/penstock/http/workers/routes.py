"""Workers over HTTP, for languages without a driver: claim, extend, settle, heartbeat. The same leases and fences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Annotated
from uuid import UUID

import orjson
from fastapi import Path, Response

from penstock.core.records import to_json
from penstock.core.serialization import dump_json
from penstock.errors import Conflict
from penstock.http import bodies, shapes
from penstock.http.auth import Principal, Role
from penstock.http.call import Call
from penstock.http.errors import no_such_type, not_found
from penstock.http.jobs.models import Beat, Claim, Drained, Extend, Extended, Heartbeat, Settle, Settled, Settlement
from penstock.http.openapi import json_body
from penstock.http.routing import (
    ADMIN,
    READ,
    WORK,
    CurrentService,
    Instance,
    Name,
    OpenDatabase,
    OpenType,
    User,
    body,
    fit,
    hot,
    listening,
    router,
)
from penstock.http.service import Service
from penstock.http.workers.access import claiming_as, is_open_to, is_theirs, shown_to
from penstock.http.workers.claims import Claims
from penstock.jobs import claim_queries, worker_queries
from penstock.jobs import http_queries as http
from penstock.jobs.http_models import ClaimedJobs
from penstock.jobs.http_queries import Held
from penstock.jobs.models import ClaimedJob, Outcome
from penstock.jobs.models import Settlement as JobSettlement
from penstock.postgres.database import Database
from penstock.worker import fleets
from penstock.worker.findings import Finding
from penstock.worker.fleets import FleetRecord, WorkerRecord

api = router("workers")
_HELD = {"id": "job_282227eb-3c76-4ef7-af7e-25dff933077f", "attempt": 1, "lease": 17}
WorkerId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Id of the worker process.", examples=["billing-1"])
]
FleetName = Annotated[str, Path(description="Fleet.", examples=["night"], max_length=100)]


@hot(
    api,
    "POST",
    "/v1/jobs/{name:name}/claim",
    Role.WORK,
    takes=json_body(Claim, {"worker": "billing-1", "limit": 10, "wait": "20s"}),
    answers=ClaimedJobs,
)
async def claim(call: Call, name: Name) -> None:
    """Claim jobs of a type, and wait for one when there is none. They belong to the worker for `lease_s` seconds."""
    service = call.service
    call.user.require(name, call.path)
    wanted = fit(await call.body(), Claim, call.path)
    within = bodies.span(wanted.wait, "wait", service.settings.longest_wait)
    claims = service.part(Claims)
    worker = await claiming_as(service.database, call.user, wanted.worker)
    began = time.monotonic()
    claimed = await claims.claim(worker, name, wanted.limit)
    service.metrics.meter.claimed(len(claimed), time.monotonic() - began)
    if not claimed:
        if await http.job_type(service.database, name) is None:
            raise no_such_type(name)
        if within > 0:
            async with listening(call) as gone:
                claimed = await claims.wait(worker, name, wanted.limit, within, gone)
    if claimed:
        service.metrics.claimed(name, len(claimed))
    await call.send_json(200, to_json({"jobs": [_claimed(job) for job in claimed]}))


@api.post("/v1/jobs/{name:name}/extend", dependencies=[WORK])
async def extend(
    name: OpenType, service: CurrentService, wanted: Annotated[Extend, body(Extend, {"jobs": [_HELD], "for_s": 300})]
) -> Extended:
    """Keep jobs for longer. Each gets a new lease; one that is missing belongs to another worker now."""
    held = {bodies.job_id(job.id): job for job in wanted.jobs}
    own = await http.names_of(service.database, list(held))
    ids = [id for id in held if own.get(id) == name]
    attempts, old = [held[id].attempt for id in ids], [held[id].lease for id in ids]
    span = None if wanted.for_s is None else timedelta(seconds=wanted.for_s)
    leases = await service.with_time_limit(claim_queries.extend_many(service.database, ids, attempts, old, span))
    return Extended(leases={held[id].id: lease for id, lease in leases.items()})


@hot(
    api,
    "POST",
    "/v1/jobs/{name:name}/settle",
    Role.WORK,
    takes=json_body(Settle, {"jobs": [{**_HELD, "outcome": "succeeded", "result": {"price": 17.15}}]}),
    answers=Settled,
)
async def settle(call: Call, name: Name) -> None:
    """Say what became of jobs. `stale`: the job was no longer the worker's, and nothing changed."""
    service = call.service
    call.user.require(name, call.path)
    given = {bodies.job_id(job.id): job for job in fit(await call.body(), Settle, call.path).jobs}
    held = await http.held(service.database, list(given))
    keeps = any(job.result is not None for job in given.values()) and await _keeps_results(service, name)
    settlements = [_settlement(id, job, keeps) for id, job in given.items() if id in held and held[id].name == name]
    began = time.monotonic()
    changed = await service.with_time_limit(claim_queries.settle(service.database, settlements)) if settlements else {}
    settled = {settlement.id for settlement in settlements}
    outcomes = {id: changed.get(id, "succeeded") if id in settled else "stale" for id in given}
    others = [(name, outcome) for outcome in outcomes.values() if outcome != "succeeded"]
    service.metrics.settled([name] * len(outcomes), others, time.monotonic() - began)
    # Of another type's job nothing is told, and so nothing is counted.
    service.metrics.timed(_times(outcomes, {id: job for id, job in held.items() if job.name == name}))
    service.part(Claims).wake(name)
    await call.send_json(200, to_json({"outcomes": {given[id].id: outcome for id, outcome in outcomes.items()}}))


@api.get("/v1/workers", dependencies=[READ])
async def list_workers(user: User, database: OpenDatabase) -> list[WorkerRecord]:
    """All worker processes that work on types which the user may see, without what they do for others."""
    return [shown_to(user, worker) for worker in await fleets.workers(database) if is_open_to(user, worker)]


@api.post("/v1/workers/{id}/drain", dependencies=[ADMIN])
async def drain(id: WorkerId, user: User, database: OpenDatabase, path: Instance) -> Drained:
    """Let one worker of a fleet finish what it runs, and end. 409 for a worker of no fleet: its process takes SIGTERM."""
    if user.types is not None:
        # To a user of all types the call itself says what is missing.
        await _require_own(database, user, id, path)
    return Drained(fleet=await fleets.drain_worker(database, id))


@api.get("/v1/fleets", dependencies=[READ])
async def list_fleets(user: User, database: OpenDatabase, path: Instance) -> list[FleetRecord]:
    """All fleets, and how many of their workers are there."""
    user.require_all(path)
    return await fleets.fleets(database)


@api.post("/v1/fleets/{name:name}/drain", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drain_fleet(name: FleetName, user: User, database: OpenDatabase, path: Instance) -> None:
    """Let the workers of a fleet finish what they run, and end."""
    user.require_all(path)
    await fleets.drain(database, name)


@api.get("/v1/doctor", dependencies=[READ])
async def doctor(user: User, service: CurrentService, path: Instance) -> list[Finding]:
    """What is wrong with the database and the workers, and what to do about it; at most some seconds old.

    The clock that it compares with the database's, and the listener that waits for a notification, are the server's.
    """
    user.require_all(path)
    return await service.with_time_limit(service.examination())


@api.post("/v1/workers/{id}/heartbeat", dependencies=[WORK])
async def heartbeat(
    id: WorkerId,
    user: User,
    database: OpenDatabase,
    path: Instance,
    beat: Annotated[Heartbeat, body(Heartbeat, {"names": ["invoice-shipments"], "in_flight": 2}, required=False)],
) -> Beat:
    """Say that a worker lives. The first one registers it; from then on silence means that its jobs go to others.

    A worker that never sends one keeps its jobs until their leases end.
    """
    for name in beat.names:
        user.require(name, path)
    if await is_theirs(database, user, id) is False:
        # The id is in use, which the user learns, and not for what.
        user.require_any(f"what the worker {id} works on", path)
    seen = await worker_queries.heartbeat(database, id, beat.in_flight, beat.state)
    if not seen.known:
        # What it does not name is what its user may work on, so that it is its user's.
        names = beat.names or sorted(user.types or ())
        span = timedelta(seconds=beat.dead_after_s)
        # A second heartbeat at the same moment may be faster.
        with suppress(Conflict):
            await worker_queries.register_worker(
                database, id, names, beat.host, beat.pid, beat.concurrency, span, code_version=beat.code_version
            )
    return Beat(known=seen.known, cancelled=[shapes.job_id(job) for job in seen.cancelled], leases=seen.leases)


@api.delete("/v1/workers/{id}", dependencies=[WORK], status_code=204, response_class=Response)
async def unregister(id: WorkerId, user: User, database: OpenDatabase, path: Instance) -> None:
    """The orderly end of a worker. What it still holds is given to others at once."""
    await _require_own(database, user, id, path)
    await worker_queries.unregister_worker(database, id)


async def _require_own(database: Database, user: Principal, id: str, path: str) -> None:
    """Raise `ApiError` 404 unless there is such a worker, and all that it works on is open to the user."""
    if not await is_theirs(database, user, id):
        raise not_found(path)


def _claimed(job: ClaimedJob) -> dict[str, object]:
    return {
        "id": shapes.job_id(job.id),
        "name": job.name,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "priority": job.priority,
        "key": job.key,
        "data": orjson.Fragment(job.data),
        "created_at": job.created_at,
        "run_after": job.run_after,
        "lease": job.lease,
        "lease_s": job.lease_s,
        "time_limit_s": job.time_limit_s,
        "snoozes": job.snoozes,
        "traceparent": job.traceparent,
    }


def _times(outcomes: Mapping[UUID, str], held: Mapping[UUID, Held]) -> Iterator[tuple[str, str, float, float]]:
    for id, outcome in outcomes.items():
        if (job := held.get(id)) is not None and job.wait_s is not None and job.run_s is not None:
            yield job.name, outcome, job.wait_s, job.run_s


async def _keeps_results(service: Service, name: str) -> bool:
    job_type = await http.job_type(service.database, name)
    return job_type is not None and job_type.keep_result


def _settlement(id: UUID, job: Settlement, keeps: bool) -> JobSettlement:
    if job.outcome == "succeeded":
        detail = None if job.result is None or not keeps else dump_json(job.result, "the result")
    else:
        detail = None if job.error is None else bodies.failure(dump_json(job.error, "the error"))
    after = None if job.retry_after_s is None else timedelta(seconds=job.retry_after_s)
    return JobSettlement(id, job.attempt, job.lease, Outcome(job.outcome), detail, after)
