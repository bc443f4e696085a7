"""Commands about topics: list, create, subscribe, unsubscribe, subscribers, publish, read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from penstock.cli.backend import BackendTopic, with_backend, with_topic
from penstock.cli.enqueueing import parse_json
from penstock.cli.output import AsJson, opened, out, pass_on_json, print_json, print_table
from penstock.cli.times import TIME, moment, moment_in_file, span
from penstock.errors import InvalidInput
from penstock.topics.models import NewMessage

app = typer.Typer(help="Topics: list, create, publish, subscribe, read.", invoke_without_command=True)
Name = Annotated[str, typer.Argument(help="Topic.")]
_BATCH = 1_000
_FIELDS = {"data", "id", "key", "unique", "run_after", "expires_at"}
Client = Annotated[str, typer.Argument(help="Client id: names the subscriber within the topic.")]


@app.callback()
@app.command("list")
def list_topics(context: typer.Context, as_json: AsJson = False) -> None:
    """Every topic: its subscribers, its last message, and what is stored."""
    if pass_on_json(context, as_json):
        return
    found = with_backend(lambda backend: backend.topic_counts())
    if as_json:
        print_json(found)
        return
    print_table(
        ["name", "subscribers", "last message", "published", "stored", "bytes", "catch up"],
        [(t.name, t.subscribers, t.last_seq, t.last_published_at, t.messages, t.bytes, t.catch_up) for t in found],
        empty="no topics yet",
    )


@app.command()
def create(
    name: Name,
    catch_up: Annotated[int | None, typer.Option(min=0, help="Messages that a new subscriber gets.")] = None,
    encrypted: Annotated[
        bool, typer.Option("--encrypted", help="Store messages encrypted: only applications with keys publish and receive them.")
    ] = False,
) -> None:
    """Create a topic, or change how many earlier messages new subscribers get, or encrypt what is published from now on."""
    with_backend(lambda backend: backend.topic(name, catch_up=catch_up, encrypted=encrypted).declare())
    out.print(f"created: {name}", highlight=False)


@app.command()
def publish(
    name: Name,
    data: Annotated[str | None, typer.Argument(help="Payload, JSON.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help='NDJSON, a message a line: {"data": ...}; - for standard input.')
    ] = None,
    id: Annotated[str | None, typer.Option(help="Identity; the same id again is the same message.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of the copies.")] = None,
    unique: Annotated[str | None, typer.Option(help="Coalescing key, for each subscriber.")] = None,
    run_after: Annotated[str | None, typer.Option(help=TIME)] = None,
    expires_at: Annotated[str | None, typer.Option(help=TIME)] = None,
    wait: Annotated[str | None, typer.Option(help="Wait so long for all receivers, and show their outcomes: 30s.")] = None,
    as_json: AsJson = False,
) -> None:
    """Publish a message, or many from a file, to all subscribers of a topic.

    With --wait the exit code is 1 unless all of them succeeded. A line of a file is an object with data, id, key, unique,
    run_after, expires_at, each optional; times have their zone: 2026-01-31T12:00:00Z.
    """
    if file is not None:
        if data is not None or id or key or unique or run_after or expires_at or wait:
            raise InvalidInput("what a file publishes is said in its lines", hint="Give a file, or a payload with its options.")
        count = with_topic(name, lambda topic: _publish_file(topic, file))
        out.print(f"{count:,} published" if not as_json else orjson.dumps({"published": count}).decode(), highlight=False)
        return
    not_before, not_after = (moment(text) if text else None for text in (run_after, expires_at))
    options: dict[str, Any] = {"background": False, "timeout": span(wait)} if wait else {}
    receipt = with_topic(
        name,
        lambda topic: topic.publish(
            parse_json("{}" if data is None else data, "the payload"),
            id=id,
            key=key,
            unique=unique,
            run_after=not_before,
            expires_at=not_after,
            **options,
        ),
    )
    if as_json:
        print_json(receipt)
    else:
        word = "published before" if receipt.duplicate else "published"
        out.print(f"{word}: {receipt.id}, number {receipt.seq}, to {receipt.receivers:,} subscribers", highlight=False)
        if receipt.outcomes:
            print_table(
                ["client id", "status", "result", "error"],
                [
                    (o.client_id, o.status, orjson.dumps(o.result).decode(), o.errors[-1].get("message") if o.errors else None)
                    for o in receipt.outcomes
                ],
                empty="",
            )
    if receipt.outcomes is not None and any(outcome.status != "succeeded" for outcome in receipt.outcomes):
        raise typer.Exit(1)


@app.command()
def subscribe(
    name: Name,
    client: Client,
    filter: Annotated[str | None, typer.Option(help="Only messages that contain this JSON.")] = None,
    ttl: Annotated[str | None, typer.Option(help="End it unless it is renewed in this time: 30s, 5m.")] = None,
    since: Annotated[int | None, typer.Option(min=0, help="Begin with the messages after this number.")] = None,
    as_json: AsJson = False,
) -> None:
    """Subscribe a client; again, renew it."""
    receipt = with_topic(
        name,
        lambda topic: topic.subscribe(
            client,
            filter=parse_json(filter, "the filter") if filter else None,
            ttl=span(ttl) if ttl else None,
            since=since,
        ),
    )
    if as_json:
        print_json(receipt)
        return
    word = "subscribed" if receipt.created else "was subscribed"
    replayed = f", with {receipt.replayed} earlier messages" if receipt.replayed else ""
    out.print(f"{word}: {client}, messages after {receipt.seq} go to the queue {receipt.queue}{replayed}", highlight=False)


@app.command()
def unsubscribe(
    name: Name,
    client: Client,
    drop: Annotated[bool, typer.Option("--drop", help="Archive what waits as expired.")] = False,
) -> None:
    """End a subscription."""
    ended = with_topic(name, lambda topic: topic.unsubscribe(client, drop=drop))
    out.print(f"{'unsubscribed' if ended else 'was not subscribed'}: {client}", highlight=False)


@app.command()
def subscribers(name: Name, as_json: AsJson = False) -> None:
    """List who is subscribed."""
    found = with_topic(name, lambda topic: topic.subscribers())
    if as_json:
        print_json(found)
        return
    print_table(
        ["client id", "queue", "filter", "since", "ends"],
        [
            (s.client_id, s.queue, None if s.filter is None else orjson.dumps(s.filter).decode(), s.created_at, s.expires_at)
            for s in found
        ],
        empty="no subscribers",
    )


@app.command()
def read(
    name: Name,
    since: Annotated[int | None, typer.Option(min=0, help="The number of the last message seen; none: from the oldest.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000)] = 100,
    as_json: AsJson = False,
) -> None:
    """Read messages, without a subscription."""
    found = with_topic(name, lambda topic: topic.read(since, limit=limit))
    if as_json:
        print_json(found)
        return
    print_table(
        ["number", "published", "id", "data"],
        [(m.seq, m.published_at, m.id, orjson.dumps(m.data).decode()) for m in found],
        empty="no messages",
    )


async def _publish_file(topic: BackendTopic, file: Path) -> int:
    count = 0
    with opened(file) as source:
        batch: list[NewMessage[Any]] = []
        for number, line in enumerate(source, 1):
            if line.strip():
                batch.append(_message(line, number))
            if len(batch) == _BATCH:
                await topic.publish_many(batch)
                count += len(batch)
                batch = []
        if batch:
            await topic.publish_many(batch)
    return count + len(batch)


def _message(line: bytes, number: int) -> NewMessage[Any]:
    fields = parse_json(line, f"line {number}")
    if not isinstance(fields, dict) or (unknown := sorted(set(fields) - _FIELDS)):
        found = f"the field {unknown[0]!r}" if isinstance(fields, dict) else type(fields).__name__
        raise InvalidInput(f"line {number} has {found}", hint=f"A line is an object with {', '.join(sorted(_FIELDS))}.")
    for field in ("run_after", "expires_at"):
        if fields.get(field) is not None:
            fields[field] = moment_in_file(f"line {number}: {field}", str(fields[field]))
    return NewMessage(**{"data": {}, **fields})
