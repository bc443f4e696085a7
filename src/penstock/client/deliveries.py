"""What a topic's WebSocket carries: messages to be acknowledged, and how a connection begins and ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
import orjson
from websockets.exceptions import ConnectionClosed, InvalidStatus

from penstock.client.answers import error_of, unavailable
from penstock.client.topic_calls import message_of
from penstock.core.serialization import dump_json, load_json
from penstock.errors import Conflict
from penstock.topics.models import Message

R = TypeVar("R", None, Awaitable[None])


@dataclass(frozen=True, slots=True)
class Delivery(Generic[R]):
    """A message to be acknowledged. With the asynchronous client `ack` and `fail` are awaited.

    Attributes:
        message: What was published.
        attempt: Which delivery of it this is, from 1.
    """

    message: Message[Any]
    attempt: int
    _send: Callable[[str], R]

    def ack(self, result: Any = None) -> R:
        """It is done; a publisher that waits gets the result."""
        told = orjson.Fragment(dump_json(result, "the result"))
        return self._send(orjson.dumps({"type": "ack", "id": str(self.message.id), "result": told}).decode())

    def fail(self, error: str, *, retry: bool = True) -> R:
        """It failed: it comes again after a while, unless `retry` is false or no attempts are left."""
        return self._send(orjson.dumps({"type": "fail", "id": str(self.message.id), "error": error, "retry": retry}).decode())


def handshake(request: httpx.Request, auth: httpx.Auth | None) -> tuple[str, dict[str, str]]:
    """The URL and the headers with which a connection begins."""
    if auth is not None:
        request = next(auth.sync_auth_flow(request))
    url = request.url.copy_with(scheme="wss" if request.url.scheme == "https" else "ws")
    return str(url), {name: request.headers[name] for name in ("authorization",) if name in request.headers}


def delivery_of(frame: str | bytes, send: Callable[[str], R]) -> Delivery[R] | None:
    """What a frame delivers, if anything. Raises `Conflict` when what comes next is gone."""
    told = load_json(frame if isinstance(frame, str) else frame.decode())
    if told["type"] == "gone":
        raise Conflict(told["title"], hint=told.get("detail"))
    return Delivery(message_of(told), told["attempt"], send) if told["type"] == "message" else None


def raise_end(error: Exception) -> None:
    """Raise the error of a connection that did not end in an orderly way."""
    if isinstance(error, InvalidStatus):
        raise error_of(httpx.Response(error.response.status_code, content=bytes(error.response.body or b""))) from None
    if not isinstance(error, ConnectionClosed) or error.rcvd is None or error.rcvd.code not in (1000, 1001, 1012):
        raise unavailable(error) from error
