"""The calls about pools as data: what is sent, and how the answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit
from uuid import UUID

import httpx
import orjson

from penstock.client.answers import json_of, time_of, why_of
from penstock.client.calls import Call, at, new_receipt, quoted
from penstock.errors import InvalidInput
from penstock.job import Enqueued, Why, make_id, parse_id
from penstock.payload import dump_json
from penstock.pool_workers import PoolMember
from penstock.scaling import ScaleAdvice


@dataclass(frozen=True, slots=True)
class PoolState:
    """A pool as the server shows it: its options, its slots, its jobs, its standing jobs."""

    name: str
    slots: int
    assignor: str
    on_retry: str
    key_concurrency: int
    key_rate_limit: int | None
    key_rate_period_s: float | None
    workers: int
    unowned_slots: int
    moving_slots: int
    ready: int
    deferred: int
    in_progress: int
    oldest_ready_s: float | None
    standing: int
    standing_running: int
    created_at: datetime


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where a key is and what waits for it; counts end at 10,000."""

    key: str
    slot: int | None
    owner: str | None
    target: str | None
    epoch: int | None
    weight: int
    ready: int
    in_progress: int
    oldest_ready_s: float | None
    standing: bool
    next_job: UUID | None = None
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class QuarantinedKey:
    """A key for which the pool's rule fails, and how many jobs wait; at most 10,000 are counted."""

    key: str
    slot: int
    error: str
    failed_at: datetime
    jobs: int


@dataclass(frozen=True, slots=True)
class StandingPlace:
    """A standing job, and where it runs."""

    key: str
    slot: int
    owner: str | None
    running_by: str | None
    wanted: bool
    started_at: datetime | None
    failures: int
    retry_at: datetime | None
    messages: int
    created_at: datetime
    updated_at: datetime
    data: Any
    state: Any
    error: Any
    entered_at: datetime | None
    crashes: int
    quarantined_at: datetime | None


Page: TypeAlias = "tuple[list[StandingPlace], Call[Page] | None]"
_TIMES = (
    "created_at",
    "updated_at",
    "started_at",
    "retry_at",
    "joined_at",
    "seen_at",
    "failed_at",
    "entered_at",
    "quarantined_at",
)


def pools() -> Call[list[PoolState]]:
    """All pools."""
    return Call("GET", "/v1/pools", lambda response: [PoolState(**_timed(one)) for one in json_of(response)])


def create_pool(name: str, options: Mapping[str, Any]) -> Call[PoolState]:
    """Create a pool. Not repeated: the second time it would be there."""
    return Call("POST", "/v1/pools", _pool, {"name": name, **_outside(options)}, repeatable=False)


def scale_advice(wait_s: float) -> Call[list[ScaleAdvice]]:
    """How many workers each type needs."""
    params = {"wait_s": str(wait_s)}
    return Call("GET", "/v1/scale", lambda response: [ScaleAdvice(**one) for one in json_of(response)], params=params)


def details(pool: str) -> Call[PoolState]:
    """One pool."""
    return Call("GET", _path(pool), _pool)


def change(pool: str, options: Mapping[str, Any]) -> Call[PoolState]:
    """Change limits, or give it more slots."""
    return Call("PATCH", _path(pool), _pool, _outside(options))


def enqueue(
    pool: str, key: str, data: Any, id: UUID | str | None, run_after: datetime | timedelta | None,
    expires_at: datetime | timedelta | None, unique: str | None,
) -> Call[Enqueued]:  # fmt: skip
    """Enqueue. The id is made here, so that it can be repeated."""
    new_id = make_id() if id is None else parse_id(id)
    optional = {"run_after": at(run_after), "expires_at": at(expires_at), "unique": unique}
    body = {"key": key, "data": _json({} if data is None else data, "the job"), "id": f"job_{new_id}"}
    return new_receipt("POST", _path(pool, "jobs"), new_id, body | {k: v for k, v in optional.items() if v is not None})


def workers(pool: str) -> Call[list[PoolMember]]:
    """The workers and their slots."""
    return Call("GET", _path(pool, "workers"), lambda response: [PoolMember(**_timed(one)) for one in json_of(response)])


def drain(pool: str, worker: str, way: str) -> Call[PoolMember]:
    """Drain a worker, or undrain it."""
    return Call("POST", _path(pool, "workers", quoted(worker), way), lambda response: PoolMember(**_timed(json_of(response))))


def _key_place_of(response: httpx.Response) -> KeyPlace:
    place = json_of(response)
    next_job = place.get("next_job")
    return KeyPlace(**{**place, "next_job": next_job and parse_id(next_job), "why": why_of(place.get("why"))})


def key_place(pool: str, key: str) -> Call[KeyPlace]:
    """Where a key is."""
    return Call("GET", _path(pool, "keys", _key(key)), _key_place_of)


def quarantined(pool: str, after: str | None, limit: int) -> Call[list[QuarantinedKey]]:
    """Keys for which the pool's rule fails."""
    params = {"limit": str(limit)} | ({} if after is None else {"after": after})
    return Call(
        "GET",
        _path(pool, "quarantined"),
        lambda response: [QuarantinedKey(**_timed(one)) for one in json_of(response)],
        params=params,
    )


def release(pool: str, key: str) -> Call[KeyPlace]:
    """Have the rule asked again about a key."""
    return Call("POST", _path(pool, "quarantined", _key(key)), _key_place_of)


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


def _pool(response: httpx.Response) -> PoolState:
    return PoolState(**_timed(json_of(response)))


def _page(response: httpx.Response) -> Page:
    found = [StandingPlace(**_timed(one)) for one in json_of(response)]
    following = response.links.get("next", {}).get("url")
    if following is None:
        return found, None
    parts = urlsplit(following)
    return found, Call("GET", parts.path, _page, params=dict(parse_qsl(parts.query)))


def _timed(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: time_of(value) if name in _TIMES else value for name, value in fields.items()}


def _path(pool: str, *parts: str) -> str:
    return "/".join(("/v1/pools", quoted(pool), *parts))


def _key(key: str) -> str:
    if not key:
        raise InvalidInput("a key is empty", hint="A key has 1 to 255 characters.")
    return quote(key, safe="")


def _json(value: Any, what: str) -> Any:
    return orjson.Fragment(dump_json(value, what))


def _outside(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.total_seconds() if isinstance(value, timedelta) else value
        for name, value in ((f"{n}_s" if n == "key_rate_period" else n, v) for n, v in options.items())
    }
