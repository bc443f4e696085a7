"""Topics: each published message reaches every subscriber as a job of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar
from uuid import UUID

from typing_extensions import Unpack

from penstock.core.checks import check_flag, check_many, check_name, check_number, check_span, check_text
from penstock.core.encryption import SealedCodec, opened_entry, owned_by
from penstock.core.keys import KeyOf, check_key, key_by, key_of_field
from penstock.core.serialization import Codec
from penstock.core.tracing import sending
from penstock.errors import InvalidInput
from penstock.jobs.declarations import Decorator, JobOptions, batch_options_of, options_of
from penstock.jobs.enqueue import aware
from penstock.jobs.job_type import JobType
from penstock.jobs.models import Executor, make_id
from penstock.jobs.opening import open_value
from penstock.jobs.records import parse_id
from penstock.postgres.context import Context
from penstock.postgres.translation import unless_refused
from penstock.topics import queries as topics
from penstock.topics.models import Message, NewMessage, Published, ReceiverOutcome, Subscribed, Subscriber, TopicRecord
from penstock.topics.subscription import Subscription, filter_text
from penstock.topics.sync import SyncTopic
from penstock.topics.transactional import publish_through

T = TypeVar("T")
BATCH = 1_000
_OF_SUBSCRIBERS = ("filter", "ttl", "executor", "max_batch_size", "linger", "batch_by_key")


class Topic(Generic[T]):
    """A declared topic. `Penstock.topic` makes it.

        delays = app.topic("delays", payload=Delay)

        @delays.subscriber("JFK", filter={"dest": "JFK"})
        async def at_jfk(job: Job[Delay]) -> None: ...

        await delays.publish(Delay("JFK", 12))

    A copy is an ordinary job in the queue `<topic>_<client id>`, so it has all features of a job.

    Attributes:
        encrypted: Whether messages are encrypted, with the keys of the application: as declared, or as the database had it when
            the topic was looked up.
    """

    def __init__(
        self,
        context: Context,
        add_type: Callable[[JobType[Any]], JobType[Any]],
        name: str,
        payload: Any,
        catch_up: int | None,
        encrypted: bool = False,
        key: str | Callable[[T], str | None] | None = None,
    ) -> None:
        self.context = context
        self._add_type = add_type
        self.name = name
        self.encrypted = encrypted
        self._plain: Codec[T] = Codec(payload, name)
        self._sealed: Codec[T] = SealedCodec(self._plain, context.keyring, *self._owner)
        self._options: dict[str, Any] = {} if catch_up is None else {"catch_up": catch_up}
        if encrypted:
            # A declaration turns encryption on, and never off.
            self._options["encrypted"] = True
        check_key(f"topic {name}", payload, key)
        self._key_of: KeyOf | None = None
        if isinstance(key, str):
            hint = "Give the payload this field, or the message a key: publish(..., key=...)."
            self._key_of = key_of_field(f"a message of topic {name}", key, False, self._plain.check, hint)
        elif key is not None:
            self._key_of = key_by(f"a message of topic {name}", key)
        self._known: tuple[int, list[Subscriber]] | None = None

    @property
    def _owner(self) -> tuple[str, str]:
        """What the messages are bound to when they are encrypted."""
        return "message", self.name

    @property
    def codec(self) -> Codec[T]:
        """The codec of the messages that this application publishes."""
        return self._sealed if self.encrypted else self._plain

    @property
    def sync(self) -> SyncTopic[T]:
        """The blocking half, for threads without an event loop."""
        return SyncTopic(self, self.context.background)

    async def declare(self) -> None:
        """Create the topic in the database. The other calls do so implicitly."""
        database = await self.context.database()
        if ("topic", self.name) not in database.declared:
            await topics.declare_topic(database, self.name, self._options)
            database.declared["topic", self.name] = True

    async def _ready(self) -> None:
        """Declare the topic if the role may do so. Otherwise the declaration is left to roles that may."""
        if not await unless_refused(self.declare()):
            (await self.context.database()).declared["topic", self.name] = False

    # -- publishing

    async def publish(
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
        check_span("timeout", timeout, zero=True)
        check_flag("background", background)
        if connection is not None and not background:
            raise InvalidInput(
                "background=False cannot be combined with connection: receivers see a message only after the commit",
                hint="Publish with background=False without connection, or call outcomes after the commit.",
            )
        with sending(self.context.tracing, "publish", self.name, 1) as traceparent:
            document = self.document(data, id, unique, run_after, expires_at, traceparent, key)
            if connection is not None:
                if self.context.is_open:
                    await self._ready()
                return (await publish_through(connection, self.name, [document]))[0]
            await self._ready()
            receipt = await topics.publish(await self.context.database(), self.name, document)
        return receipt if background else await self.outcomes(receipt, timeout=timeout)

    async def publish_many(
        self,
        messages: Iterable[NewMessage[T] | T],
        *,
        ids: Iterable[UUID | str] | None = None,
        connection: Any = None,
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
        check_many("messages", messages, 'publish_many([{"a": 1}, NewMessage({"a": 2}, unique="x")])')
        given = list(messages)
        with sending(self.context.tracing, "publish", self.name, len(given)) as traceparent:
            documents = self.documents(given, ids, traceparent)
            receipts: list[Published] = []
            if connection is None or self.context.is_open:
                await self._ready()
            for start in range(0, len(documents), BATCH):
                batch = documents[start : start + BATCH]
                if connection is None:
                    receipts += await topics.publish_many(await self.context.database(), self.name, batch)
                else:
                    receipts += await publish_through(connection, self.name, batch)
            return receipts

    async def outcomes(self, receipt: Published, *, timeout: timedelta = timedelta(0)) -> Published:
        """Wait for all receivers, at most for `timeout`. Returns the receipt with the outcomes.

        Args:
            receipt: Receipt of the publish.
            timeout: How long to wait.
        """
        check_span("timeout", timeout, zero=True)
        database = await self.context.database()
        pause = 0.005
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                while await topics.unfinished_copies(database, receipt.id):
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.3, 0.25)
        except TimeoutError:
            pass
        return replace(receipt, outcomes=self._opened(await topics.outcomes(database, receipt.id)))

    def _opened(self, found: list[ReceiverOutcome]) -> list[ReceiverOutcome]:
        """Outcomes with results and errors decrypted, as far as the keys of the application allow."""
        return [
            replace(
                outcome,
                result=open_value(outcome.result, self.context.keyring, self._owner_of("result", outcome)),
                errors=[opened_entry(self.context.keyring, self._owner_of("error", outcome), one) for one in outcome.errors],
            )
            for outcome in found
        ]

    def _owner_of(self, kind: str, outcome: ReceiverOutcome) -> bytes:
        return owned_by(kind, f"{self.name}_{outcome.client_id}", str(parse_id(outcome.job)))

    def document(
        self,
        data: T | None,
        id: UUID | str | None,
        unique: str | None,
        run_after: datetime | timedelta | None,
        expires_at: datetime | timedelta | None,
        traceparent: str | None = None,
        key: str | None = None,
    ) -> str:
        """A message as a document for the database.

        Args:
            data: Payload of the message.
            id: See `NewMessage`.
            unique: See `NewMessage`.
            run_after: See `NewMessage`.
            expires_at: See `NewMessage`.
            traceparent: Its trace context; None: it has none.
            key: See `NewMessage`.
        """
        if key is None and self._key_of is not None:
            key = self._key_of(self.codec.or_empty(data))
        given = self.codec.or_empty(data)
        # Without a payload, the object needs not fit the type.
        payload = "{}" if given == {} and data is None and not self.encrypted else self.codec.dump(given)
        return self._document(payload, id, unique, run_after, expires_at, traceparent, key)

    def documents(
        self, messages: Iterable[NewMessage[T] | T], ids: Iterable[UUID | str] | None, traceparent: str | None = None
    ) -> list[str]:
        """Messages as documents for the database.

        Args:
            messages: Payloads, or `NewMessage`s for messages with more than a payload.
            ids: Identity of each message; None: those that the messages have.
            traceparent: Their trace context; None: they have none.
        """
        check_many("messages", messages, 'publish_many([{"a": 1}, NewMessage({"a": 2}, unique="x")])')
        if ids is not None:
            check_many("ids", ids, "ids=[uuid4() for _ in messages]")
        new = [message if isinstance(message, NewMessage) else NewMessage(message) for message in messages]
        given = [message.id for message in new] if ids is None else list(ids)
        if len(given) != len(new):
            raise InvalidInput(f"{len(new)} messages have {len(given)} ids", hint="Give an id for each message, or none at all.")
        return [
            self._document(
                self.codec.dump(message.data),
                id,
                message.unique,
                message.run_after,
                message.expires_at,
                traceparent,
                message.key if message.key is not None or self._key_of is None else self._key_of(message.data),
            )
            for message, id in zip(new, given, strict=True)
        ]

    def _document(
        self,
        payload: str,
        id: UUID | str | None,
        unique: str | None,
        run_after: datetime | timedelta | None,
        expires_at: datetime | timedelta | None,
        traceparent: str | None,
        key: str | None,
    ) -> str:
        if unique is not None:
            check_text("unique", unique)
        if key is not None:
            check_text("key", key)
        message_id = make_id() if id is None else parse_id(id)
        run_after, expires_at = aware("run_after", run_after), aware("expires_at", expires_at)
        return topics.publish_document(payload, message_id, unique, run_after, expires_at, traceparent, key)

    # -- subscribing

    def subscriber(
        self,
        client_id: str,
        *,
        filter: Any = None,
        ttl: timedelta | None = None,
        executor: Executor = "auto",
        max_batch_size: int | None = None,
        linger: timedelta = timedelta(0),
        batch_by_key: bool = False,
        **options: Unpack[JobOptions],
    ) -> Decorator:
        """Declare a handler for the copies of one client id. A worker of the app subscribes it when it starts.

        Workers that share a client id share its copies.

        Args:
            client_id: Name of the subscriber within the topic.
            filter: JSON that a message must contain to reach the subscriber.
            ttl: Time without a live worker after which the subscription and its queue end, at least 1 s. None: the subscription
                does not end, and the queue grows while no worker is alive.
            executor: See `Penstock.job`.
            max_batch_size: See `Penstock.job`.
            linger: See `Penstock.job`.
            batch_by_key: See `Penstock.job`.
            options: Options as for `Penstock.job`; `keep_result` is True unless given, for publishers that wait.

        Raises:
            InvalidInput: The handler or an option cannot be used.
        """
        check_name("client id", client_id, 199 - len(self.name))
        self._check_filter(filter)
        _check_ttl(ttl)

        named = f"{self.name}_{client_id}"
        chosen = options_of(named, {"keep_result": True, "encrypted": self.encrypted, **options}, _OF_SUBSCRIBERS)
        if chosen.encrypted != self.encrypted:
            raise InvalidInput(
                f"encrypted={chosen.encrypted} of {named} is not possible: topic {self.name} has encrypted={self.encrypted}",
                hint="A topic is encrypted with all of its copies: app.topic(name, encrypted=True).",
            )
        if chosen.max_waiting is not None:
            raise InvalidInput(
                f"max_waiting of {named} is not possible: each subscriber gets each message", hint="Limit what is published."
            )
        batch = batch_options_of(named, max_batch_size, linger, batch_by_key)

        def declare(handler: Callable[..., Any]) -> JobType[Any]:
            declared: JobType[Any] = JobType(self.context, named, Any, chosen)
            declared.owner = self._owner
            declared.handled_by(handler, executor, batch)
            declared.declarer = Subscription(self.name, self.declare, client_id, ttl, filter)
            return self._add_type(declared)

        return declare

    async def subscribe(
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
        check_name("client id", client_id, 199 - len(self.name))
        self._check_filter(filter)
        _check_ttl(ttl)
        if since is not None:
            check_number("since", since, 0, 2**63 - 1)
        await self._ready()
        (receipt,) = await topics.subscribe_many(
            await self.context.database(), self.name, [client_id], ttl=ttl, filter=filter_text(filter), since=since
        )
        return receipt

    def _check_filter(self, filter: Any) -> None:
        if filter is not None and self.encrypted:
            raise InvalidInput(
                f"topic {self.name} is encrypted, so a subscriber cannot have a filter: the database can read no message",
                hint="Look at the message in the handler, or publish to a topic for each kind of message.",
            )
        filter_text(filter)

    async def unsubscribe(self, client_id: str, *, drop: bool = False) -> bool:
        """End a subscription. Returns whether there was one.

        Args:
            client_id: Name of the subscriber.
            drop: Whether to archive the queued copies as expired; otherwise workers can still run them.
        """
        check_text("client_id", client_id)
        check_flag("drop", drop)
        await self._ready()
        return await topics.unsubscribe(await self.context.database(), self.name, client_id, drop)

    async def renew(self, client_id: str) -> bool:
        """Renew a subscription with a time to live. Returns False when it has ended, so that messages may have been missed.

        Args:
            client_id: Client id of the subscriber.
        """
        check_text("client_id", client_id)
        return bool(await topics.renew(await self.context.database(), [(self.name, client_id)]))

    async def details(self) -> TopicRecord:
        """The topic as it is stored, and the number of its subscribers. Raises `NotFound`."""
        return await topics.topic(await self.context.database(), self.name)

    async def subscribers(self) -> list[Subscriber]:
        """The current subscribers, oldest first. The list is read again only when it has changed."""
        known = self._known
        generation, found = await topics.list_subscribers(await self.context.database(), self.name, known and known[0])
        if found is None and known is not None:
            return known[1]
        self._known = (generation, found or [])
        return self._known[1]

    # -- reading

    async def read(self, since: int | None = None, *, limit: int = 100) -> list[Message[T]]:
        """The messages after a sequence number, without a subscription.

        Args:
            since: Number of the last message seen; None: read from the oldest stored one.
            limit: Maximum number of messages.

        Raises:
            Conflict: Messages after `since` were pruned.
        """
        if since is not None:
            check_number("since", since, 0, 2**63 - 1)
        check_number("limit", limit, 1, 10_000)
        await self._ready()
        # What is not encrypted is read as it is by both.
        codec = self._sealed if self.context.keyring or self.encrypted else self._plain
        return await topics.read(await self.context.database(), self.name, since, limit, codec)

    async def sequence_of(self, job_id: UUID | str) -> int | None:
        """The sequence number of the message of which a job is a copy; None for other jobs.

        Args:
            job_id: Id of the job.
        """
        found = await topics.message_of(await self.context.database(), parse_id(job_id))
        return None if found is None else int(found["seq"])


def _check_ttl(ttl: Any) -> None:
    if ttl is not None:
        check_span("ttl", ttl, shortest=timedelta(seconds=1), longest=timedelta(days=30))
