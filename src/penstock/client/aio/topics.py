"""Topics on a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx

from penstock.client import topic_calls
from penstock.client.aio.sse import follow
from penstock.client.aio.websocket import work
from penstock.client.call import AsyncSend
from penstock.client.deliveries import Delivery
from penstock.client.following import Following
from penstock.core.iteration import lasting
from penstock.core.serialization import dump_json
from penstock.errors import NotFound
from penstock.topics.models import Message, NewMessage, Published, Subscribed, Subscriber, TopicRecord


class AsyncTopic:
    """A topic on the server. Made by `AsyncClient.topic`."""

    def __init__(
        self,
        send: AsyncSend,
        http: httpx.AsyncClient,
        name: str,
        retry_for_s: float,
        catch_up: int | None = None,
        encrypted: bool | None = None,
    ) -> None:
        self.name = name
        self._catch_up = catch_up
        self._encrypted = encrypted
        self._send = send
        self._http = http
        self._retry_for_s = retry_for_s

    async def declare(self, *, catch_up: int | None = None, encrypted: bool | None = None) -> None:
        """Make the topic, or change how many earlier messages new subscribers get, or whether it is encrypted."""
        catch_up = self._catch_up if catch_up is None else catch_up
        await self._send(topic_calls.declare(self.name, catch_up, self._encrypted if encrypted is None else encrypted))

    async def publish(
        self, data: Any = None, *, id: UUID | str | None = None, key: str | None = None, unique: str | None = None,
        run_after: datetime | timedelta | None = None, expires_at: datetime | timedelta | None = None, background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
    ) -> Published:  # fmt: skip
        """Publish a message. See `penstock.Topic.publish`."""
        seconds = timeout.total_seconds()
        return await self._send(topic_calls.publish(self.name, data, id, unique, run_after, expires_at, background, seconds, key))

    async def publish_many(self, messages: Iterable[NewMessage[Any] | Any]) -> int:
        """Publish messages, payloads or `NewMessage`, in their order. Returns how many there are.

        Raises:
            InvalidInput: One is refused, and the error says which; all others are published.
        """
        return await self._send(topic_calls.publish_many(self.name, messages))

    async def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[Any]]:
        """Messages after a number, without a subscription. Raises `Conflict` when some of them are gone."""
        return await self._send(topic_calls.read(self.name, since, limit))

    async def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed:
        """Subscribe a client: each message is a job in its queue. See `penstock.Topic.subscribe`."""
        return await self._send(topic_calls.subscribe(self.name, client_id, ttl, filter, since))

    async def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. False: it has ended."""
        return await self._send(topic_calls.renew(self.name, client_id))

    async def unsubscribe(self, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. Returns whether there was one."""
        try:
            await self._send(topic_calls.unsubscribe(self.name, client_id, drop))
        except NotFound:
            return False
        return True

    async def details(self) -> TopicRecord:
        """The topic as it is stored, and the number of its subscribers. Raises `NotFound`."""
        return await self._send(topic_calls.details(self.name))

    async def subscribers(self) -> list[Subscriber]:
        """Who is subscribed now, oldest first."""
        return await self._send(topic_calls.subscribers(self.name))

    @lasting
    async def receive(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None,
    ) -> AsyncGenerator[Message[Any], None]:  # fmt: skip
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
            topic_calls.path_of(self.name, "deliveries"), _params(client_id, stay, ttl, filter), self._retry_for_s
        )
        following.last = None if since is None else str(since)
        async for message in follow(self._http, following):
            yield topic_calls.message_of(message)

    @lasting
    async def work(
        self, client_id: str | None = None, *, stay: bool = False, ttl: timedelta | None = None, filter: Any = None,
        since: int | None = None, window: int = 100,
    ) -> AsyncGenerator[Delivery[Awaitable[None]], None]:  # fmt: skip
        """Messages on a WebSocket, each to be acknowledged: `ack` or `fail`. Ends when the server ends the connection.

        What is not acknowledged then comes to the next connection of a client that stays. `window`: most of them at once.

        Raises:
            DatabaseUnavailable: The connection broke; begin again.
        """
        params = _params(client_id, stay, ttl, filter) | {"window": window} | ({} if since is None else {"since": since})
        async for delivery in work(self._http, topic_calls.path_of(self.name, "deliveries"), params):
            yield delivery


def _params(client_id: str | None, stay: bool, ttl: timedelta | None, filter: Any) -> dict[str, Any]:
    given = {
        "client_id": client_id,
        "stay": "true" if stay else None,
        "ttl_s": None if ttl is None else ttl.total_seconds(),
        "filter": None if filter is None else dump_json(filter, "a filter"),
    }
    return {name: value for name, value in given.items() if value is not None}
