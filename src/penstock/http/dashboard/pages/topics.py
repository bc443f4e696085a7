"""The topics: subscribers, what waits for each, the last messages and their outcomes; subscribe, unsubscribe, publish."""

from __future__ import annotations

from dataclasses import dataclass, replace
from uuid import UUID

from penstock.core.serialization import load_json
from penstock.errors import InvalidInput, NotFound
from penstock.http.auth import Role
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here, segment
from penstock.postgres.database import Database
from penstock.topics import queries as topics
from penstock.topics.models import Message, ReceiverOutcome, Subscriber, TopicCounts

_MOST_SHOWN = 200
_MESSAGES = 30
_LONGEST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class _Topic:
    subscribers: list[Subscriber]
    messages: list[Message[str]]


async def show(view: View) -> Shown:
    """All topics that the user may see."""
    section = view.section(await _counts(view), lambda one: one.name)
    return Shown("Topics", "topics.html", {"topics": section.rows, "section": section})


async def show_one(view: View) -> Shown:
    """One topic with its subscribers and last messages."""
    counts = await _one(view)
    read = await view.read(_look, counts)
    # A filter holds values of payloads.
    listed = [replace(one, filter=view.masking.shown(counts.name, one.filter)) for one in read.subscribers[:_MOST_SHOWN]]
    loads = await view.loads([one.queue for one in listed if one.key is None])
    subscribers = [(one, loads.get(one.queue) if one.key is None else None) for one in listed]
    values = {
        "topic": counts, "subscribers": subscribers, "more": len(read.subscribers) - _MOST_SHOWN,
        "messages": [(one, _shortened(view, counts.name, one.data)) for one in reversed(read.messages)],
    }  # fmt: skip
    return Shown(counts.name, "topic.html", values)


async def message(view: View) -> Shown:
    """The outcomes of a message at each receiver."""
    counts = await _one(view)
    try:
        id = UUID(view.parameters["id"])
    except ValueError:
        raise not_here(f"message {view.parameters['id']}") from None
    found = await view.read(_outcomes, counts.name, id)
    if found is None:
        raise not_here(f"message {id}")
    return Shown(f"Message of {counts.name}", "message.html", {"topic": counts, "id": id, "outcomes": found})


async def publish(view: View) -> Done:
    """Publish one message."""
    counts = await _one(view)
    data = load_json(view.raw_text("data") or "null")
    topic = await view.app.find_topic(counts.name)
    async with view.changing("publish", topic=counts.name) as changed:
        published = await topic.publish(data)
        changed(published.receivers)
    return Done(f"topics/{segment(counts.name)}/messages/{published.id}", "Published.")


async def subscribe(view: View) -> Done:
    """Add a subscriber."""
    counts, client = await _one(view), view.text("client_id")
    if not client:
        raise InvalidInput("the client id is empty", hint="Name the subscriber.")
    topic = await view.app.find_topic(counts.name)
    async with view.changing("subscribe", topic=counts.name, client_id=client):
        await topic.subscribe(client)
    return Done(f"topics/{segment(counts.name)}", f"{client} gets each message from now on.")


async def unsubscribe(view: View) -> Done:
    """End a subscription; what waits for it stays until it is delivered."""
    counts, client = await _one(view), view.text("client_id")
    async with view.changing("unsubscribe", topic=counts.name, client_id=client):
        ended = await topics.unsubscribe(await view.database(), counts.name, client)
    return Done(f"topics/{segment(counts.name)}", f"{client} gets no more messages." if ended else f"{client} is no subscriber.")


async def _counts(view: View) -> list[TopicCounts]:
    return [one for one in await view.read(topics.counts) if view.user.may(one.name)]


async def _one(view: View) -> TopicCounts:
    name = view.parameters["name"]
    found = next((one for one in await _counts(view) if one.name == name), None)
    if found is None:
        raise not_here(f"topic {name}")
    return found


async def _look(database: Database, counts: TopicCounts) -> _Topic:
    try:
        _, subscribers = await topics.list_subscribers(database, counts.name)
        since = max(counts.last_seq - _MESSAGES, 0)
        kept = max(since, counts.last_seq - counts.messages)
        return _Topic(subscribers or [], await topics.read_raw(database, counts.name, kept, _MESSAGES))
    except NotFound:
        return _Topic([], [])


async def _outcomes(database: Database, topic: str, id: UUID) -> list[ReceiverOutcome] | None:
    row = await database.fetchrow("select topic from penstock.topic_messages where id = $1", id)
    if row is None or row["topic"] != topic:
        return None
    return await topics.outcomes(database, id)


def _shortened(view: View, name: str, text: str) -> str:
    text = view.masking.json_text(name, text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


PAGES = [Page("topics", show), Page("topics/{name}", show_one), Page("topics/{name}/messages/{id}", message)]
ACTIONS = [
    Action("topics/{name}/publish", publish, Role.ENQUEUE),
    Action("topics/{name}/subscribe", subscribe, Role.WORK),
    Action("topics/{name}/unsubscribe", unsubscribe, Role.WORK),
]
