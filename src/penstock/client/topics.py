"""Topics on a server, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx

from penstock.client import topic_calls
from penstock.client.calls import AsyncSend, Send
from penstock.client.live import Following, follow, follow_async
from penstock.client.sockets import Delivery, work, work_async
from penstock.message import Message, NewMessage, Published, Subscribed, Subscriber
from penstock.payload import dump_json


class AsyncTopic:
    """A topic on the server. Made by `AsyncClient.topic`."""

    def __init__(self, send: AsyncSend, http: httpx.AsyncClient, name: str, patience_s: float, keep: int | None = None) -> None:
        self.name = name
        self._keep = keep
        self._send = send
        self._http = http
        self._patience_s = patience_s

    async def declare(self, *, keep: int | None = None) -> None:
        """Make the topic, or change how many messages it keeps for new subscribers."""
        await self._send(topic_calls.declare(self.name, self._keep if keep is None else keep))

    async def publish(
        self, data: Any = None, *, id: UUID | str | None = None, unique: str | None = None,
        run_after: datetime | timedelta | None = None, expires_at: datetime | timedelta | None = None, background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
    ) -> Published:  # fmt: skip
        """Publish a message. See `penstock.Topic.publish`."""
        seconds = timeout.total_seconds()
        return await self._send(topic_calls.publish(self.name, data, id, unique, run_after, expires_at, background, seconds))

    async def publish_many(self, messages: Iterable[NewMessage[Any] | Any]) -> int:
        """Publish messages, payloads or `NewMessage`, in their order. Returns how many there are.

        Raises:
            InvalidInput: One is bad, and says which; those before it are published.
        """
        return await self._send(topic_calls.publish_many(self.name, messages))

    async def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[Any]]:
        """Messages after a number, whoever subscribes. Raises `Conflict` when some of them are gone."""
        return await self._send(topic_calls.read(self.name, since, limit))

    async def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed:
        """Subscribe a client: each message is a job in its queue. See `penstock.Topic.subscribe`."""
        return await self._send(topic_calls.subscribe(self.name, client_id, ttl, filter, since))

    async def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. False: it has ended."""
        return await self._send(topic_calls.renew(self.name, client_id))

    async def unsubscribe(self, client_id: str, *, drop: bool = False) -> None:
        """End a subscription. Raises `NotFound` when there is none."""
        await self._send(topic_calls.unsubscribe(self.name, client_id, drop))

    async def subscribers(self) -> list[Subscriber]:
        """Who is subscribed now, oldest first."""
        return await self._send(topic_calls.subscribers(self.name))

    async def receive(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None,
    ) -> AsyncIterator[Message[Any]]:  # fmt: skip
        """Messages as they come, for ever, each once; goes on where it was when the connection breaks.

        Args:
            client_id: As whom; None: a new name for each connection.
            stay: Whether the subscription is there when the iteration has ended. Needs a client id.
            ttl: How long a subscription that stays outlives its connection.
            filter: Only messages that contain this JSON.
            since: Begin after the message with this number.

        Raises:
            Conflict: What comes next is gone.
        """
        following = Following(
            topic_calls.path_of(self.name, "deliveries"), _params(client_id, stay, ttl, filter), self._patience_s
        )
        following.last = None if since is None else str(since)
        async for message in follow_async(self._http, following):
            yield topic_calls.message_of(message)

    async def work(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None, window: int = 100,
    ) -> AsyncIterator[Delivery[Awaitable[None]]]:  # fmt: skip
        """Messages on a WebSocket, each to be acknowledged: `ack` or `fail`. Ends when the server ends the connection.

        What is not acknowledged then comes to the next connection of a client that stays. `window`: most of them at once.

        Raises:
            DatabaseUnavailable: The connection broke; begin again.
        """
        params = _params(client_id, stay, ttl, filter) | {"window": window} | ({} if since is None else {"since": since})
        async for delivery in work_async(self._http, topic_calls.path_of(self.name, "deliveries"), params):
            yield delivery


