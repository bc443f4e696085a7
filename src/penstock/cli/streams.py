"""Commands about streams: penstock streams create, list, append, tail, groups, lag, reset, and what else steers them."""

from __future__ import annotations

from contextlib import aclosing, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from penstock.cli import writers
from penstock.cli.backend import BackendStream, with_backend, with_stream
from penstock.cli.enqueueing import parse_json
from penstock.cli.output import AsJson, opened, out, print_json, print_table, say
from penstock.cli.times import local_time, shown
from penstock.cli.types import parse_options
from penstock.core.checks import parse_time
from penstock.errors import InvalidInput
from penstock.streams.group_models import Lag, held_back
from penstock.streams.models import Event, NewEvent, Start

app = typer.Typer(help="Streams: create, append, tail, and consumer groups.", no_args_is_help=True)
app.add_typer(writers.app, name="writers")
Name = Annotated[str, typer.Argument(help="Stream.")]
Group = Annotated[str, typer.Argument(help="Consumer group.")]
Partition = Annotated[list[int] | None, typer.Option("--partition", "-p", help="Only this partition; may be repeated.")]
Option = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help='keep_age="7 days", compact=true, ...; may be repeated.'),
]
_BATCH = 5_000
_FIELDS = {"data", "key", "headers", "time"}


@app.command()
def create(
    name: Name,
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="Parts, shared among the consumers of a group.")] = 16,
    options: Option = None,
) -> None:
    """Create a stream."""
    with_backend(lambda backend: backend.create_stream(name, partitions, **parse_options(options)))
    out.print(f"created: {name}, {partitions} partitions", highlight=False)


@app.command()
def change(name: Name, options: Option = None) -> None:
    """Change options of a stream."""
    with_stream(name, lambda stream: stream.change(**parse_options(options)))
    out.print(f"changed: {name}", highlight=False)


@app.command()
def grow(name: Name, partitions: Annotated[int, typer.Argument(help="How many it is to have.")]) -> None:
    """Give a stream more partitions while it is in use; the order of each key is kept."""
    with_stream(name, lambda stream: stream.grow(partitions))
    out.print(f"{name} has {partitions} partitions", highlight=False)


@app.command()
def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option(help="Also while consumers of it run; they end.")] = False,
) -> None:
    """Drop a stream with its events and consumer groups. Its dead letters are a stream of their own and stay."""
    if not yes:
        typer.confirm(f"Drop stream {name} with all its events?", abort=True)
    with_stream(name, lambda stream: stream.drop(force=force))
    out.print(f"dropped: {name}", highlight=False)


@app.command("list")
def list_streams(as_json: AsJson = False) -> None:
    """All streams: how many events, how large, how long they are kept."""
    found = with_backend(lambda backend: backend.list_streams())
    if as_json:
        print_json(found)
    else:
        columns = ["name", "partitions", "events", "bytes", "segments", "format", "keep_age", "compact", "created_at"]
        print_table(columns, [[getattr(row, column) for column in columns] for row in found], empty="no streams yet")


@app.command()
def append(
    name: Name,
    data: Annotated[str | None, typer.Argument(help="Payload, JSON.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help='NDJSON, an event a line: {"data": ..., "key": ...}; - for standard input.'),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Events of one key keep their order.")] = None,
    as_json: AsJson = False,
) -> None:
    """Append an event, or many from a file.

    A line of a file is an object with data, key, headers, time, each optional.
    """
    if (file is None) == (data is None):
        raise InvalidInput("give a payload or a file")

    async def one(stream: BackendStream) -> Any:
        return await stream.append(parse_json(data or "", "the payload"), key=key)

    async def many(stream: BackendStream) -> int:
        count = 0
        with opened(file or Path("-")) as source:
            batch: list[Any] = []
            for number, line in enumerate(source, 1):
                if line.strip():
                    batch.append(_event(line, number))
                if len(batch) == _BATCH:
                    await stream.append_many(batch)
                    count += len(batch)
                    batch = []
            await stream.append_many(batch)
        return count + len(batch)

    if file is None:
        position = with_stream(name, one)
        say(position, f"appended: partition {position.partition}, offset {position.offset}", as_json)
    else:
        count = with_stream(name, many)
        out.print(f"{count:,} appended" if not as_json else orjson.dumps({"appended": count}).decode(), highlight=False)


