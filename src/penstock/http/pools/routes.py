"""Pools: create, look, change, enqueue; their workers and keys."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

import orjson
from fastapi import Path, Query, Request, Response

from penstock.core.records import to_json
from penstock.errors import NotFound
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.http import bodies, shapes
from penstock.http.auth import Principal
from penstock.http.errors import ApiError, missing, not_found
from penstock.http.jobs.enqueuing import New, SingleJobs
from penstock.http.openapi import LINK, json_body
from penstock.http.pools.dependencies import Key, OpenPool, PoolName, storable_key
from penstock.http.pools.models import NewPool, NewPoolJob, PoolJob, PoolOptions, Weight, Weights
from penstock.http.routing import (
    ADMIN,
    ENQUEUE,
    READ,
    CurrentService,
    Instance,
    OpenDatabase,
    RawBody,
    Traceparent,
    User,
    body,
    part,
    raw_answer,
    router,
)
from penstock.http.service import Service
from penstock.jobs import http_queries as http
from penstock.jobs.models import EnqueueOutcome, make_id
from penstock.jobs.scaling import ScaleAdvice
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.members import workers_of
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey
from penstock.postgres.database import Database

api = router("pools")
WorkerId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Id of the worker in the pool.", examples=["web-3.4711.a1b2c3"])
]
AfterKey = Annotated[str | None, Query(description="Only keys behind this one.", max_length=255)]
OnlyKey = Annotated[str | None, Query(description="Only jobs of this key.", max_length=255)]
AfterJob = Annotated[str | None, Query(description="The cursor of the last job of the page before.", max_length=300)]
KeyLimit = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]
WaitS = Annotated[float, Query(description="Seconds that a job should wait at most.", gt=0, le=86_400, allow_inf_nan=False)]


@api.get("/v1/pools", dependencies=[READ])
async def list_pools(service: CurrentService, user: User) -> list[PoolDetails]:
    """All pools that the user may see, by name."""
    counts = {count.name: count for count in await service.counts()}
    found = await pool_views.details(service.database)
    return [pool.with_counts(counts.get(pool.name)) for pool in found if user.may(pool.name)]


@api.post("/v1/pools", dependencies=[ADMIN], status_code=201)
async def create_pool(
    service: CurrentService,
    user: User,
    path: Instance,
    new: Annotated[NewPool, body(NewPool, {"name": "fibonacci", "slots": 256})],
) -> PoolDetails:
    """Create a pool and its job type. 409 when there is such a pool, or, without `convert`, a plain job type of that name."""
    user.require(new.name, path)
    if await pool_views.details(service.database, new.name):
        raise ApiError(409, "conflict", f"There is a pool {new.name} already", instance=path, in_body=True)
    options = new.limits() | {"assignor": new.assignor, "slots": new.slots or 256}
    await pools.create_pool(service.database, new.name, options, new.as_options(), convert=new.convert)
    return await _details(service, new.name, user)


@api.get("/v1/pools/{pool:name}", dependencies=[READ])
async def get_pool(pool: PoolName, service: CurrentService, user: User, path: Instance) -> PoolDetails:
    """One pool. What waits is counted every few seconds."""
    user.require(pool, path)
    return await _details(service, pool, user)


@api.patch("/v1/pools/{pool:name}", dependencies=[ADMIN])
async def change_pool(
    pool: OpenPool,
    service: CurrentService,
    user: User,
    options: Annotated[PoolOptions, body(PoolOptions, {"slots": 512, "key_concurrency": 1})],
) -> PoolDetails:
    """Change limits of keys, or give the live pool more slots. 409 for fewer slots than it has."""
    database = service.database
    if limits := options.limits():
        await pool_views.change_pool(database, pool, limits)
    if options.slots is not None:
        await pools.resize(database, pool, options.slots)
        await balance.rebalance(database, pool, None)
    return await _details(service, pool, user)


@api.delete("/v1/pools/{pool:name}", dependencies=[ADMIN], status_code=204, response_class=Response)
async def drop_pool(
    pool: OpenPool,
    database: OpenDatabase,
    force: Annotated[
        bool, Query(description="Also with standing jobs, and while jobs wait; they are archived as cancelled.")
    ] = False,
) -> None:
    """Drop a pool with its job type, keys and standing jobs; what is archived stays.

    409 while it has live workers, while jobs run, and, unless forced, while jobs wait or it has standing jobs.
    """
    await pools.drop_pool(database, pool, force=force)


@api.post(
    "/v1/pools/{pool:name}/jobs",
    dependencies=[ENQUEUE],
    status_code=202,
    response_model=PoolJob,
    openapi_extra=json_body(NewPoolJob, {"key": "acme", "data": 42}),
)
async def enqueue(
    pool: PoolName,
    database: OpenDatabase,
    jobs: Annotated[SingleJobs, part(SingleJobs)],
    user: User,
    path: Instance,
    sent: RawBody,
    traceparent: Traceparent,
) -> Response:
    """Enqueue a job behind the others of its key. With an id of your own the call may be repeated."""
    given, data, given_id = bodies.pool_job(sent)
    user.require(pool, path)
    if not given.key:
        raise missing("key", path)
    id = make_id() if given_id is None else bodies.job_id(given_id)
    await pool_views.require(database, pool, user.may)
    put = await jobs.enqueue(pool, New(user, pool, id, data, given, path, traceparent))
    if put.name is None or put.outcome is EnqueueOutcome.ARCHIVED:
        raise ApiError(
            400, "job_already_archived", "Job has already been archived", instance=f"/v1/jobs/{pool}/{shapes.job_id(id)}"
        )
    key = given.key
    if put.outcome is not EnqueueOutcome.QUEUED and (there := (await http.stored_jobs(database, [put.id])).get(put.id)):
        key = there.key or key
    job = orjson.loads(shapes.put_job(put, "null"))
    del job["attempts"]
    job |= {"key": key, "attempt": put.attempt, "max_attempts": put.max_attempts, "data": orjson.Fragment(put.data or data)}
    return raw_answer(to_json(job), 202, {"penstock-outcome": put.outcome})


@api.get("/v1/pools/{pool:name}/jobs", dependencies=[READ], responses=LINK)
async def list_pool_jobs(
    request: Request,
    response: Response,
    pool: OpenPool,
    database: OpenDatabase,
    key: OnlyKey = None,
    after: AfterJob = None,
    limit: KeyLimit = 100,
) -> list[KeyedJob]:
    """The jobs that wait or run, by key: those in the queues of their keys in order, then those that are deferred.

    The header `Link` leads to the next page.
    """
    given = {name: storable_key(value) for name, value in (("key", key), ("after", after)) if value is not None}
    found = await pool_views.pool_jobs(database, pool, key=given.get("key"), after=given.get("after"), limit=limit)
    if len(found) == limit:
        query = urlencode({**given, "limit": limit, "after": found[-1].cursor})
        response.headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
    return found


@api.get("/v1/pools/{pool:name}/workers", dependencies=[READ])
async def list_pool_workers(pool: OpenPool, database: OpenDatabase) -> list[PoolMember]:
    """The workers of a pool, oldest first, and the slots of each; last, without an id, the slots without an owner."""
    return await workers_of(database, pool)


@api.get("/v1/pools/{pool:name}/workers/{id}", dependencies=[READ])
async def get_pool_worker(pool: OpenPool, id: WorkerId, database: OpenDatabase, path: Instance) -> PoolMember:
    """One worker of a pool and its slots."""
    return await _worker(database, pool, id, path)


@api.post("/v1/pools/{pool:name}/workers/{id}/drain", dependencies=[ADMIN])
async def drain_worker(pool: OpenPool, id: WorkerId, database: OpenDatabase, path: Instance) -> PoolMember:
    """Move a worker out: it stays in the pool and hands its slots to the others. Idempotent."""
    return await _drain(database, pool, id, path, drain=True)


@api.post("/v1/pools/{pool:name}/workers/{id}/undrain", dependencies=[ADMIN])
async def undrain_worker(pool: OpenPool, id: WorkerId, database: OpenDatabase, path: Instance) -> PoolMember:
    """Let a drained worker take part again. Idempotent."""
    return await _drain(database, pool, id, path, drain=False)


@api.get("/v1/pools/{pool:name}/quarantined", dependencies=[READ])
async def list_quarantined(
    pool: OpenPool, database: OpenDatabase, after: AfterKey = None, limit: KeyLimit = 100
) -> list[QuarantinedKey]:
    """Keys for which the rule of the pool fails, by key, from `after` on: their jobs wait until the rule answers again."""
    after = None if after is None else storable_key(after)
    return await pool_views.quarantined_keys(database, pool, after=after, limit=limit)


@api.post("/v1/pools/{pool:name}/quarantined/{key:key}", dependencies=[ADMIN], status_code=202)
async def release_key(pool: OpenPool, key: Key, database: OpenDatabase, path: Instance) -> KeyState:
    """Have the rule of the pool asked again about a quarantined key. 404 when it is not quarantined."""
    try:
        await ownership.release_keys(database, pool, key)
    except NotFound:
        raise not_found(path) from None
    return await pool_views.key_state(database, pool, key)


@api.get("/v1/pools/{pool:name}/keys/{key:key}", dependencies=[READ])
async def get_key(pool: OpenPool, key: Key, database: OpenDatabase) -> KeyState:
    """What is known of a key: its owner, what runs, what waits and for what, since when it is paused or quarantined."""
    return await pool_views.key_state(database, pool, key)


@api.post("/v1/pools/{pool:name}/keys/{key:key}/pause", dependencies=[ADMIN])
async def pause_key(pool: OpenPool, key: Key, database: OpenDatabase) -> KeyState:
    """Let the jobs of a key wait; running ones go on, and those of other keys. Idempotent."""
    await pools.pause_key(database, pool, key)
    return await pool_views.key_state(database, pool, key)


@api.post("/v1/pools/{pool:name}/keys/{key:key}/resume", dependencies=[ADMIN])
async def resume_key(pool: OpenPool, key: Key, database: OpenDatabase) -> KeyState:
    """End the pause of a key. Idempotent."""
    await pools.resume_key(database, pool, key)
    return await pool_views.key_state(database, pool, key)


@api.get("/v1/pools/{pool:name}/paused", dependencies=[READ])
async def list_paused(pool: OpenPool, database: OpenDatabase, after: AfterKey = None, limit: KeyLimit = 100) -> list[PausedKey]:
    """The paused keys, by key, from `after` on: since when, and how many jobs each has."""
    after = None if after is None else storable_key(after)
    return await pool_views.paused_keys(database, pool, after=after, limit=limit)


@api.get("/v1/pools/{pool:name}/weights", dependencies=[READ])
async def list_weights(pool: OpenPool, database: OpenDatabase) -> Weights:
    """The keys that get more than one job a turn, 10,000 at most."""
    return Weights(weights=await pool_views.weights(database, pool))


@api.put("/v1/pools/{pool:name}/weights/{key:key}", dependencies=[ADMIN])
async def set_weight(
    pool: OpenPool, key: Key, database: OpenDatabase, given: Annotated[Weight, body(Weight, {"weight": 3})]
) -> Weight:
    """Say how many jobs a key gets in each of its turns; 1 is what every key has."""
    await pools.set_weight(database, pool, key, given.weight)
    return given


@api.get("/v1/scale", dependencies=[READ])
async def scale(service: CurrentService, user: User, wait_s: WaitS = 5.0) -> list[ScaleAdvice]:
    """How many workers each job type and pool needs for jobs to wait no longer than `wait_s` seconds."""
    return [one for one in await service.scaling.advice(wait_s) if user.may(one.name)]


async def _details(service: Service, pool: str, user: Principal) -> PoolDetails:
    details = await pool_views.require(service.database, pool, user.may)
    return details.with_counts(next((count for count in await service.counts() if count.name == pool), None))


async def _worker(database: Database, pool: str, id: str, path: str) -> PoolMember:
    for worker in await workers_of(database, pool):
        if worker.id == id:
            return worker
    raise not_found(path)


async def _drain(database: Database, pool: str, id: str, path: str, *, drain: bool) -> PoolMember:
    try:
        await balance.drain(database, pool, id, None, drain=drain)
    except NotFound:
        raise not_found(path) from None
    return await _worker(database, pool, id, path)
