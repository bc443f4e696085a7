"""One typed function for each SQL function about topics. No logic beyond converting rows to models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.core.serialization import Codec
from penstock.errors import NotFound, Unreadable
from penstock.jobs.queries import load_or_text
from penstock.jobs.records import Status
from penstock.postgres.database import Database, in_parts
from penstock.topics.models import Message, Published, ReceiverOutcome, Subscribed, Subscriber, TopicCounts, TopicRecord

CHANNEL = "penstock_topics"
"""Channel of notifications with the name of a topic whose list of subscribers has changed."""


async def declare_topic(database: Database, name: str, options: dict[str, Any]) -> None:
    """Create a topic, or change it when this declaration differs from the last one."""
    await database.fetch("select penstock.declare_topic($1, $2::jsonb)", name, orjson.dumps(options).decode())


async def subscribe_many(
    database: Database,
    topic: str,
    client_ids: Sequence[str],
    *,
    ttl: timedelta | None = None,
    filter: str | None = None,
    since: int | None = None,
    options: dict[str, Any] | None = None,
    queue: str | None = None,
) -> list[Subscribed]:
    """Subscribe clients atomically. `filter` is JSON text. Raises `NotFound`, `Conflict`."""
    rows = await database.fetch(
        "select * from penstock.subscribe_many($1, $2, $3, $4::jsonb[], $5, $6::jsonb, $7)",
        topic,
        client_ids,
        ttl,
        None if filter is None else [filter] * len(client_ids),
        since,
        None if options is None else orjson.dumps(options).decode(),
        queue,
    )
    return [Subscribed(*tuple(row)) for row in rows]


async def renew(database: Database, subscriptions: Sequence[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Renew subscriptions, (topic, client id). Returns the renewed ones with the last message's number; others have ended."""
    rows = await database.fetch(
        "select topic, client_id, seq from penstock.renew_subscriptions($1, $2)",
        [topic for topic, _ in subscriptions],
        [client_id for _, client_id in subscriptions],
    )
    return {(row["topic"], row["client_id"]): row["seq"] for row in rows}


async def unsubscribe(database: Database, topic: str, client_id: str, drop: bool = False) -> bool:
    """End a subscription. Returns whether there was one. Raises `NotFound` for the topic."""
    return bool(await database.fetchval("select penstock.unsubscribe($1, $2, $3)", topic, client_id, drop))


async def list_subscribers(database: Database, topic: str, known: int | None = None) -> tuple[int, list[Subscriber] | None]:
    """The generation of a topic's list of subscribers, and the list; None instead of it when the generation is `known`."""
    rows = await database.fetch("select * from penstock.list_subscribers($1, $2)", topic, known)
    generation = rows[0]["generation"] if rows else None
    if generation is None:
        return 0, []
    if generation == known:
        return generation, None
    return generation, [_subscriber(row) for row in rows if row["client_id"] is not None]


PUBLISH = "select * from penstock.publish_json({0}, cast({1} as jsonb))"
"""For any driver, with its own placeholders for the parameters: the topic, and a `publish_document` or a JSON array of them."""


def publish_document(
    data: str,
    id: UUID,
    unique: str | None,
    run_after: datetime | timedelta | None,
    expires_at: datetime | timedelta | None,
    traceparent: str | None = None,
    key: str | None = None,
) -> str:
    """The message as the document of `penstock.publish_json`; `data` is JSON text, a timedelta counts from now."""
    document = {
        "data": orjson.Fragment(data),
        "id": str(id),
        "unique_key": unique,
        "run_after": run_after,
        "expires_at": expires_at,
        "traceparent": traceparent,
        "key": key,
    }
    return orjson.dumps({name: value for name, value in document.items() if value is not None}, default=_seconds).decode()


async def publish(database: Database, topic: str, document: str) -> Published:
    """Publish a message. Raises `NotFound` for the topic."""
    return published(await database.fetchrow(PUBLISH.format("$1", "$2"), topic, document))


def published(row: Any) -> Published:
    """The receipt in a row of `PUBLISH`."""
    id, seq, receivers, coalesced, outcome = tuple(row)
    return Published(id if isinstance(id, UUID) else UUID(str(id)), seq, receivers, coalesced, outcome == "duplicate")


async def publish_many(database: Database, topic: str, documents: Sequence[str]) -> list[Published]:
    """Publish up to 10,000 messages atomically. Raises `NotFound` for the topic."""
    return [published(row) for row in await database.fetch(PUBLISH.format("$1", "$2"), topic, array_of(documents))]


def array_of(documents: Sequence[str]) -> str:
    """Join several documents into an array; a single one remains as it is, which the database processes faster."""
    return documents[0] if len(documents) == 1 else f"[{','.join(documents)}]"


async def unfinished_copies(database: Database, id: UUID) -> bool:
    """Whether a receiver has not settled its copy. Raises `NotFound`."""
    return bool(await database.fetchval("select penstock.unfinished_copies($1)", id, retry=True))


async def unfinished(database: Database, ids: Sequence[UUID]) -> set[UUID]:
    """The messages that a receiver has not settled; pruned messages are left out."""
    query = "select id from penstock.topic_messages where id = any ($1::uuid[]) and penstock.unfinished_copies(id)"
    return {row["id"] for row in await database.fetch(query, ids)}


