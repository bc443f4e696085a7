"""The blocking half of penstock.topics.topic.

Generated: change what this is generated from, and run `make format` (scripts/generate_sync).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime
    from typing import Any
    from uuid import UUID

    from penstock.core.blocking import BackgroundLoop
    from penstock.topics.models import Message, NewMessage, Published, Subscribed, Subscriber, TopicRecord
T = TypeVar("T")


class SyncTopic(Generic[T]):
    """The blocking half of `Topic`, for threads without an event loop: `Topic.sync`."""

    def __init__(self, of: Any, loop: BackgroundLoop) -> None:
        self._of = of
        self._loop = loop

    def declare(self) -> None:
        """Create the topic in the database. The other calls do so implicitly."""
        self._loop.run(self._of.declare())

    def publish(
        self,
        data: T | None = None,
        *,
        id: UUID | str | None = None,
        key: str | None = None,
        unique: str | None = None,
        run_after: datetime | timedelta | None = None,
        expires_at: datetime | timedelta | None = None,
        background: bool = True,
        timeout: timedelta = timedelta(seconds=30),
        connection: Any = None,
    ) -> Published:
        """Publish a message atomically to all current subscribers.

        Args:
            data: Payload; None: an empty object, unless the type of the payload has None.
            id: Identity of the message; a repeated publish of the same id is the same message. None: a new UUIDv7.
            key: Key of the copies; None: that of the declared rule, or none.
            unique: Coalescing key: a subscriber in whose queue a copy with this key waits gets no other copy.
            run_after: Earliest start of the copies: a time, or a timedelta from now by the database's clock.
            expires_at: Time after which a copy that waits, also for a retry, is archived as expired.
            background: Whether to return at once. False: wait until every receiver has settled its copy, and return their
                outcomes.
            timeout: Longest wait, after which the outcomes so far are returned (`Published.complete` is false).
            connection: Connection through which to publish, in its transaction; see `Penstock.enqueue`. The topic is locked until
                that transaction ends, so publish last.

        Returns:
            The receipt.

        Raises:
            InvalidInput: An argument is not valid; nothing was published.
            DatabaseUnavailable: It is not known whether the message was published: retry with the same id.
        """
        return self._loop.run(
            self._of.publish(
                data,
                id=id,
                key=key,
                unique=unique,
                run_after=run_after,
                expires_at=expires_at,
                background=background,
                timeout=timeout,
                connection=connection,
            ),
            wait=timeout,
            connection=connection,
        )

    def publish_many(
        self, messages: Iterable[NewMessage[T] | T], *, ids: Iterable[UUID | str] | None = None, connection: Any = None
    ) -> list[Published]:
        """Publish many messages in their order, in atomic batches of 1,000.

        Args:
            messages: Payloads, or `NewMessage`s for messages with more than a payload. Messages with unique keys are written one
                by one.
            ids: Identity of each message, so that the call can be repeated; None: those of the `NewMessage`s, or new ones.
            connection: Connection through which to publish, in its transaction; see `publish`.

        Returns:
            A receipt for each message, in order.

        Raises:
            InvalidInput: A message or an argument is not valid; the batches before it are published.
        """
        return self._loop.run(self._of.publish_many(messages, ids=ids, connection=connection), connection=connection)

    def outcomes(self, receipt: Published, *, timeout: timedelta = timedelta(0)) -> Published:
        """Wait for all receivers, at most for `timeout`. Returns the receipt with the outcomes.

        Args:
            receipt: Receipt of the publish.
            timeout: How long to wait.
        """
        return self._loop.run(self._of.outcomes(receipt, timeout=timeout), wait=timeout)

    def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed:
        """Subscribe a client: each later message becomes a job in the queue `<topic>_<client id>`. The call is idempotent.

        Args:
            client_id: Name of the subscriber within the topic.
            filter: JSON that a message must contain to reach the subscriber.
            ttl: Time after which the subscription and its queue end unless it is renewed; None: it does not end.
            since: Sequence number after which the messages begin; None: the last ones, as many as `catch_up` of the topic says.

        Raises:
            Conflict: The name of the queue is in use, or messages after `since` were pruned.
        """
        return self._loop.run(self._of.subscribe(client_id, filter=filter, ttl=ttl, since=since))

    def unsubscribe(self, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. Returns whether there was one.

        Args:
            client_id: Name of the subscriber.
            drop: Whether to archive the queued copies as expired; otherwise workers can still run them.
        """
        return self._loop.run(self._of.unsubscribe(client_id, drop=drop))

    def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. Returns False when it has ended, so that messages may have been missed.

        Args:
            client_id: Client id of the subscriber.
        """
        return self._loop.run(self._of.renew(client_id))

    def details(self) -> TopicRecord:
        """The topic as it is stored, and the number of its subscribers. Raises `NotFound`."""
        return self._loop.run(self._of.details())

    def subscribers(self) -> list[Subscriber]:
        """The current subscribers, oldest first. The list is read again only when it has changed."""
        return self._loop.run(self._of.subscribers())

    def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[T]]:
        """The messages after a sequence number, without a subscription.

        Args:
            since: Number of the last message seen; None: read from the oldest stored one.
            limit: Maximum number of messages.

        Raises:
            Conflict: Messages after `since` were pruned.
        """
        return self._loop.run(self._of.read(since, limit=limit))

    def sequence_of(self, job_id: UUID | str) -> int | None:
        """The sequence number of the message of which a job is a copy; None for other jobs.

        Args:
            job_id: Id of the job.
        """
        return self._loop.run(self._of.sequence_of(job_id))
