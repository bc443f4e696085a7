"""The calls about topics as data. See `calls`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import orjson

from penstock.client.answers import json_of, outcomes_of, reader
from penstock.client.call import Call, quoted
from penstock.core.checks import check_moment
from penstock.core.records import from_object
from penstock.core.serialization import dump_json
from penstock.jobs.models import make_id
from penstock.jobs.records import parse_id
from penstock.topics.models import Message, NewMessage, Published, Subscribed, Subscriber, TopicCounts, TopicRecord


def path_of(topic: str, *rest: str) -> str:
    """A path under a topic."""
    return "/".join(["/v1/topics", quoted(topic), *rest])


def topics() -> Call[list[TopicCounts]]:
    """All topics."""
    return Call("GET", "/v1/topics", reader(list[TopicCounts]))


def details(topic: str) -> Call[TopicRecord]:
    """One topic."""
    return Call("GET", path_of(topic), reader(TopicRecord))


def declare(topic: str, catch_up: int | None, encrypted: bool | None = None) -> Call[None]:
    """Make or change a topic."""
    body = {"name": topic, "catch_up": catch_up, "encrypted": encrypted}
    return Call("POST", "/v1/topics", lambda _: None, {name: value for name, value in body.items() if value is not None})


def publish(
    topic: str, data: Any, id: UUID | str | None, unique: str | None, run_after: datetime | timedelta | None,
    expires_at: datetime | timedelta | None, background: bool, timeout_s: float, key: str | None,
) -> Call[Published]:  # fmt: skip
    """Publish. The id is made here, so that it can be repeated."""
    new_id = make_id() if id is None else parse_id(id)
    body = {
        "data": {} if data is None else data, "id": str(new_id), "unique": unique, "run_after": _moment("run_after", run_after),
        "expires_at": _moment("expires_at", expires_at), "background": background, "timeout": f"{timeout_s:.3f}s", "key": key,
    }  # fmt: skip
    return Call(
        "POST", path_of(topic, "messages"), reader(Published), {name: value for name, value in body.items() if value is not None}
    )


def publish_many(topic: str, messages: Iterable[Any]) -> Call[int]:
    """Publish messages. The ids are made here, so that it can be repeated."""
    lines = [_line(message if isinstance(message, NewMessage) else NewMessage(message)) for message in messages]

    def parse(response: Any) -> int:
        return len(outcomes_of(response, "message", len(lines)))

    return Call("POST", path_of(topic, "messages"), parse, lines=b"\n".join(lines))


def read(topic: str, since: int | None, limit: int) -> Call[list[Message[Any]]]:
    """Read messages."""
    params = {"limit": str(limit)} | ({} if since is None else {"since": str(since)})
    return Call("GET", path_of(topic, "messages"), reader(list[Message[Any]]), params=params)


def subscribe(topic: str, client_id: str, ttl: timedelta | None, filter: Any, since: int | None) -> Call[Subscribed]:
    """Subscribe."""
    body = {"ttl_s": None if ttl is None else ttl.total_seconds(), "filter": filter, "since": since}
    return Call("PUT", path_of(topic, "subscribers", quoted(client_id)), reader(Subscribed), body)


def renew(topic: str, client_id: str) -> Call[bool]:
    """Renew."""
    return Call("POST", path_of(topic, "subscribers", quoted(client_id), "renew"), lambda r: bool(json_of(r)["renewed"]))


def unsubscribe(topic: str, client_id: str, drop: bool) -> Call[None]:
    """Unsubscribe. Not repeated: the second time there is none."""
    params = {"drop": "true"} if drop else {}
    return Call("DELETE", path_of(topic, "subscribers", quoted(client_id)), lambda _: None, params=params, repeatable=False)


def subscribers(topic: str) -> Call[list[Subscriber]]:
    """The subscribers."""
    return Call("GET", path_of(topic, "subscribers"), reader(list[Subscriber]))


def message_of(one: dict[str, Any]) -> Message[Any]:
    """A message."""
    return from_object(Message[Any], one)


def _line(message: NewMessage[Any]) -> bytes:
    fields = {
        "data": orjson.Fragment(dump_json(message.data, "a message")),
        "id": str(make_id() if message.id is None else parse_id(message.id)),
        "unique": message.unique, "run_after": _moment("run_after", message.run_after),
        "expires_at": _moment("expires_at", message.expires_at), "key": message.key,
    }  # fmt: skip
    return orjson.dumps({name: value for name, value in fields.items() if value is not None})


def _moment(what: str, given: datetime | timedelta | None) -> Any:
    if given is not None:
        check_moment(what, given)
    return given.total_seconds() if isinstance(given, timedelta) else given
