"""Topics: what is published reaches every subscriber, as a job of its own.

    delays = app.topic("delays", payload=Delay)

    @delays.subscriber("JFK", filter={"dest": "JFK"})
    async def at_jfk(job: Job[Delay]) -> None: ...

    await delays.publish(Delay("JFK", 12))

A copy is an ordinary job in the queue `<topic>_<client id>`, so everything that holds for jobs holds for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from penstock.batches import aware
from penstock.callers import publish_through
from penstock.checks import check_span
from penstock.errors import Conflict, InvalidInput, PenstockError
from penstock.handler import Job
from penstock.job import make_id, parse_id
from penstock.logs import get_logger
from penstock.message import Message, NewMessage, Published, Subscribed, Subscriber
from penstock.payload import Codec, dump_json
from penstock.postgres import topics
from penstock.postgres.database import Database, unless_refused

if TYPE_CHECKING:
    from penstock.app import Penstock
    from penstock.declaring import JobType

log = get_logger("penstock.topics")
T = TypeVar("T")
_RENEWALS_IN_A_TTL = 4
BATCH = 1_000


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a handler is subscribed to, and how."""

    topic: Topic[Any]
    client_id: str
    ttl: timedelta | None
    filter: Any

    async def begin(self, database: Database, options: dict[str, Any], since: int | None = None) -> None:
        """Subscribe, which also makes the job type; with the messages after `since`, or the last ones that the topic keeps."""
        await self.topic.declare()
        await topics.subscribe_many(
            database,
            self.topic.name,
            [self.client_id],
            ttl=self.ttl,
            filter=_filter(self.filter),
            since=since,
            options=options,
        )

    async def begin_again(self, database: Database, options: dict[str, Any], since: int | None) -> None:
        """Subscribe after the subscription ended under a worker that lives, such as after a long outage: go on where it was."""
        try:
            await self.begin(database, options, since)
        except (Conflict, InvalidInput) as error:
            # Pruned meanwhile, or too many for one call.
            log.error("messages_missed", topic=self.topic.name, client_id=self.client_id, since=since, error=error)
            await self.begin(database, options)