async def outcomes(database: Database, id: UUID) -> list[ReceiverOutcome]:
    """The outcome of a message at each receiver. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.outcomes($1)", id, retry=True)
    return [
        ReceiverOutcome(
            row["client_id"],
            row["job"],
            Status(row["status"]),
            load_or_text(row["result"]),
            load_or_text(row["errors"]) or [],
        )
        for row in rows
    ]


async def read(database: Database, topic: str, since: int | None, limit: int, codec: Codec[Any]) -> list[Message[Any]]:
    """Messages after a sequence number. Raises `NotFound`, `Conflict` when some of them are gone, `Unreadable`."""
    found: list[Message[Any]] = []
    for row in await database.fetch("select * from penstock.read_topic($1, $2, $3)", topic, since, limit):
        try:
            found.append(Message(row["seq"], row["id"], row["published_at"], codec.load(row["data"]), row["key"]))
        except Unreadable as error:
            if found:
                # A later call begins with it and raises the error.
                break
            problem = f"message {row['seq']} of topic {topic} cannot be read: {error.message}"
            raise Unreadable(problem, hint="Read since its number to skip it.") from None
    return found


async def read_raw(database: Database, topic: str, since: int | None, limit: int) -> list[Message[str]]:
    """`read`, with the payloads as JSON text."""
    return [Message(*row) for row in await database.fetch("select * from penstock.read_topic($1, $2, $3)", topic, since, limit)]


async def missed(database: Database, topic: str, client_id: str, since: int, limit: int) -> list[tuple[int, UUID]]:
    """Number and id of messages after a number that a subscriber's queue no longer has. See `penstock.missed_messages`."""
    query = "select seq, id from penstock.missed_messages($1, $2, $3, $4)"
    return [(row["seq"], row["id"]) for row in await database.fetch(query, topic, client_id, since, limit)]


async def late(database: Database, topic: str, client_id: str, since: int, last: int, limit: int) -> list[tuple[int, UUID]]:
    """Number and id of messages up to a number that were delivered after another one. See `penstock.late_messages`."""
    query = "select seq, id from penstock.late_messages($1, $2, $3, $4, $5)"
    return [(row["seq"], row["id"]) for row in await database.fetch(query, topic, client_id, since, last, limit)]


async def messages_at(database: Database, topic: str, seqs: Sequence[int], most_bytes: int) -> list[Message[str]]:
    """The messages with these numbers, as JSON text, in this order, until their payloads have so many bytes."""
    query = "select * from penstock.messages_at($1, $2, $3)"
    return [Message(*row) for row in await database.fetch(query, topic, seqs, most_bytes)]


async def messages_of(database: Database, jobs: Sequence[UUID]) -> dict[UUID, tuple[int, UUID, datetime]]:
    """Sequence number, id and time of the messages of which claimed jobs are copies."""
    found: dict[UUID, tuple[int, UUID, datetime]] = {}
    for some in in_parts(jobs):
        rows = await database.fetch("select * from penstock.messages_of($1)", some)
        found |= {row["job"]: (row["seq"], row["id"], row["published_at"]) for row in rows}
    return found


async def take_over(database: Database, queue: str, connection: str) -> None:
    """Record that a queue is delivered to this connection from now on, and notify all servers."""
    await database.fetch("select penstock.take_over($1, $2)", queue, connection)


async def connections_of(database: Database, queues: Sequence[str]) -> dict[str, str]:
    """The connection that receives the copies of each of these queues, see `take_over`."""
    query = (
        "select queue, connection from penstock.subscriptions where queue = any ($1) and key is null and connection is not null"
    )
    found: dict[str, str] = {}
    for some in in_parts(queues):
        found |= {row["queue"]: row["connection"] for row in await database.fetch(query, some)}
    return found


async def topic(database: Database, name: str) -> TopicRecord:
    """One topic. Raises `NotFound`."""
    subscribers = "(select count(client_id)::integer from penstock.list_subscribers(name))"
    query = f"select name, catch_up, last_seq, {subscribers}, created_at, encrypted from penstock.topics where name = $1"  # noqa: S608
    row = await database.fetchrow(query, name)
    if row is None:
        raise NotFound(f"no such topic: {name}", hint=f"Create it first: penstock topics create {name}")
    return TopicRecord(*tuple(row))


async def message_of(database: Database, id: UUID) -> dict[str, Any] | None:
    """Topic, seq, id, published_at, unique_key and key of the message of which a job is a copy; None for other jobs."""
    row = await database.fetchrow("select * from penstock.message_of($1)", id)
    return None if row is None else dict(row)


async def counts(database: Database) -> list[TopicCounts]:
    """Counts of each topic."""
    return [TopicCounts(*tuple(row)) for row in await database.fetch("select * from penstock.topic_counts()")]


async def maintain(database: Database) -> tuple[int, int]:
    """End subscriptions that were not renewed, and remove the queues of ended ones. Returns the number of both."""
    row = await database.fetchrow("select * from penstock.maintain_topics()")
    return row["ended"], row["removed"]


async def prune_messages(database: Database, keep: timedelta) -> int:
    """Delete old messages that no copy refers to. Returns their number."""
    return int(await database.fetchval("select penstock.prune_messages($1)", keep))


async def prune_messages_due(database: Database) -> int:
    """As `prune_messages`, by the retention that the database has."""
    return int(await database.fetchval("select penstock.prune_messages_due()"))


def _seconds(value: Any) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError


def _subscriber(row: Any) -> Subscriber:
    return Subscriber(
        row["client_id"],
        row["queue"],
        row["key"],
        load_or_text(row["filter"]),
        row["ttl"],
        row["expires_at"],
        row["after_seq"],
        row["created_at"],
    )
