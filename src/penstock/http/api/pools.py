"""Pools: create, look, change, enqueue; their workers and keys."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import Path, Query, Request, Response
from starlette.convertors import Convertor, register_url_convertor

from penstock.errors import NotFound
from penstock.http import bodies, shapes
from penstock.http.api.common import answer, body_of, needs, principal_of, raw_answer, read, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import ApiError, bad_json, missing, not_found
from penstock.http.paths import plain
from penstock.http.pool_models import (
    Advice,
    KeyState,
    NewPool,
    NewPoolJob,
    Pool,
    PoolJob,
    PoolOptions,
    PoolWorker,
    QuarantinedKey,
    Weight,
    Weights,
)
from penstock.job import Admission, JobCounts, make_id
from penstock.ownership import balance
from penstock.pool_workers import PoolMember, workers_of
from penstock.postgres import http, ownership, pool_views, pools
from penstock.postgres.pool_views import PoolDetails

api = router("pools")


class _Key(Convertor[str]):
    """A key may have anything in it; a slash is written `%2F`."""

    regex = r"[^/]+"

    def convert(self, value: str) -> str:
        return plain(value)

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("key", _Key())
PoolName = Annotated[str, Path(description="Pool.", examples=["fibonacci"], max_length=200)]
Key = Annotated[str, Path(description="Key.", examples=["acme"], max_length=255)]
WorkerId = Annotated[
    str, Path(pattern=r"^[A-Za-z0-9_.-]{1,50}$", description="Id of the worker in the pool.", examples=["web-3.4711.a1b2c3"])
]
AfterKey = Annotated[str | None, Query(description="Only keys behind this one.", max_length=255)]
KeyLimit = Annotated[int, Query(description="How many at most.", ge=1, le=1_000)]
WaitS = Annotated[float, Query(description="Seconds that a job should wait at most.", gt=0, le=86_400, allow_inf_nan=False)]


@api.get("/v1/pools", response_model=list[Pool])
@needs(Role.READ)
async def list_pools(request: Request) -> Response:
    """All pools that the user may see, by name."""
    service, principal = service_of(request), principal_of(request)
    counts = {count.name: count for count in await service.counts()}
    found = await pool_views.details(service.database)
    return answer([_pool(pool, counts.get(pool.name)) for pool in found if principal.may(pool.name)])


@api.post("/v1/pools", status_code=201, response_model=Pool, openapi_extra=body_of(NewPool, {"name": "fibonacci", "slots": 256}))
@needs(Role.ADMIN)
async def create_pool(request: Request) -> Response:
    """Create a pool and its job type. 409 when there is such a pool, or, without `convert`, a plain job type of that name."""
    service, path = service_of(request), request.url.path
    new = await read(request, NewPool)
    principal_of(request).require(new.name, path)
    if await pool_views.details(service.database, new.name):
        raise ApiError(409, "conflict", f"There is a pool {new.name} already", instance=path, in_body=True)
    options = new.limits() | {"assignor": new.assignor, "slots": new.slots or 256}
    if new.convert:
        await pools.convert_to_pool(service.database, new.name, options)
    else:
        await pools.declare_pool(service.database, new.name, options, {})
    return answer(await _shown(request, new.name), 201)


@api.get("/v1/pools/{pool:name}", response_model=Pool)
@needs(Role.READ)
async def get_pool(request: Request, pool: PoolName) -> Response:
    """One pool. What waits is counted every few seconds."""
    principal_of(request).require(pool, request.url.path)
    return answer(await _shown(request, pool))


@api.patch("/v1/pools/{pool:name}", response_model=Pool, openapi_extra=body_of(PoolOptions, {"slots": 512, "key_concurrency": 1}))
@needs(Role.ADMIN)
async def change_pool(request: Request, pool: PoolName) -> Response:
    """Change limits of keys, or give the live pool more slots. 409 for fewer slots than it has."""
    database = service_of(request).database
    await open_pool(request, pool)
    options = await read(request, PoolOptions)
    if limits := options.limits():
        await pool_views.change_pool(database, pool, limits)
    if options.slots is not None:
        await pools.resize(database, pool, options.slots)
        await balance.rebalance(database, pool, None)
    return answer(await _shown(request, pool))


@api.post(
    "/v1/pools/{pool:name}/jobs",
    status_code=202,
    response_model=PoolJob,
    openapi_extra=body_of(NewPoolJob, {"key": "acme", "data": 42}),
)
@needs(Role.ENQUEUE)
async def enqueue(request: Request, pool: PoolName) -> Response:
    """Enqueue a job behind the others of its key. With an id of your own the call may be repeated."""
    service, path = service_of(request), request.url.path
    body, data, given_id = bodies.pool_job(await request.body())
    principal_of(request).require(pool, path)
    if not body.key:
        raise missing("key", path)
    id = make_id() if given_id is None else bodies.job_id(given_id)
    await pool_views.require(service.database, pool)
    put = await service.enqueue(pool, id, bodies.check_data(data), body)
    if put.name is None or put.admission is Admission.ARCHIVED:
        raise ApiError(
            400, "job_already_archived", "Job has already been archived", instance=f"/v1/jobs/{pool}/{shapes.job_id(id)}"
        )
    key = body.key
    if put.admission is not Admission.QUEUED and (there := (await http.stored_jobs(service.database, [put.id])).get(put.id)):
        key = there.key or key
    job = orjson.loads(shapes.put_job(put, "null")) | {"key": key, "data": orjson.Fragment(put.data or data)}
    return raw_answer(shapes.dumps(job), 202, {"penstock-outcome": put.admission})


@api.get("/v1/pools/{pool:name}/workers", response_model=list[PoolWorker])
@needs(Role.READ)
async def list_pool_workers(request: Request, pool: PoolName) -> Response:
    """The workers of a pool, oldest first, and the slots of each; last, without an id, the slots that nobody has."""
    await open_pool(request, pool)
    return answer([shapes.plain(worker) for worker in await workers_of(service_of(request).database, pool)])


@api.get("/v1/pools/{pool:name}/workers/{id}", response_model=PoolWorker)
@needs(Role.READ)
async def get_pool_worker(request: Request, pool: PoolName, id: WorkerId) -> Response:
    """One worker of a pool and its slots."""
    await open_pool(request, pool)
    return answer(shapes.plain(await _worker(request, pool, id)))


@api.post("/v1/pools/{pool:name}/workers/{id}/drain", response_model=PoolWorker)
@needs(Role.ADMIN)
async def drain_worker(request: Request, pool: PoolName, id: WorkerId) -> Response:
    """Move a worker out: it stays in the pool and hands its slots to the others. Idempotent."""
    return await _drain(request, pool, id, True)


@api.post("/v1/pools/{pool:name}/workers/{id}/undrain", response_model=PoolWorker)
@needs(Role.ADMIN)
async def undrain_worker(request: Request, pool: PoolName, id: WorkerId) -> Response:
    """Let a drained worker take part again. Idempotent."""
    return await _drain(request, pool, id, False)


@api.get("/v1/pools/{pool:name}/quarantined", response_model=list[QuarantinedKey])
@needs(Role.READ)
async def list_quarantined(request: Request, pool: PoolName, after: AfterKey = None, limit: KeyLimit = 100) -> Response:
    """Keys for which the rule of the pool fails, by key, from `after` on: their jobs wait until the rule answers again."""
    await open_pool(request, pool)
    after = None if after is None else storable_key(after)
    found = await pool_views.quarantined_keys(service_of(request).database, pool, after=after, limit=limit)
    return answer([shapes.plain(bad) for bad in found])


@api.post("/v1/pools/{pool:name}/quarantined/{key:key}", status_code=202, response_model=KeyState)
@needs(Role.ADMIN)
async def release_key(request: Request, pool: PoolName, key: Key) -> Response:
    """Have the rule of the pool asked again about a quarantined key. 404 when it is not quarantined."""
    await open_pool(request, pool)
    database, key = service_of(request).database, storable_key(key)
    try:
        await ownership.release_keys(database, pool, key)
    except NotFound:
        raise not_found(request.url.path) from None
    return answer(shapes.key(key, await pool_views.key_state(database, pool, key)), 202)


@api.get("/v1/pools/{pool:name}/keys/{key:key}", response_model=KeyState)
@needs(Role.READ)
async def get_key(request: Request, pool: PoolName, key: Key) -> Response:
    """Where a key is: its slot, who has it, and what waits."""
    await open_pool(request, pool)
    state = await pool_views.key_state(service_of(request).database, pool, storable_key(key))
    return answer(shapes.key(key, state))


@api.get("/v1/pools/{pool:name}/weights", response_model=Weights)
@needs(Role.READ)
async def list_weights(request: Request, pool: PoolName) -> Response:
    """The keys that get more than one job a turn, 10,000 at most."""
    await open_pool(request, pool)
    return answer({"weights": await pool_views.weights(service_of(request).database, pool)})


@api.put("/v1/pools/{pool:name}/weights/{key:key}", response_model=Weight, openapi_extra=body_of(Weight, {"weight": 3}))
@needs(Role.ADMIN)
async def set_weight(request: Request, pool: PoolName, key: Key) -> Response:
    """Say how many jobs a key gets in each of its turns; 1 is what every key has."""
    await open_pool(request, pool)
    given = await read(request, Weight)
    await pools.set_weight(service_of(request).database, pool, storable_key(key), given.weight)
    return answer({"weight": given.weight})


@api.get("/v1/scale", response_model=list[Advice])
@needs(Role.READ)
async def scale(request: Request, wait_s: WaitS = 5.0) -> Response:
    """How many workers each job type and pool needs for jobs to wait no longer than `wait_s` seconds."""
    principal = principal_of(request)
    advice = await service_of(request).scaling.advice(wait_s)
    return answer([shapes.plain(one) for one in advice if principal.may(one.name)])


async def open_pool(request: Request, pool: str) -> PoolDetails:
    """The pool of a path. Raises `ApiError` 403, `NotFound`."""
    principal_of(request).require(pool, request.url.path)
    return await pool_views.require(service_of(request).database, pool)


def storable_key(key: str) -> str:
    """The same key. Raises `ApiError` for one that PostgreSQL cannot store."""
    if "\x00" in key:
        raise bad_json()
    return key


async def _shown(request: Request, pool: str) -> dict[str, Any]:
    service = service_of(request)
    details = await pool_views.require(service.database, pool)
    return _pool(details, next((count for count in await service.counts() if count.name == pool), None))


def _pool(pool: PoolDetails, counts: JobCounts | None) -> dict[str, Any]:
    shown = shapes.plain(pool) | {"key_rate_period_s": pool.key_rate_period}
    del shown["key_rate_period"]
    for field in ("ready", "deferred", "in_progress"):
        shown[field] = getattr(counts, field) if counts else 0
    return shown | {"oldest_ready_s": counts.oldest_ready_s if counts else None}


async def _worker(request: Request, pool: str, id: str) -> PoolMember:
    for worker in await workers_of(service_of(request).database, pool):
        if worker.id == id:
            return worker
    raise not_found(request.url.path)


async def _drain(request: Request, pool: str, id: str, drain: bool) -> Response:
    await open_pool(request, pool)
    try:
        await balance.drain(service_of(request).database, pool, id, None, drain=drain)
    except NotFound:
        raise not_found(request.url.path) from None
    return answer(shapes.plain(await _worker(request, pool, id)))
