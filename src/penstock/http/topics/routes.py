"""Topics: list, make, publish, subscribe, renew, unsubscribe, read."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Path, Query, Request, Response
from msgspec import Raw

from penstock.core.records import raw
from penstock.core.serialization import dump_json, storable
from penstock.errors import NotFound
from penstock.http import bodies
from penstock.http.call import Call
from penstock.http.completion_waiter import MessageWaiter
from penstock.http.errors import ApiError, bad_json
from penstock.http.ndjson import are_lines, outcomes
from penstock.http.openapi import json_or_lines
from penstock.http.routing import (
    ADMIN,
    BATCH,
    READ,
    WORK,
    CurrentService,
    Instance,
    OpenDatabase,
    Traceparent,
    User,
    body,
    fit,
    limited_body,
    router,
)
from penstock.http.topics.models import (
    NewMessage,
    NewTopic,
    Renewed,
    Subscribe,
)
from penstock.http.topics.publishing import PublishOutcome, publish_lines
from penstock.jobs.models import make_id
from penstock.postgres.database import Database
from penstock.topics import queries as topics
from penstock.topics.models import Message, Published, Subscribed, Subscriber, TopicCounts, TopicRecord

api = router("topics")
_DELAY = {"data": {"dest": "JFK", "minutes": 12}, "unique": "UA123", "background": False, "timeout": "10s"}
_LINES = '{"data": {"dest": "JFK", "minutes": 12}}\n{"data": {"dest": "SFO", "minutes": 7}, "unique": "UA123"}\n'
_PUBLISHED = '{"line":1,"id":"0190b7a0-0000-7000-8000-000000000001","seq":42,"outcome":"published"}\n'
_SUBSCRIBER = "/v1/topics/{topic:name}/subscribers/{client_id:name}"
TopicName = Annotated[str, Path(description="Topic.", examples=["delays"], max_length=200)]
ClientId = Annotated[str, Path(description="Names the subscriber in the topic.", examples=["browser-17"], max_length=200)]
_data_of = msgspec.json.Decoder(dict[str, Raw]).decode


async def _open(topic: TopicName, user: User, path: Instance) -> str:
    user.require(topic, path, "topic")
    return topic


# The topic of the path, which is open to the user; it need not be there.
OpenTopic = Annotated[str, Depends(_open)]


@api.get("/v1/topics", dependencies=[READ])
async def list_topics(user: User, database: OpenDatabase) -> list[TopicCounts]:
    """All topics that the user may see, by name, with what is stored. Counts: for people, not for loops."""
    return [counts for counts in await topics.counts(database) if user.may(counts.name)]


@api.post("/v1/topics", dependencies=[ADMIN], status_code=201)
async def declare_topic(
    user: User,
    database: OpenDatabase,
    path: Instance,
    wanted: Annotated[NewTopic, body(NewTopic, {"name": "delays", "catch_up": 10})],
) -> TopicRecord:
    """Make a topic, or change how many earlier messages new subscribers get, or whether it is encrypted. Idempotent."""
    user.require(wanted.name, path, "topic")
    options = wanted.model_dump(include={"catch_up", "encrypted"}, exclude_none=True)
    await topics.declare_topic(database, storable_name(wanted.name), options)
    return await _find(database, wanted.name, path)


@api.get("/v1/topics/{topic:name}", dependencies=[READ])
async def get_topic(topic: OpenTopic, database: OpenDatabase, path: Instance) -> TopicRecord:
    """One topic."""
    return await _find(database, topic, path)


@api.get("/v1/topics/{topic:name}/subscribers", dependencies=[READ])
async def list_subscribers(topic: OpenTopic, database: OpenDatabase, path: Instance) -> list[Subscriber]:
    """The subscribers of this moment, oldest first."""
    await _find(database, topic, path)
    _, found = await topics.list_subscribers(database, topic)
    return found or []


@api.put(_SUBSCRIBER, dependencies=[WORK])
async def subscribe(
    topic: OpenTopic,
    client_id: ClientId,
    database: OpenDatabase,
    wanted: Annotated[Subscribe, body(Subscribe, {"ttl_s": 30, "filter": {"dest": "JFK"}}, required=False)],
) -> Subscribed:
    """Subscribe a client: each message becomes a job in the queue `<topic>_<client id>`. Idempotent; again it renews.

    409 when the name of the queue is taken, or messages after `since` are gone.
    """
    receipts = await topics.subscribe_many(
        database,
        topic,
        [client_id],
        ttl=None if wanted.ttl_s is None else timedelta(seconds=wanted.ttl_s),
        filter=None if wanted.filter is None else dump_json(wanted.filter, "a filter"),
        since=wanted.since,
    )
    return receipts[0]


@api.post(f"{_SUBSCRIBER}/renew", dependencies=[WORK])
async def renew(topic: OpenTopic, client_id: ClientId, database: OpenDatabase) -> Renewed:
    """Renew a subscription with a time to live."""
    return Renewed(renewed=bool(await topics.renew(database, [(topic, client_id)])))


@api.delete(_SUBSCRIBER, dependencies=[WORK], status_code=204, response_class=Response)
async def unsubscribe(
    topic: OpenTopic,
    client_id: ClientId,
    database: OpenDatabase,
    path: Instance,
    drop: Annotated[
        bool, Query(description="Archive the copies that wait as expired; otherwise they can still be worked.")
    ] = False,
) -> None:
    """End a subscription. 404 when there is none."""
    if not await topics.unsubscribe(database, topic, client_id, drop):
        raise ApiError(404, "not_found", f"{client_id} is not subscribed to {topic}", instance=path, in_body=True)


@api.post(
    "/v1/topics/{topic:name}/messages",
    dependencies=[BATCH],
    status_code=202,
    response_model=Published,
    responses=outcomes(PublishOutcome, _PUBLISHED),
    openapi_extra=json_or_lines(NewMessage, _DELAY, _LINES),
)
async def publish(
    request: Request, topic: OpenTopic, service: CurrentService, path: Instance, traceparent: Traceparent
) -> Published | Response:
    """Publish a message (JSON) to all subscribers of this moment, or to none; or any number of them, one in each line (NDJSON).

    With `background` false the answer waits until every receiver has settled its copy, at most for `timeout`, with outcomes.
    Lines are published in their order; the answer (200) has a line for each, and one that is refused does not stop the others.
    With ids of your own they can be sent again.
    """
    database = service.database
    if are_lines(request):
        await _find(database, topic, path)
        return await publish_lines(service, topic, request, traceparent)
    sent = await limited_body(request)
    wanted = fit(sent, NewMessage, path)
    within = bodies.span(wanted.timeout, "timeout", service.settings.longest_wait)
    id = wanted.id or make_id()
    for what, key in (("unique key", wanted.unique), ("key", wanted.key)):
        if key is not None and "\x00" in key:
            raise ApiError(400, "invalid_parameter", f"the {what} contains the character U+0000", in_body=True)
    document = topics.publish_document(
        _data(sent), id, wanted.unique, _moment(wanted.run_after), _moment(wanted.expires_at), traceparent, wanted.key
    )
    receipt = await topics.publish(database, topic, document)
    service.metrics.published(topic)
    if not wanted.background:
        if within > 0:
            service.check_room()
            call: Call = request.scope["call"]
            with call.watching() as watch:
                await service.part(MessageWaiter).finished(receipt.id, within)
                watch.check()
        receipt = replace(receipt, outcomes=await topics.outcomes(database, receipt.id))
    return receipt


@api.get("/v1/topics/{topic:name}/messages", dependencies=[READ])
async def read_messages(
    topic: OpenTopic,
    database: OpenDatabase,
    since: Annotated[int | None, Query(ge=0, le=9_000_000_000_000_000_000, description="The last one seen.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most messages.")] = 100,
) -> list[Message[Any]]:
    """Messages after a number (none: from the oldest one kept), without a subscription. 409 when some of them are gone."""
    found = await topics.read_raw(database, topic, since, limit)
    # As they were published: no parser rounds their numbers.
    return [Message(message.seq, message.id, message.published_at, raw(message.data), message.key) for message in found]


def storable_name(name: str) -> str:
    """The same name. Raises `ApiError` 400 for one that the database cannot even be asked about."""
    if "\x00" in name:
        raise ApiError(400, "invalid_parameter", "The name contains the character U+0000", in_body=True)
    return name


async def _find(database: Database, name: str, path: str) -> TopicRecord:
    """The topic of that name. Raises `ApiError` 404."""
    try:
        return await topics.topic(database, name)
    except NotFound as error:
        detail = "Make it first: POST /v1/topics"
        raise ApiError(404, "not_found", error.message, detail=detail, instance=path, in_body=True) from None


def _data(body: bytes) -> str:
    """The payload as the text that was sent, so that no number is rounded."""
    try:
        raw = _data_of(body or b"{}").get("data")
        return "{}" if raw is None else storable(bytes(raw).decode(), "the message")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise bad_json() from None


def _moment(given: float | datetime | None) -> datetime | timedelta | None:
    return timedelta(seconds=given) if isinstance(given, (int, float)) else given
