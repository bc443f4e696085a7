"""Live connections of tests: Server-Sent Events, and WebSockets with the tests' token."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent
from websockets.sync.client import ClientConnection, connect

from tests.http.http_server import TOKEN, Served

AUTHORIZATION = {"Authorization": f"Bearer admin.{TOKEN}"}


class Events:
    """Events of a connection, one after another."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        # A frame that only says how soon to come back is no event.
        self._events: Iterator[ServerSentEvent] = (event for event in EventSource(response).iter_sse() if event.data)

    def next(self) -> ServerSentEvent:
        return next(self._events)

    def take(self, count: int) -> list[ServerSentEvent]:
        return [self.next() for _ in range(count)]

    def data(self, count: int) -> list[Any]:
        """The payloads of the next events."""
        return [event.json()["data"] for event in self.take(count)]

    def rest(self) -> list[ServerSentEvent]:
        """What comes until the server ends the connection."""
        return list(self._events)


@contextmanager
def follow(client: httpx.Client, path: str, last: str | None = None, **params: Any) -> Iterator[Events]:
    """Follow by Server-Sent Events; the end cuts the connection."""
    headers = {} if last is None else {"Last-Event-ID": last}
    with client.stream("GET", path, params=params, headers=headers) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        yield Events(response)


@contextmanager
def socket(served: Served, path: str, **options: Any) -> Iterator[ClientConnection]:
    """A WebSocket; the end closes it."""
    url = served.base_url.replace("http", "ws", 1) + path
    with connect(url, **({"additional_headers": AUTHORIZATION} | options)) as connection:
        yield connection


def frame(connection: ClientConnection) -> dict[str, Any]:
    """The next frame."""
    found: dict[str, Any] = json.loads(connection.recv(timeout=30))
    return found


def subprotocol(token: str) -> str:
    return "penstock.bearer." + base64.urlsafe_b64encode(token.encode()).decode().rstrip("=")
