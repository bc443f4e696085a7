"""Standing jobs: start, stop, notify, reconcile, look."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from fastapi import Query, Request, Response

from penstock.core.serialization import dump_json
from penstock.http import bodies
from penstock.http.errors import not_found
from penstock.http.openapi import LINK
from penstock.http.pools.dependencies import Key, OpenPool, storable_key
from penstock.http.pools.models import Message, Reconciled, StandingOutcome, StartStanding, Wanted
from penstock.http.routing import ENQUEUE, READ, Instance, OpenDatabase, body, router
from penstock.jobs.http_queries import hidden_text
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.models import StandingState

api = router("standing jobs")
_WANTED = {"wanted": {"acme": {"every_s": 60}, "bolt": {"every_s": 5}}}
After = Annotated[str | None, Query(description="The last key of the page before.", max_length=255)]
Limit = Annotated[int, Query(description="Most standing jobs on a page.", ge=1, le=1_000)]


def _shown(text: str) -> Any:
    """JSON text as it is stored, or the word "encrypted" in the place of an envelope."""
    return orjson.Fragment(hidden_text(text) or "null")


@api.get("/v1/pools/{pool:name}/standing", dependencies=[READ], responses=LINK)
async def list_standing(
    request: Request, response: Response, pool: OpenPool, database: OpenDatabase, limit: Limit = 100, after: After = None
) -> list[StandingState]:
    """The standing jobs of a pool and where they run, by key. The header `Link` leads to the next page."""
    after = None if after is None else storable_key(after)
    # As they are stored: no parser rounds their numbers.
    found = await pool_views.standing_jobs(database, pool, after=after, limit=limit, read=_shown)
    if len(found) == limit:
        query = urlencode({"limit": limit, "after": found[-1].key})
        response.headers["Link"] = f'<{request.url.path}?{query}>; rel="next"'
    return found


@api.put("/v1/pools/{pool:name}/standing", dependencies=[ENQUEUE])
async def reconcile(pool: OpenPool, database: OpenDatabase, given: Annotated[Wanted, body(Wanted, _WANTED)]) -> Reconciled:
    """Make the standing jobs equal to a wanted set, in one transaction. Idempotent."""
    texts = {storable_key(key): _data(data, key) for key, data in given.wanted.items()}
    started, replaced, stopped = await pools.reconcile_standing(database, pool, texts)
    return Reconciled(started=started, replaced=replaced, stopped=stopped)


@api.get("/v1/pools/{pool:name}/standing/{key:key}", dependencies=[READ])
async def get_standing(pool: OpenPool, key: Key, database: OpenDatabase, path: Instance) -> StandingState:
    """One standing job."""
    found = await pool_views.standing_jobs(database, pool, key=key, read=_shown)
    if not found:
        raise not_found(path)
    return found[0]


@api.put("/v1/pools/{pool:name}/standing/{key:key}", dependencies=[ENQUEUE])
async def start(
    pool: OpenPool,
    key: Key,
    database: OpenDatabase,
    given: Annotated[StartStanding, body(StartStanding, {"data": {"every_s": 60}}, required=False)],
) -> StandingOutcome:
    """Start the standing job of a key: it runs on the owner of the key, and moves with it. Idempotent."""
    outcome = await pools.start_standing(database, pool, key, _data(given.data, key), replace=given.replace)
    return StandingOutcome.model_validate({"key": key, "outcome": outcome})


@api.delete("/v1/pools/{pool:name}/standing/{key:key}", dependencies=[ENQUEUE], status_code=204, response_class=Response)
async def stop(pool: OpenPool, key: Key, database: OpenDatabase, path: Instance) -> None:
    """Stop the standing job of a key, wherever it runs. 404 when there is none."""
    if not await pools.stop_standing(database, pool, key):
        raise not_found(path)


@api.post("/v1/pools/{pool:name}/standing/{key:key}/messages", dependencies=[ENQUEUE], status_code=202, response_class=Response)
async def notify(
    pool: OpenPool, key: Key, database: OpenDatabase, message: Annotated[Message, body(Message, {"data": {"poll": "now"}})]
) -> None:
    """Send a message to the standing job of a key. It is delivered at most once."""
    await pools.notify_standing(database, pool, key, _data(message.data, key))


def _data(value: Any, key: str) -> str:
    return bodies.check_data(dump_json(value, f"the data of {key}"))
