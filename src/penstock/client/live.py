"""Following by Server-Sent Events: what comes, for as long as somebody iterates, over connections that break and come back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from httpx_sse import EventSource, ServerSentEvent

from penstock.client.answers import error_of, unavailable
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, OffsetGone, PenstockError


@dataclass(slots=True)
class Following:
    """Where a follower is. `params` are sent with each connection; `last` is the id of the last event, once there was one."""

    path: str
    params: Mapping[str, Any]
    patience_s: float
    last: str | None = None
    since: float = field(default_factory=time.monotonic)
    tries: int = 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next connection."""
        return {"Accept": "text/event-stream"} | ({} if self.last is None else {"Last-Event-ID": self.last})

    def took(self, event: ServerSentEvent) -> dict[str, Any] | None:
        """The payload of an event; None for one that carries none. Raises the error that ends the following."""
        self.since, self.tries = time.monotonic(), 0
        if event.event in ("gone", "failed"):
            said = orjson.loads(event.data)
            kinds: dict[str, type[PenstockError]] = {"offset_gone": OffsetGone, "conflict": Conflict, "not_found": NotFound}
            raise kinds.get(said.get("id"), PenstockError)(said["title"], hint=said.get("detail"))
        if not event.data or event.event != "message":
            return None
        self.last = event.id or self.last
        found: dict[str, Any] = orjson.loads(event.data)
        return found

    def broke(self, error: Exception) -> float:
        """How long to wait before the next try. Raises `DatabaseUnavailable` when that went on for too long."""
        if time.monotonic() - self.since > self.patience_s:
            raise unavailable(error) from error
        self.tries += 1
        return min(0.1 * 2.0**self.tries, 2.0) * random.uniform(0.5, 1.0)


def follow(http: httpx.Client, following: Following) -> Iterator[dict[str, Any]]:
    """Payloads as they come, for ever. Raises `OffsetGone`, `Conflict`, `NotFound` when what comes next is gone."""
    while True:
        try:
            with http.stream("GET", following.path, params=following.params, headers=following.headers) as response:
                if response.status_code >= 400:
                    response.read()
                    raise error_of(response)
                for event in EventSource(response).iter_sse():
                    if (found := following.took(event)) is not None:
                        yield found
        except (httpx.TransportError, DatabaseUnavailable) as error:
            time.sleep(following.broke(error))


async def follow_async(http: httpx.AsyncClient, following: Following) -> AsyncIterator[dict[str, Any]]:
    """See `follow`."""
    while True:
        try:
            async with http.stream("GET", following.path, params=following.params, headers=following.headers) as response:
                if response.status_code >= 400:
                    await response.aread()
                    raise error_of(response)
                async for event in EventSource(response).aiter_sse():
                    if (found := following.took(event)) is not None:
                        yield found
        except (httpx.TransportError, DatabaseUnavailable) as error:
            await asyncio.sleep(following.broke(error))