class Topic:
    """A topic on the server. Made by `Client.topic`."""

    def __init__(self, send: Send, http: httpx.Client, name: str, patience_s: float) -> None:
        self.name = name
        self._send = send
        self._http = http
        self._patience_s = patience_s

    def declare(self, *, keep: int | None = None) -> None:
        """Make the topic, or change how many messages it keeps for new subscribers."""
        self._send(topic_calls.declare(self.name, keep))

    def publish(
        self, data: Any = None, *, id: UUID | str | None = None, unique: str | None = None,
        run_after: datetime | timedelta | None = None, expires_at: datetime | timedelta | None = None, background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
    ) -> Published:  # fmt: skip
        """Publish a message. See `penstock.Topic.publish`."""
        seconds = timeout.total_seconds()
        return self._send(topic_calls.publish(self.name, data, id, unique, run_after, expires_at, background, seconds))

    def publish_many(self, messages: Iterable[NewMessage[Any] | Any]) -> int:
        """Publish messages, payloads or `NewMessage`, in their order. Returns how many there are.

        Raises:
            InvalidInput: One is bad, and says which; those before it are published.
        """
        return self._send(topic_calls.publish_many(self.name, messages))

    def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[Any]]:
        """Messages after a number, whoever subscribes. Raises `Conflict` when some of them are gone."""
        return self._send(topic_calls.read(self.name, since, limit))

    def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed:
        """Subscribe a client: each message is a job in its queue. See `penstock.Topic.subscribe`."""
        return self._send(topic_calls.subscribe(self.name, client_id, ttl, filter, since))

    def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. False: it has ended."""
        return self._send(topic_calls.renew(self.name, client_id))

    def unsubscribe(self, client_id: str, *, drop: bool = False) -> None:
        """End a subscription. Raises `NotFound` when there is none."""
        self._send(topic_calls.unsubscribe(self.name, client_id, drop))

    def subscribers(self) -> list[Subscriber]:
        """Who is subscribed now, oldest first."""
        return self._send(topic_calls.subscribers(self.name))

    def receive(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None,
    ) -> Iterator[Message[Any]]:  # fmt: skip
        """Messages as they come, for ever, each once; goes on where it was when the connection breaks.

        Args:
            client_id: As whom; None: a new name for each connection.
            stay: Whether the subscription is there when the iteration has ended. Needs a client id.
            ttl: How long a subscription that stays outlives its connection.
            filter: Only messages that contain this JSON.
            since: Begin after the message with this number.

        Raises:
            Conflict: What comes next is gone.
        """
        following = Following(
            topic_calls.path_of(self.name, "deliveries"), _params(client_id, stay, ttl, filter), self._patience_s
        )
        following.last = None if since is None else str(since)
        for message in follow(self._http, following):
            yield topic_calls.message_of(message)

    def work(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None, window: int = 100,
    ) -> Iterator[Delivery[None]]:  # fmt: skip
        """Messages on a WebSocket, each to be acknowledged: `ack` or `fail`. Ends when the server ends the connection.

        What is not acknowledged then comes to the next connection of a client that stays. `window`: most of them at once.

        Raises:
            DatabaseUnavailable: The connection broke; begin again.
        """
        params = _params(client_id, stay, ttl, filter) | {"window": window} | ({} if since is None else {"since": since})
        yield from work(self._http, topic_calls.path_of(self.name, "deliveries"), params)


def _params(client_id: str | None, stay: bool, ttl: timedelta | None, filter: Any) -> dict[str, Any]:
    given = {
        "client_id": client_id,
        "stay": "true" if stay else None,
        "ttl_s": None if ttl is None else ttl.total_seconds(),
        "filter": None if filter is None else dump_json(filter, "a filter"),
    }
    return {name: value for name, value in given.items() if value is not None}