class Topic(Generic[T]):
    """A declared topic. Made by `Penstock.topic`."""

    def __init__(self, app: Penstock, name: str, payload: Any, keep: int | None) -> None:
        self.app = app
        self.name = name
        self.codec: Codec[T] = Codec(payload, name)
        self._options = {} if keep is None else {"keep": keep}
        self._known: tuple[int, list[Subscriber]] | None = None

    async def declare(self) -> None:
        """Create the topic in the database. The other calls do it by themselves."""
        database = await self.app.database()
        if ("topic", self.name) not in database.declared:
            await topics.declare_topic(database, self.name, self._options)
            database.declared["topic", self.name] = True

    async def _ready(self) -> None:
        """Declare the topic if the role may. One that may not relies on others to have done it."""
        if not await unless_refused(self.declare()):
            (await self.app.database()).declared["topic", self.name] = False

    # -- publishing

    async def publish(
        self,
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
        """Publish a message to all subscribers of this moment, or to none.

        Args:
            data: The payload; None: an empty object.
            id: Identity; publishing the same id again is the same message. None: a new UUIDv7.
            unique: A subscriber in whose queue a copy with this key waits gets no other one.
            run_after: No copy is to be started before: a time, or a span from now by the database's clock.
            expires_at: A copy that was not started by then is archived as expired.
            background: False: wait until every receiver has settled its copy, and return their outcomes.
            timeout: How long to wait; at the limit the outcomes so far are returned (`Published.complete` is false).
            connection: Publish through this connection, in its transaction; see `Penstock.enqueue`. The topic is held until
                that transaction ends, so publish last.

        Returns:
            The receipt.

        Raises:
            InvalidInput: Something about the call is wrong; nothing was published.
            DatabaseUnavailable: Not known whether it was published: retry with the same id.
        """
        check_span("timeout", timeout, zero=True)
        document = self.document(data, id, unique, run_after, expires_at)
        if connection is not None:
            if not background:
                raise InvalidInput(
                    "nobody can receive a message before the caller's transaction commits",
                    hint="Publish with background=False without connection, or look at the outcomes later.",
                )
            if self.app.is_open:
                await self._ready()
            return (await publish_through(connection, self.name, [document]))[0]
        await self._ready()
        database = await self.app.database()
        receipt = await topics.publish(database, self.name, document)
        return receipt if background else await self.outcomes(receipt, timeout=timeout)

    async def publish_many(
        self,
        messages: Iterable[NewMessage[T] | T],
        *,
        ids: Iterable[UUID | str] | None = None,
        connection: Any = None,
    ) -> list[Published]:
        """Publish many messages in their order, in batches of 1,000, each all or none.

        Args:
            messages: Payloads, or `NewMessage` for what else a message can have. Those with unique keys are written one by one.
            ids: An identity for each, so that the call can be repeated; None: those of the `NewMessage`s, or new ones.
            connection: Publish through this connection, in its transaction; see `publish`.

        Returns:
            A receipt for each, in order.

        Raises:
            InvalidInput: Something about the call is wrong; the batches before are published.
        """
        documents = self.documents(messages, ids)
        receipts: list[Published] = []
        if connection is None or self.app.is_open:
            await self._ready()
        for start in range(0, len(documents), BATCH):
            batch = documents[start : start + BATCH]
            if connection is None:
                receipts += await topics.publish_many(await self.app.database(), self.name, batch)
            else:
                receipts += await publish_through(connection, self.name, batch)
        return receipts

    async def outcomes(self, receipt: Published, *, timeout: timedelta = timedelta(0)) -> Published:
        """The receipt with the outcomes, after waiting for all receivers, at most for `timeout`."""
        database = await self.app.database()
        pause = 0.005
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while await topics.unfinished_copies(database, receipt.id):
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.3, 0.25)
        except TimeoutError:
            pass
        return replace(receipt, outcomes=await topics.outcomes(database, receipt.id))

    def document(
        self,
        data: T | None,
        id: UUID | str | None,
        unique: str | None,
        run_after: datetime | timedelta | None,
        expires_at: datetime | timedelta | None,
    ) -> str:
        """A message as it travels to the database."""
        payload = "{}" if data is None else self.codec.dump(data)
        return self._document(payload, id, unique, run_after, expires_at)

    def documents(self, messages: Iterable[NewMessage[T] | T], ids: Iterable[UUID | str] | None) -> list[str]:
        """Messages as they travel to the database."""
        new = [message if isinstance(message, NewMessage) else NewMessage(message) for message in messages]
        given = [message.id for message in new] if ids is None else list(ids)
        if len(given) != len(new):
            raise InvalidInput(f"{len(new)} messages have {len(given)} ids", hint="Give an id for each message, or none at all.")
        return [
            self._document(self.codec.dump(message.data), id, message.unique, message.run_after, message.expires_at)
            for message, id in zip(new, given, strict=True)
        ]

    def _document(
        self,
        payload: str,
        id: UUID | str | None,
        unique: str | None,
        run_after: datetime | timedelta | None,
        expires_at: datetime | timedelta | None,
    ) -> str:
        if unique is not None and not isinstance(unique, str):
            raise InvalidInput(f"unique must be text, not {unique!r:.100}")
        message_id = make_id() if id is None else parse_id(id)
        if unique is not None and "\x00" in unique:
            raise InvalidInput("the unique key contains the character U+0000", hint="Use 1 to 255 printable characters.")
        return topics.publish_document(payload, message_id, unique, aware(run_after), aware(expires_at))

    # -- subscribing

    def subscriber(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, keep_result: bool = True, **options: Any
    ) -> Callable[[Callable[[Job[T]], Any]], JobType[T]]:
        """Declare a handler for the copies of one client id. A worker of the app subscribes it when it starts.

        Workers that share a client id share its copies.

        Args:
            client_id: Names the subscriber within the topic.
            filter: Only messages that contain this JSON.
            ttl: The subscription ends with its queue when no worker of it lives for so long; None: it stays, and the queue
                grows while no worker lives. At least 1 s.
            keep_result: Whether to keep what the handler returns, for publishers that wait.
            options: As for `Penstock.job`: attempts, concurrency, visibility_timeout, ...

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        _filter(filter)
        _check_ttl(ttl)

        def declare(handler: Callable[[Job[T]], Any]) -> JobType[T]:
            declared = self.app.job(f"{self.name}_{client_id}", keep_result=keep_result, **options)(handler)
            declared.subscription = Subscription(self, client_id, ttl, filter)
            return declared

        return declare

    async def subscribe(
        self, client_id: str, *, filter: Any = None, ttl: timedelta | None = None, since: int | None = None
    ) -> Subscribed:
        """Subscribe a client: from now on each message is a job in the queue `<topic>_<client id>`. Idempotent.

        Args:
            client_id: Names the subscriber within the topic.
            filter: Only messages that contain this JSON.
            ttl: The subscription ends, with its queue, unless it is renewed in this time; None: it stays.
            since: Begin with the messages after this sequence number; None: with the last ones that the topic keeps.

        Raises:
            Conflict: The name of the queue is taken, or messages after `since` are gone.
        """
        _check_ttl(ttl)
        await self._ready()
        (receipt,) = await topics.subscribe_many(
            await self.app.database(), self.name, [client_id], ttl=ttl, filter=_filter(filter), since=since
        )
        return receipt

    async def unsubscribe(self, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. Returns whether there was one.

        Args:
            client_id: The subscriber.
            drop: Archive the copies that wait as expired; otherwise they can still be worked.
        """
        await self._ready()
        return await topics.unsubscribe(await self.app.database(), self.name, client_id, drop)

    async def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. False: it has ended, and messages may have been missed."""
        return bool(await topics.renew(await self.app.database(), [(self.name, client_id)]))

    async def subscribers(self) -> list[Subscriber]:
        """Who is subscribed now, oldest first. The list is read again only when it has changed."""
        known = self._known
        generation, found = await topics.list_subscribers(await self.app.database(), self.name, known and known[0])
        if found is None and known is not None:
            return known[1]
        self._known = (generation, found or [])
        return self._known[1]

    # -- reading

    async def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[T]]:
        """The messages after a sequence number, without a subscription.

        Args:
            since: The last one seen; None: from the oldest one kept.
            limit: At most so many.

        Raises:
            Conflict: Messages after `since` are gone.
        """
        await self._ready()
        return await topics.read(await self.app.database(), self.name, since, limit, self.codec)

    async def sequence_of(self, job_id: UUID | str) -> int | None:
        """The sequence number of the message of which a job is a copy; None when it is none."""
        found = await topics.message_of(await self.app.database(), parse_id(job_id))
        return None if found is None else int(found["seq"])


async def keep_subscribed(database: Database, subscriptions: list[tuple[Subscription, dict[str, Any]]]) -> None:
    """Renew subscriptions with a time to live until cancelled. One that ended nevertheless begins again where it was.

    Args:
        database: Where.
        subscriptions: Each with the options of its job type.
    """
    living = {(s.topic.name, s.client_id): (s, options) for s, options in subscriptions if s.ttl is not None}
    shortest = min((s.ttl for s, _ in living.values() if s.ttl is not None), default=timedelta(days=1))
    # Up to which message each is known to have been subscribed.
    known: dict[tuple[str, str], int] = {}
    while True:
        try:
            renewed = await topics.renew(database, list(living)) if living else {}
            for missing in living.keys() - renewed.keys():
                log.warning("subscription_lapsed", topic=missing[0], client_id=missing[1], since=known.get(missing))
                subscription, options = living[missing]
                await subscription.begin_again(database, options, known.get(missing))
            known.update(renewed)
        except PenstockError as error:
            log.warning("renewal_failed", error=error)
        await asyncio.sleep(shortest.total_seconds() / _RENEWALS_IN_A_TTL)


def _filter(filter: Any) -> str | None:
    return None if filter is None else dump_json(filter, "a filter")


def _check_ttl(ttl: Any) -> None:
    if ttl is not None:
        check_span("ttl", ttl)
        if not timedelta(seconds=1) <= ttl <= timedelta(days=30):
            raise InvalidInput(f"ttl must be from 1 second to 30 days, not {ttl}", hint="None: the subscription stays.")
