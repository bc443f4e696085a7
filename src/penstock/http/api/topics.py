"""Topics: list, make, publish, subscribe, renew, unsubscribe, read."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
import orjson
from fastapi import Path, Query, Request, Response
from msgspec import Raw

from penstock.http import bodies, shapes
from penstock.http.api.common import answer, body_of, fit, limited_body, needs, principal_of, read, router, service_of
from penstock.http.auth import Role
from penstock.http.errors import ApiError, bad_json
from penstock.http.publishing import Publishing
from penstock.http.topic_models import (
    NewMessage,
    NewTopic,
    Published,
    PublishedMany,
    Renewed,
    Subscribe,
    Subscribed,
    Subscriber,
    Topic,
    TopicCounts,
    TopicMessage,
)
from penstock.job import make_id
from penstock.message import Published as Receipt
from penstock.payload import dump_json, storable
from penstock.postgres import topics

api = router("topics")
_DELAY = {"data": {"dest": "JFK", "minutes": 12}, "unique": "UA123", "background": False, "timeout": "10s"}
_NDJSON = "application/x-ndjson"
_LINES = '{"data": {"dest": "JFK", "minutes": 12}}\n{"data": {"dest": "SFO", "minutes": 7}, "unique": "UA123"}\n'
_BODY = body_of(NewMessage, _DELAY)
_BODY["requestBody"]["content"] |= body_of(NewMessage, _LINES, content=_NDJSON)["requestBody"]["content"]
_SUBSCRIBER = "/v1/topics/{topic:name}/subscribers/{client_id:name}"
TopicName = Annotated[str, Path(description="Topic.", examples=["delays"], max_length=200)]
ClientId = Annotated[str, Path(description="Names the subscriber in the topic.", examples=["browser-17"], max_length=200)]
_data_of = msgspec.json.Decoder(dict[str, Raw]).decode


@api.get("/v1/topics", response_model=list[TopicCounts])
@needs(Role.READ)
async def list_topics(request: Request) -> Response:
    """All topics that the user may see, by name, with what is stored. Counts: for people, not for loops."""
    principal = principal_of(request)
    found = await topics.counts(service_of(request).database)
    return answer([shapes.plain(counts) for counts in found if principal.may(counts.name)])


@api.post("/v1/topics", status_code=201, response_model=Topic, openapi_extra=body_of(NewTopic, {"name": "delays", "keep": 10}))
@needs(Role.ADMIN)
async def declare_topic(request: Request) -> Response:
    """Make a topic, or change how many messages it keeps for new subscribers. Idempotent."""
    wanted = await read(request, NewTopic)
    principal_of(request).require(wanted.name, request.url.path, "topic")
    options = {} if wanted.keep is None else {"keep": wanted.keep}
    await topics.declare_topic(service_of(request).database, storable_name(wanted.name), options)
    return answer(await _topic(request, wanted.name), 201)


@api.get("/v1/topics/{topic:name}", response_model=Topic)
@needs(Role.READ)
async def get_topic(request: Request, topic: TopicName) -> Response:
    """One topic."""
    _require(request, topic)
    return answer(await _topic(request, topic))


@api.get("/v1/topics/{topic:name}/subscribers", response_model=list[Subscriber])
@needs(Role.READ)
async def list_subscribers(request: Request, topic: TopicName) -> Response:
    """The subscribers of this moment, oldest first."""
    _require(request, topic)
    await _topic(request, topic)
    _, found = await topics.list_subscribers(service_of(request).database, topic)
    shown = []
    for subscriber in found or []:
        shape = shapes.plain(subscriber)
        shape["ttl_s"] = shape.pop("ttl")
        shown.append(shape)
    return answer(shown)


@api.put(
    _SUBSCRIBER,
    response_model=Subscribed,
    openapi_extra=body_of(Subscribe, {"ttl_s": 30, "filter": {"dest": "JFK"}}, required=False),
)
@needs(Role.WORK)
async def subscribe(request: Request, topic: TopicName, client_id: ClientId) -> Response:
    """Subscribe a client: each message becomes a job in the queue `<topic>_<client id>`. Idempotent; again it renews.

    409 when the name of the queue is taken, or messages after `since` are gone.
    """
    _require(request, topic)
    wanted = await read(request, Subscribe)
    receipts = await topics.subscribe_many(
        service_of(request).database,
        topic,
        [client_id],
        ttl=None if wanted.ttl_s is None else timedelta(seconds=wanted.ttl_s),
        filter=None if wanted.filter is None else dump_json(wanted.filter, "a filter"),
        since=wanted.since,
    )
    return answer(shapes.plain(receipts[0]))


@api.post(f"{_SUBSCRIBER}/renew", response_model=Renewed)
@needs(Role.WORK)
async def renew(request: Request, topic: TopicName, client_id: ClientId) -> Response:
    """Renew a subscription with a time to live."""
    _require(request, topic)
    return answer({"renewed": bool(await topics.renew(service_of(request).database, [(topic, client_id)]))})


@api.delete(_SUBSCRIBER, status_code=204, response_class=Response)
@needs(Role.WORK)
async def unsubscribe(
    request: Request,
    topic: TopicName,
    client_id: ClientId,
    drop: Annotated[
        bool, Query(description="Archive the copies that wait as expired; otherwise they can still be worked.")
    ] = False,
) -> Response:
    """End a subscription. 404 when there is none."""
    _require(request, topic)
    if not await topics.unsubscribe(service_of(request).database, topic, client_id, drop):
        raise ApiError(404, "not_found", f"{client_id} is not subscribed to {topic}", instance=request.url.path, in_body=True)
    return Response(status_code=204)


@api.post("/v1/topics/{topic:name}/messages", status_code=202, response_model=Published | PublishedMany, openapi_extra=_BODY)
@needs(Role.ENQUEUE, batch=True)
async def publish(request: Request, topic: TopicName) -> Response:
    """Publish a message (JSON) to all subscribers of this moment, or to none; or any number of them, one in each line (NDJSON).

    With `background` false the answer waits until every receiver has settled its copy, at most for `timeout`, with outcomes.
    Lines are published in their order, in parts of up to 1,000; with ids of your own they can be sent again.
    """
    service = service_of(request)
    _require(request, topic)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == _NDJSON:
        await _topic(request, topic)
        return answer(await Publishing(service, topic, request.url.path).lines(request.stream()), 202)
    body = await limited_body(request)
    wanted = fit(body, NewMessage, request.url.path)
    within = bodies.span(wanted.timeout, "timeout", service.settings.longest_wait)
    id = wanted.id or make_id()
    if wanted.unique is not None and "\x00" in wanted.unique:
        raise ApiError(400, "invalid_parameter", "the unique key contains the character U+0000", in_body=True)
    document = topics.publish_document(_data(body), id, wanted.unique, _moment(wanted.run_after), _moment(wanted.expires_at))
    receipt = await topics.publish(service.database, topic, document)
    service.metrics.published(topic)
    if not wanted.background:
        if within > 0:
            service.check_room()
            await service.messages.finished(receipt.id, within)
        receipt = replace(receipt, outcomes=await topics.outcomes(service.database, receipt.id))
    return answer(_published(receipt), 202)


@api.get("/v1/topics/{topic:name}/messages", response_model=list[TopicMessage])
@needs(Role.READ)
async def read_messages(
    request: Request,
    topic: TopicName,
    since: Annotated[int | None, Query(ge=0, le=9_000_000_000_000_000_000, description="The last one seen.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most messages.")] = 100,
) -> Response:
    """Messages after a number (none: from the oldest one kept), whoever subscribes. 409 when some of them are gone."""
    _require(request, topic)
    found = await topics.read_raw(service_of(request).database, topic, since, limit)
    return answer([shapes.plain(message) | {"data": orjson.Fragment(message.data)} for message in found])


def _require(request: Request, topic: str) -> None:
    principal_of(request).require(topic, request.url.path, "topic")


def storable_name(name: str) -> str:
    """The same name. Raises `ApiError` 400 for one that the database cannot even be asked about."""
    if "\x00" in name:
        raise ApiError(400, "invalid_parameter", "The name contains the character U+0000", in_body=True)
    return name


async def _topic(request: Request, name: str) -> dict[str, Any]:
    database = service_of(request).database
    found = await topics.topic(database, name)
    if found is None:
        raise ApiError(
            404,
            "not_found",
            f"no such topic: {name}",
            detail="Make it first: POST /v1/topics",
            instance=request.url.path,
            in_body=True,
        )
    _, subscribers = await topics.list_subscribers(database, name)
    return {
        "name": found[0],
        "keep": found[1],
        "last_seq": found[2],
        "subscribers": len(subscribers or []),
        "created_at": found[4],
    }


def _data(body: bytes) -> str:
    """The payload as the text that was sent, so that no number is rounded."""
    try:
        raw = _data_of(body or b"{}").get("data")
        return "{}" if raw is None else storable(bytes(raw).decode(), "the message")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise bad_json() from None


def _moment(given: float | datetime | None) -> datetime | timedelta | None:
    return timedelta(seconds=given) if isinstance(given, (int, float)) else given


def _published(receipt: Receipt) -> dict[str, Any]:
    shape = shapes.plain(receipt) | {"complete": receipt.complete}
    if receipt.outcomes is not None:
        shape["outcomes"] = [{**shapes.plain(outcome), "job": shapes.job_id(outcome.job)} for outcome in receipt.outcomes]
    return shape
