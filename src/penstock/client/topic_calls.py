"""The calls about topics as data. See `calls`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.client.answers import json_of, time_of
from penstock.client.calls import Call, quoted
from penstock.job import Status, make_id, parse_id
from penstock.message import Message, NewMessage, Published, ReceiverOutcome, Subscribed, Subscriber, TopicCounts
from penstock.payload import dump_json


def path_of(topic: str, *rest: str) -> str:
    """A path under a topic."""
    return "/".join(["/v1/topics", quoted(topic), *rest])


def topics() -> Call[list[TopicCounts]]:
    """All topics."""

    def parse(response: Any) -> list[TopicCounts]:
        return [TopicCounts(**{**one, "last_published_at": time_of(one["last_published_at"])}) for one in json_of(response)]

    return Call("GET", "/v1/topics", parse)


def declare(topic: str, keep: int | None) -> Call[None]:
    """Make or change a topic."""
    return Call("POST", "/v1/topics", lambda _: None, {"name": topic} | ({} if keep is None else {"keep": keep}))


def publish(
    topic: str, data: Any, id: UUID | str | None, unique: str | None, run_after: datetime | timedelta | None,
    expires_at: datetime | timedelta | None, background: bool, timeout_s: float,
) -> Call[Published]:  # fmt: skip
    """Publish. The id is made here, so that it can be repeated."""
    new_id = make_id() if id is None else parse_id(id)
    body = {
        "data": {} if data is None else data, "id": str(new_id), "unique": unique, "run_after": _moment(run_after),
        "expires_at": _moment(expires_at), "background": background, "timeout": f"{timeout_s:.3f}s",
    }  # fmt: skip
    return Call(
        "POST", path_of(topic, "messages"), _published, {name: value for name, value in body.items() if value is not None}
    )


def publish_many(topic: str, messages: Iterable[Any]) -> Call[int]:
    """Publish messages. The ids are made here, so that it can be repeated."""
    lines = b"\n".join(_line(message if isinstance(message, NewMessage) else NewMessage(message)) for message in messages)

    def parse(response: Any) -> int:
        found = json_of(response)
        return int(found["published"] + found["duplicates"])

    return Call("POST", path_of(topic, "messages"), parse, lines=lines)


def read(topic: str, since: int | None, limit: int) -> Call[list[Message[Any]]]:
    """Read messages."""
    params = {"limit": str(limit)} | ({} if since is None else {"since": str(since)})
    return Call("GET", path_of(topic, "messages"), lambda r: [message_of(one) for one in json_of(r)], params=params)


def subscribe(topic: str, client_id: str, ttl: timedelta | None, filter: Any, since: int | None) -> Call[Subscribed]:
    """Subscribe."""
    body = {"ttl_s": None if ttl is None else ttl.total_seconds(), "filter": filter, "since": since}

    def parse(response: Any) -> Subscribed:
        found = json_of(response)
        return Subscribed(**{**found, "expires_at": time_of(found["expires_at"])})

    return Call("PUT", path_of(topic, "subscribers", quoted(client_id)), parse, body)


def renew(topic: str, client_id: str) -> Call[bool]:
    """Renew."""
    return Call("POST", path_of(topic, "subscribers", quoted(client_id), "renew"), lambda r: bool(json_of(r)["renewed"]))


def unsubscribe(topic: str, client_id: str, drop: bool) -> Call[None]:
    """Unsubscribe. Not repeated: the second time there is none."""
    params = {"drop": "true"} if drop else {}
    return Call("DELETE", path_of(topic, "subscribers", quoted(client_id)), lambda _: None, params=params, repeatable=False)


def subscribers(topic: str) -> Call[list[Subscriber]]:
    """The subscribers."""

    def parse(response: Any) -> list[Subscriber]:
        return [
            Subscriber(
                one["client_id"], one["queue"], one["key"], one["filter"],
                None if one["ttl_s"] is None else timedelta(seconds=one["ttl_s"]), time_of(one["expires_at"]), one["after_seq"],
                time_of(one["created_at"]),
            )
            for one in json_of(response)
        ]  # fmt: skip

    return Call("GET", path_of(topic, "subscribers"), parse)


def message_of(one: dict[str, Any]) -> Message[Any]:
    """A message."""
    return Message(one["seq"], parse_id(one["id"]), time_of(one["published_at"]), one["data"])


def _line(message: NewMessage[Any]) -> bytes:
    fields = {
        "data": orjson.Fragment(dump_json(message.data, "a message")),
        "id": str(make_id() if message.id is None else parse_id(message.id)),
        "unique": message.unique, "run_after": _moment(message.run_after), "expires_at": _moment(message.expires_at),
    }  # fmt: skip
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def _published(response: Any) -> Published:
    found = json_of(response)
    outcomes = None
    if found["outcomes"] is not None:
        outcomes = [
            ReceiverOutcome(one["client_id"], parse_id(one["job"]), Status(one["status"]), one["result"], one["errors"])
            for one in found["outcomes"]
        ]
    return Published(parse_id(found["id"]), found["seq"], found["receivers"], found["coalesced"], found["duplicate"], outcomes)


def _moment(given: datetime | timedelta | None) -> Any:
    return given.total_seconds() if isinstance(given, timedelta) else given
