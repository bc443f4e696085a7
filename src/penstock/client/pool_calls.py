"""The calls about pools as data: what is sent, and how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
import orjson

from penstock.client.answers import json_of, reader, record_of
from penstock.client.call import Call, outside, quoted
from penstock.client.calls import body_of, new_receipt
from penstock.core.serialization import dump_json
from penstock.errors import InvalidInput
from penstock.jobs.models import Enqueued, NewJob, make_id
from penstock.jobs.records import parse_id
from penstock.jobs.scaling import ScaleAdvice
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey, StandingState

Page: TypeAlias = "tuple[list[StandingState], Call[Page] | None]"


def pools() -> Call[list[PoolDetails]]:
    """All pools."""
    return Call("GET", "/v1/pools", reader(list[PoolDetails]))


def create_pool(name: str, options: Mapping[str, Any]) -> Call[PoolDetails]:
    """Create a pool. Not repeated: the second time it would be there."""
    return Call("POST", "/v1/pools", reader(PoolDetails), {"name": name, **outside(dict(options))}, repeatable=False)


def drop_pool(name: str, force: bool) -> Call[None]:
    """Drop a pool. Not repeated: the second time it is not there."""
    return Call("DELETE", _path(name), lambda _: None, params={"force": "true"} if force else {}, repeatable=False)


def scale_advice(wait: timedelta) -> Call[list[ScaleAdvice]]:
    """How many workers each type needs."""
    params = {"wait_s": str(wait.total_seconds())}
    return Call("GET", "/v1/scale", reader(list[ScaleAdvice]), params=params)


def details(pool: str) -> Call[PoolDetails]:
    """One pool."""
    return Call("GET", _path(pool), reader(PoolDetails))


def change(pool: str, options: Mapping[str, Any]) -> Call[PoolDetails]:
    """Change limits, or give it more slots."""
    return Call("PATCH", _path(pool), reader(PoolDetails), outside(dict(options)))


def enqueue(pool: str, new: NewJob) -> Call[Enqueued]:
    """Enqueue. The id is made here, so that it can be repeated."""
    new_id = make_id() if new.id is None else parse_id(new.id)
    return new_receipt("POST", _path(pool, "jobs"), new_id, body_of(new) | {"id": f"job_{new_id}"})


def workers(pool: str) -> Call[list[PoolMember]]:
    """The workers and their slots."""
    return Call("GET", _path(pool, "workers"), reader(list[PoolMember]))


def drain(pool: str, worker: str, way: str) -> Call[PoolMember]:
    """Drain a worker, or undrain it."""
    return Call("POST", _path(pool, "workers", quoted(worker), way), reader(PoolMember))


def state(pool: str, key: str) -> Call[KeyState]:
    """What is known of a key."""
    return Call("GET", _path(pool, "keys", _key(key)), reader(KeyState))


def pause_key(pool: str, key: str) -> Call[datetime]:
    """Pause a key."""

    def parse(response: httpx.Response) -> datetime:
        since = record_of(KeyState, response).paused_at
        # Another client may have resumed it in between.
        return datetime.now(UTC) if since is None else since

    return Call("POST", _path(pool, "keys", _key(key), "pause"), parse)


def resume_key(pool: str, key: str) -> Call[KeyState]:
    """End the pause of a key."""
    return Call("POST", _path(pool, "keys", _key(key), "resume"), reader(KeyState))


def paused(pool: str, after: str | None, limit: int) -> Call[list[PausedKey]]:
    """The paused keys."""
    params = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call("GET", _path(pool, "paused"), reader(list[PausedKey]), params=params)


def jobs(pool: str, key: str | None, after: str | None, limit: int) -> Call[list[KeyedJob]]:
    """The jobs that wait or run."""
    given = {"key": key, "after": after, "limit": str(limit)}
    params = {name: value for name, value in given.items() if value is not None}
    return Call("GET", _path(pool, "jobs"), reader(list[KeyedJob]), params=params)


def quarantined(pool: str, after: str | None, limit: int) -> Call[list[QuarantinedKey]]:
    """Keys for which the pool's rule fails."""
    params = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call(
        "GET",
        _path(pool, "quarantined"),
        reader(list[QuarantinedKey]),
        params=params,
    )


def release(pool: str, key: str) -> Call[KeyState]:
    """Have the rule asked again about a key."""
    return Call("POST", _path(pool, "quarantined", _key(key)), reader(KeyState))


def weights(pool: str) -> Call[dict[str, int]]:
    """Keys with weights."""
    return Call("GET", _path(pool, "weights"), lambda response: dict(json_of(response)["weights"]))


def set_weight(pool: str, key: str, weight: int) -> Call[None]:
    """Give a key a weight."""
    return Call("PUT", _path(pool, "weights", _key(key)), lambda _: None, {"weight": weight})


def standing(pool: str) -> Call[Page]:
    """The first page of the standing jobs."""
    return Call("GET", _path(pool, "standing"), _page, params={"limit": "1000"})


def start(pool: str, key: str, data: Any, replace: bool) -> Call[str]:
    """Start a standing job."""
    body = {"data": _json({} if data is None else data, key), "replace": replace}
    return Call("PUT", _path(pool, "standing", _key(key)), lambda response: str(json_of(response)["outcome"]), body)


def stop(pool: str, key: str) -> Call[bool]:
    """Stop a standing job. Not repeated: the second time there would be none."""
    return _Stop("DELETE", _path(pool, "standing", _key(key)), lambda _: True, repeatable=False)


class _Stop(Call[bool]):
    """That there is no such standing job is an answer, that there is no such pool an error."""

    __slots__ = ()

    def read(self, response: httpx.Response) -> bool:
        """See `Call`."""
        if response.status_code == 404 and json_of(response).get("title") == "Resource not found":
            return False
        return Call.read(self, response)


def notify(pool: str, key: str, message: Any) -> Call[None]:
    """Send a message to a standing job. Not repeated: it would be delivered twice."""
    return Call(
        "POST", _path(pool, "standing", _key(key), "messages"), lambda _: None, {"data": _json(message, key)}, repeatable=False
    )


def reconcile(pool: str, wanted: Mapping[str, Any]) -> Call[tuple[int, int, int]]:
    """Make the standing jobs equal to a wanted set."""

    def parse(response: httpx.Response) -> tuple[int, int, int]:
        found = json_of(response)
        return found["started"], found["replaced"], found["stopped"]

    body = {"wanted": {key: _json(data, key) for key, data in wanted.items()}}
    return Call("PUT", _path(pool, "standing"), parse, body)


def _page(response: httpx.Response) -> Page:
    found = record_of(list[StandingState], response)
    following = response.links.get("next", {}).get("url")
    if following is None:
        return found, None
    parts = urlsplit(following)
    return found, Call("GET", parts.path, _page, params=dict(parse_qsl(parts.query)))


def _path(pool: str, *parts: str) -> str:
    return "/".join(("/v1/pools", quoted(pool), *parts))


def _key(key: str) -> str:
    if not key:
        raise InvalidInput("a key is empty", hint="A key has 1 to 255 characters.")
    return quote(key, safe="")


def _json(value: Any, what: str) -> Any:
    return orjson.Fragment(dump_json(value, what))
