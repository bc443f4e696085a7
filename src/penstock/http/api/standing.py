"""Standing jobs: start, stop, notify, reconcile, look."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Request, Response

from penstock.http import bodies, shapes
from penstock.http.api.common import answer, body_of, needs, read, router, service_of
from penstock.http.api.pools import Key, PoolName, open_pool, storable_key
from penstock.http.auth import Role
from penstock.http.errors import not_found
from penstock.http.pool_models import Message, Reconciled, StandingJob, StandingOutcome, StartStanding, Wanted
from penstock.payload import dump_json
from penstock.postgres import pool_views, pools
from penstock.postgres.pool_views import StandingState

api = router("standing jobs")
After = Annotated[str | None, Query(description="The last key of the page before.", max_length=255)]
Limit = Annotated[int, Query(description="Most standing jobs on a page.", ge=1, le=1_000)]
_LINK: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"Link": {"description": 'The next page: `<...>; rel="next"`.', "schema": {"type": "string"}}}}
}


@api.get("/v1/pools/{pool:name}/standing", response_model=list[StandingJob], responses=_LINK)
@needs(Role.READ)
async def list_standing(request: Request, pool: PoolName, limit: Limit = 100, after: After = None) -> Response:
    """The standing jobs of a pool and where they run, by key. The header `Link` leads to the next page."""
    await open_pool(request, pool)
    after = None if after is None else storable_key(after)
    found = await pool_views.standing_jobs(service_of(request).database, pool, after=after, limit=limit)
    headers = {}
    if len(found) == limit:
        query = urlencode({"limit": limit, "after": found[-1].key})
        headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
    return answer([_shown(job) for job in found], headers=headers)


@api.put(
    "/v1/pools/{pool:name}/standing",
    response_model=Reconciled,
    openapi_extra=body_of(Wanted, {"wanted": {"acme": {"every_s": 60}, "bolt": {"every_s": 5}}}),
)
@needs(Role.ENQUEUE)
async def reconcile(request: Request, pool: PoolName) -> Response:
    """Make the standing jobs equal to a wanted set, in one transaction. Idempotent."""
    await open_pool(request, pool)
    wanted = (await read(request, Wanted)).wanted
    texts = {storable_key(key): _data(data, key) for key, data in wanted.items()}
    started, replaced, stopped = await pools.reconcile_standing(service_of(request).database, pool, texts)
    return answer({"started": started, "replaced": replaced, "stopped": stopped})


@api.get("/v1/pools/{pool:name}/standing/{key:key}", response_model=StandingJob)
@needs(Role.READ)
async def get_standing(request: Request, pool: PoolName, key: Key) -> Response:
    """One standing job."""
    await open_pool(request, pool)
    found = await pool_views.standing_jobs(service_of(request).database, pool, key=storable_key(key))
    if not found:
        raise not_found(request.url.path)
    return answer(_shown(found[0]))


@api.put(
    "/v1/pools/{pool:name}/standing/{key:key}",
    response_model=StandingOutcome,
    openapi_extra=body_of(StartStanding, {"data": {"every_s": 60}}, required=False),
)
@needs(Role.ENQUEUE)
async def start(request: Request, pool: PoolName, key: Key) -> Response:
    """Start the standing job of a key: it runs on the owner of the key, and moves with it. Idempotent."""
    await open_pool(request, pool)
    given = await read(request, StartStanding)
    database = service_of(request).database
    outcome = await pools.start_standing(database, pool, storable_key(key), _data(given.data, key), replace=given.replace)
    return answer({"key": key, "outcome": outcome})


@api.delete("/v1/pools/{pool:name}/standing/{key:key}", status_code=204, response_class=Response)
@needs(Role.ENQUEUE)
async def stop(request: Request, pool: PoolName, key: Key) -> Response:
    """Stop the standing job of a key, wherever it runs. 404 when there is none."""
    await open_pool(request, pool)
    if not await pools.stop_standing(service_of(request).database, pool, storable_key(key)):
        raise not_found(request.url.path)
    return Response(status_code=204)


@api.post(
    "/v1/pools/{pool:name}/standing/{key:key}/messages",
    status_code=202,
    response_class=Response,
    openapi_extra=body_of(Message, {"data": {"poll": "now"}}),
)
@needs(Role.ENQUEUE)
async def notify(request: Request, pool: PoolName, key: Key) -> Response:
    """Send a message to the standing job of a key. It is delivered at most once."""
    await open_pool(request, pool)
    message = await read(request, Message)
    await pools.notify_standing(service_of(request).database, pool, storable_key(key), _data(message.data, key))
    return Response(status_code=202)


def _data(value: Any, key: str) -> str:
    return bodies.check_data(dump_json(value, f"the data of {key}"))


def _shown(job: StandingState) -> dict[str, Any]:
    return shapes.plain(job) | {"data": shapes.raw(job.data), "state": shapes.raw(job.state), "error": shapes.raw(job.error)}