@app.command()
def tail(
    name: Name,
    start: Annotated[
        str, typer.Option("--from", help="earliest, latest, or a time, without a zone in that of the terminal.")
    ] = "latest",
    partition: Partition = None,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """Print events as they come, until Ctrl-C."""
    place = _start(start)

    async def run(stream: BackendStream) -> None:
        seen = 0
        async with aclosing(stream.tail(place, partitions=partition)) as events:
            async for event in events:
                _show(event, as_json)
                seen += 1
                if seen == limit:
                    return

    with suppress(KeyboardInterrupt):
        with_stream(name, run)


@app.command()
def groups(name: Name, as_json: AsJson = False) -> None:
    """The consumer groups of a stream: their members, how far behind they are, what is paused or waits for a paused partition."""
    lags = with_stream(name, lambda stream: stream.lag())
    columns = ["group", "owners", "lag", "unowned", "paused", "quarantined", "halted", "failing", "waiting"]
    groups: dict[str, dict[str, Any]] = {}
    for lag in lags:
        group = groups.setdefault(lag.group, {**dict.fromkeys(columns, 0), "group": lag.group, "owners": set()})
        group["lag"] += lag.lag
        group["unowned"] += lag.owner is None
        group["paused"] += lag.paused_at is not None
        group["quarantined"] += lag.quarantined
        group["halted"] += lag.halt_error is not None
        group["failing"] += lag.failing_since is not None
        group["waiting"] += bool(lag.waits_for)
        group["owners"] |= {lag.owner} - {None}
    found = [{**group, "owners": len(group["owners"])} for group in groups.values()]
    if as_json:
        print_json(found)
        return
    print_table(columns, [[row[column] for column in columns] for row in found], empty="no consumer groups yet")
    _say_held_back(name, lags)


@app.command()
def lag(
    name: Name, group: Annotated[str | None, typer.Argument(help="Only this consumer group.")] = None, as_json: AsJson = False
) -> None:
    """How far groups are in each partition."""
    found = with_stream(name, lambda stream: stream.lag(group))
    if as_json:
        print_json(found)
        return
    print_table(
        ["group", "partition", "next", "end", "lag", "owner", "committed at", "paused since", "reason", "waits for"],
        [
            (
                f.group, f.partition, f.next, f.end, f.lag, f.owner, f.committed_at, f.paused_at,
                f.pause_reason or (f"halted: {f.halt_error}" if f.halt_error else "fails" if f.failing_since else None),
                ", ".join(map(str, f.waits_for)) or None,
            )
            for f in found
        ],
        empty="no consumer groups yet",
    )  # fmt: skip
    _say_failing(found)
    _say_held_back(name, found)


@app.command()
def reset(
    name: Name,
    group: Group,
    to: Annotated[
        str,
        typer.Option(help="earliest, latest, a time (without a zone in that of the terminal), or an offset (with --partition)."),
    ],
    partition: Partition = None,
) -> None:
    """Move a group to another place; its consumers go on from there."""

    async def run(stream: BackendStream) -> dict[int, int]:
        if to.isdecimal():
            if not partition:
                raise InvalidInput("an offset needs its partition", hint="Give --partition.")
            offsets: Start = dict.fromkeys(partition, int(to))
        elif partition:
            offsets = {at: offset for at, offset in (await stream.offsets_at(start)).items() if at in partition}
        else:
            offsets = start
        await stream.seek(group, offsets)
        return {lag.partition: lag.next for lag in await stream.lag(group) if not partition or lag.partition in partition}

    start = "latest" if to.isdecimal() else _start(to)
    offsets = with_stream(name, run)
    if isinstance(start, datetime):
        out.print(f"{group} goes on with what was appended from {shown(start)} on", highlight=False, markup=False)
    print_table(["partition", "next"], list(offsets.items()), empty="nothing to move")


@app.command()
def pause(
    name: Name,
    group: Group,
    partition: Partition = None,
    reason: Annotated[str | None, typer.Option(help="Shown to others.")] = None,
) -> None:
    """Give a group no more events (of these partitions)."""
    count = with_stream(name, lambda stream: stream.pause(group, partition, reason=reason))
    out.print(f"paused: {count} partitions")


@app.command()
def resume(name: Name, group: Group, partition: Partition = None) -> None:
    """End a pause or quarantine."""
    count = with_stream(name, lambda stream: stream.resume(group, partition))
    out.print(f"resumed: {count} partitions")


@app.command("replay-dead")
def replay_dead(
    name: Name,
    offset: Annotated[
        int | None, typer.Option(min=0, help="Of a dead letter, with --partition: replay from there on, also what was replayed.")
    ] = None,
    partition: Partition = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Most of them.")] = 1_000,
) -> None:
    """Append dead letters that were not replayed to the stream again, for the consumer group that put them aside."""
    if (offset is None) != (not partition):
        raise InvalidInput("an offset needs its partition", hint="Give --offset and --partition, or neither.")
    offsets = None if offset is None else dict.fromkeys(partition or [], offset)

    count = with_stream(name, lambda stream: stream.replay_dead(offsets=offsets, limit=limit))
    out.print(f"replayed: {count}")


def _say_failing(lags: list[Lag]) -> None:
    for lag in lags:
        if lag.failing_since is not None:
            out.print(
                f"group {lag.group}: partition {lag.partition} fails at {lag.failing_offset} since"
                f" {shown(lag.failing_since)}, attempt {lag.failing_attempt} or later: {lag.failing_error}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip


def _say_held_back(name: str, lags: list[Lag]) -> None:
    for held in held_back(lags):
        out.print(
            f"group {held.group}: {len(held.holds)} new partitions wait for partition {held.partition}, which is paused."
            f" Resume it: penstock streams resume {name} {held.group} -p {held.partition}; or move the group past what is there:"
            f" penstock streams reset {name} {held.group} -p {held.partition} --to OFFSET",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip


def _start(text: str) -> Start:
    named: dict[str, Literal["earliest", "latest"]] = {"earliest": "earliest", "latest": "latest"}
    if text in named:
        return named[text]
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"cannot start at {text!r}: write earliest, latest, or a time such as 2026-01-31T12:00:00Z"
        ) from None
    return local_time(text)


def _show(event: Event[Any], as_json: bool) -> None:
    data = event.data.hex() if isinstance(event.data, bytes) else event.data
    if as_json:
        fields = {
            "partition": event.partition, "offset": event.offset, "key": event.key, "data": data, "headers": event.headers,
            "time": event.time, "appended_at": event.appended_at,
        }  # fmt: skip
        typer.echo(orjson.dumps(fields).decode())
    else:
        typer.echo(f"{event.partition}:{event.offset}\t{event.key or '-'}\t{orjson.dumps(data).decode()}")


def _event(line: bytes, number: int) -> NewEvent[Any]:
    fields = parse_json(line, f"line {number}")
    if not isinstance(fields, dict) or (unknown := sorted(set(fields) - _FIELDS)):
        found = f"the field {unknown[0]!r}" if isinstance(fields, dict) else type(fields).__name__
        raise InvalidInput(f"line {number} has {found}", hint=f"A line is an object with {', '.join(sorted(_FIELDS))}.")
    if fields.get("time") is not None:
        fields["time"] = parse_time(f"line {number}: time", str(fields["time"]))
    return NewEvent(**{"data": None, **fields})
