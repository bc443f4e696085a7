"""Where a follower of a stream or topic is, and how it goes on after its connection broke."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from httpx_sse import ServerSentEvent

from penstock.client.answers import unavailable
from penstock.core.serialization import load_json
from penstock.errors import Conflict, NotFound, OffsetGone, PenstockError


@dataclass(slots=True)
class Following:
    """Where a follower is. `params` are sent with each connection; `last` is the id of the last event, once there was one."""

    path: str
    params: Mapping[str, Any]
    retry_for_s: float
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
        found: dict[str, Any] = load_json(event.data)
        return found

    def broke(self, error: Exception) -> float:
        """How long to wait before the next try. Raises `DatabaseUnavailable` when that went on for too long."""
        if time.monotonic() - self.since > self.retry_for_s:
            raise unavailable(error) from error
        self.tries += 1
        return min(0.1 * 2.0**self.tries, 2.0) * random.uniform(0.5, 1.0)
