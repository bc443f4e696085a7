"""Topics, for threads without an event loop."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

from penstock.callers import publish_through_blocking
from penstock.errors import InvalidInput
from penstock.message import Message, NewMessage, Published, Subscribed, Subscriber
from penstock.sync.loop import OnLoop
from penstock.topics import BATCH, Topic

T = TypeVar("T")


class SyncTopics(OnLoop):
    """Publish, subscribe, read. A topic is given as it was declared, or by its name."""

    def publish(
        self,
        topic: Topic[T] | str,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        unique: str | None = None,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
        connection: Any = None,
    ) -> Published:
        """Publish a message. See `penstock.topics.Topic.publish`."""
        declared = self._topic(topic)
        if connection is not None and background:
            document = declared.document(data, id, unique, run_after, expires_at)
            return publish_through_blocking(connection, declared.name, [document])[0]
        if connection is not None:
            raise InvalidInput("nobody can receive a message before the caller's transaction commits")
        publishing = declared.publish(
            data, id=id, unique=unique, run_after=run_after, expires_at=expires_at, background=background, timeout=timeout
        )
        return self._call(publishing, timeout + self._timeout)

    def publish_many(
        self,
        topic: Topic[T] | str,
        messages: Iterable[NewMessage[T] | T],
        *,
        ids: Iterable[UUID | str] | None = None,
        connection: Any = None,
    ) -> list[Published]:
        """Publish many messages in their order. See `penstock.topics.Topic.publish_many`."""
        declared = self._topic(topic)
        if connection is None:
            return self._call(declared.publish_many(messages, ids=ids))
        documents = declared.documents(messages, ids)
        return [
            receipt
            for start in range(0, len(documents), BATCH)
            for receipt in publish_through_blocking(connection, declared.name, documents[start : start + BATCH])
        ]

    def outcomes(self, topic: Topic[Any] | str, receipt: Published, *, timeout: timedelta = timedelta(0)) -> Published:
        """The receipt with the outcomes, after waiting for all receivers. See `penstock.topics.Topic.outcomes`."""
        return self._call(self._topic(topic).outcomes(receipt, timeout=timeout), timeout + self._timeout)

    def subscribe(
        self,
        topic: Topic[Any] | str,
        client_id: str,
        *,
        filter: Any = None,
        ttl: timedelta | None = None,
        since: int | None = None,
    ) -> Subscribed:
        """Subscribe a client to a topic. See `penstock.topics.Topic.subscribe`."""
        return self._call(self._topic(topic).subscribe(client_id, filter=filter, ttl=ttl, since=since))

    def unsubscribe(self, topic: Topic[Any] | str, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. See `penstock.topics.Topic.unsubscribe`."""
        return self._call(self._topic(topic).unsubscribe(client_id, drop=drop))

    def renew(self, topic: Topic[Any] | str, client_id: str) -> bool:
        """Renew a subscription with a time to live. See `penstock.topics.Topic.renew`."""
        return self._call(self._topic(topic).renew(client_id))

    def subscribers(self, topic: Topic[Any] | str) -> list[Subscriber]:
        """Who is subscribed now, oldest first. See `penstock.topics.Topic.subscribers`."""
        return self._call(self._topic(topic).subscribers())

    def read(self, topic: Topic[T] | str, since: int | None = None, *, limit: int = 100) -> list[Message[T]]:
        """Messages of a topic after a sequence number. See `penstock.topics.Topic.read`."""
        return self._call(self._topic(topic).read(since, limit=limit))

    def _topic(self, topic: Topic[Any] | str) -> Topic[Any]:
        return self._app.topic(topic) if isinstance(topic, str) else topic
