"""The streams: partitions, size, retention, groups with their lag, events; seek with preview, skip, pause, append.

The dead letters have a page of their own, in dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.core.checks import parse_time
from penstock.core.serialization import load_json
from penstock.errors import InvalidInput, NotFound, OffsetGone, Unreadable
from penstock.http.auth import Role
from penstock.http.dashboard.view import Action, Done, Page, Shown, View, not_here, segment, whole_number
from penstock.http.streams.events import Piece, pieces_of
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.streams import group_queries
from penstock.streams import queries as streams
from penstock.streams.group_models import Lag
from penstock.streams.models import Bounds, Chunk, Segment, StreamRecord

EVENTS_ON_A_PAGE = 50
_MOST_BYTES = 1 << 20
_MOST_PARTITIONS = 512
_LONGEST_SHOWN = 2_000
_RATE_OVER = timedelta(minutes=5)
REPLAY = "penstock.replay"
"""The consumer group whose offsets say how far the dead letters were replayed."""


@dataclass(frozen=True, slots=True)
class _Stream:
    bounds: dict[int, Bounds]
    lags: list[Lag]
    before: Mapping[int, int]
    segments: list[Segment]

    @property
    def appended(self) -> int:
        """How many events were appended since `before`, the offsets of a while ago."""
        return sum(max(edge.next - self.before.get(at, edge.next), 0) for at, edge in self.bounds.items())


@dataclass(frozen=True, slots=True)
class ShownEvent:
    """An event as the page shows it."""

    partition: int
    offset: int
    key: str | None
    data: str
    headers: str
    appended_at: datetime | None


async def show(view: View) -> Shown:
    """All streams that the user may see."""
    records = [one for one in await view.read(streams.list_streams) if view.user.may(one.name)]
    lags = await view.read(health.stream_lags)
    section = view.section(records, lambda one: one.name)
    groups = {one.name: [lag for lag in lags if lag.stream == one.name] for one in section.rows}
    return Shown("Streams", "streams.html", {"streams": section.rows, "groups": groups, "section": section})


async def show_one(view: View) -> Shown:
    """One stream with its partitions and consumer groups."""
    record = await record_of(view)
    dead = await dead_letters_of(view, record)
    read = await view.read(_look, record.name)
    waits = {lag.group: lag.lag_s for lag in await view.read(health.stream_lags) if lag.stream == record.name}
    groups: dict[str, list[Lag]] = {}
    for lag in read.lags:
        groups.setdefault(lag.group, []).append(lag)
    return Shown(
        record.name,
        "stream.html",
        {
            "stream": record,
            "partitions": sorted(read.bounds.items())[:_MOST_PARTITIONS],
            "groups": groups,
            "waits": waits,
            "events": sum(one.events for one in read.segments),
            "bytes": sum(one.bytes for one in read.segments),
            "segments": len(read.segments),
            "rate": read.appended / _RATE_OVER.seconds,
            "dead": None if dead is None else dead.letters,
            "oldest": min((one.opened_at for one in read.segments), default=None),
        },
    )


async def events(view: View) -> Shown:
    """Events of a partition from an offset or a time on."""
    record = await record_of(view)
    bounds = await view.read(streams.bounds, record.name, kept_s=1.0)
    partition = number_of(view.query.get("partition", ""), 0)
    problem, found, offset = "", [], 0
    if partition not in bounds:
        problem = f"There is no partition {partition}."
    else:
        edge = bounds[partition]
        tail = view.query.get("offset", "") in ("", "tail") and not view.query.get("time")
        offset = max(edge.next - EVENTS_ON_A_PAGE, edge.first) if tail else number_of(view.query.get("offset", ""), edge.first)
        if view.query.get("time"):
            offset = (await _offsets_at(view, record.name, view.query["time"])).get(partition, edge.next)
        offset = min(max(offset, edge.first), edge.next)
        try:
            chunks = await chunks_of(view, record.name, partition, offset, edge)
            found = shown_events(view, record, chunks, offset)
        except OffsetGone:
            problem = "Retention has dropped these events meanwhile."
    wanted = view.query.get("key", "")
    return Shown(
        f"Events of {record.name}",
        "events.html",
        {
            "stream": record,
            "events": [event for event in found if not wanted or event.key == wanted],
            "partition": partition,
            "bounds": bounds.get(partition),
            "offset": offset,
            "next": found[-1].offset + 1 if found else None,
            "wanted": wanted,
            "missing": problem,
            "partitions": sorted(bounds)[:_MOST_PARTITIONS],
            "most": EVENTS_ON_A_PAGE,
        },
    )


async def seek_form(view: View) -> Shown:
    """What a seek of a group would change, and the form that makes it."""
    record, group = await record_of(view), view.parameters["group"]
    read = await view.read(_look, record.name)
    lags = [lag for lag in read.lags if lag.group == group]
    if not lags:
        raise not_here(f"consumer group {group}")
    given = {name: view.query.get(name, "") for name in ("to", "time", "partition", "offset")}
    plan: list[tuple[Lag, int, int]] = []
    problem = ""
    if any(given.values()):
        try:
            wanted = await wanted_offsets(view, record.name, read.bounds, given)
            plan = [(lag, wanted[lag.partition], wanted[lag.partition] - lag.next) for lag in lags if lag.partition in wanted]
        except InvalidInput as error:
            problem = f"{error.message}. {error.hint or ''}"
    values = {
        "stream": record,
        "group": group,
        "given": given,
        "plan": plan,
        "invalid": problem,
        "partitions": sorted(read.bounds),
    }
    return Shown(f"Seek {group}", "seek.html", values)


async def seek(view: View) -> Done:
    """Move a group; its members go on from there."""
    record, group = await record_of(view), view.parameters["group"]
    database = await view.database()
    given = {name: view.text(name) for name in ("to", "time", "partition", "offset")}
    offsets = await wanted_offsets(view, record.name, await streams.bounds(database, record.name), given)
    async with view.changing("seek", stream=record.name, group=group, **{k: v for k, v in given.items() if v}) as changed:
        moved = await group_queries.seek_group(database, record.name, group, offsets)
        changed(moved)
    return Done(f"streams/{segment(record.name)}", f"{moved} partitions of {group} were moved.")


async def skip(view: View) -> Done:
    """Move a group behind the event at which it fails, and end the quarantine of the partition."""
    record, group = await record_of(view), view.parameters["group"]
    partition, offset = view.number("partition"), view.number("offset")
    if partition is None or offset is None:
        raise InvalidInput("a partition and an offset are needed", hint="Take them from the page.")
    database = await view.database()
    lags = {lag.partition: lag for lag in await group_queries.lag(database, record.name, group)}
    if partition not in lags or lags[partition].next != offset:
        raise InvalidInput("the group has moved on meanwhile", hint="Load the page again.")
    async with view.changing("skip event", stream=record.name, group=group, partition=partition, offset=offset) as changed:
        changed(await group_queries.seek_group(database, record.name, group, {partition: offset + 1}))
        await group_queries.resume_partitions(database, record.name, group, [partition])
    return Done(f"streams/{segment(record.name)}", f"{group} goes on behind offset {offset} of partition {partition}.")


async def pause(view: View) -> Done:
    """Give a group no more events of a partition, or of any."""
    return await _pause(view, on=True)


async def resume(view: View) -> Done:
    """End a pause or quarantine of a partition, or of all."""
    return await _pause(view, on=False)


async def _pause(view: View, *, on: bool) -> Done:
    record, group, partition = await record_of(view), view.parameters["group"], view.number("partition")
    partitions = None if partition is None else [partition]
    database = await view.database()
    async with view.changing(
        "pause group" if on else "resume group", stream=record.name, group=group, partition=partition
    ) as changed:
        if on:
            number = await group_queries.pause_partitions(database, record.name, group, partitions, f"by {view.user.name}")
        else:
            number = await group_queries.resume_partitions(database, record.name, group, partitions)
        changed(number)
    return Done(f"streams/{segment(record.name)}", f"{number} partitions of {group} {'are paused' if on else 'go on'}.")


async def append(view: View) -> Done:
    """Append one event."""
    record = await record_of(view)
    data = load_json(view.raw_text("data") or "null")
    stream = await view.app.find_stream(record.name)
    async with view.changing("append", stream=record.name):
        position = await stream.append(data, key=view.text("key") or None)
    place = "" if position is None else f" at offset {position.offset} of partition {position.partition}"
    return Done(f"streams/{segment(record.name)}", f"Appended{place}.")


def shown_events(view: View, record: StreamRecord, chunks: Sequence[Chunk], offset: int) -> list[ShownEvent]:
    """The events of chunks of a partition from an offset on."""
    return [
        ShownEvent(
            event["partition"],
            event["offset"],
            event.get("key"),
            shown_text(view, record.name, event["bytes"] if "bytes" in event else event.get("data")),
            shown_text(view, record.name, event["headers"]) if event.get("headers") else "",
            datetime.fromisoformat(event["appended_at"]) if event.get("appended_at") else None,
        )
        for event in parsed_events(record, chunks, offset)
    ]


def parsed_events(record: StreamRecord, chunks: Sequence[Chunk], offset: int) -> list[dict[str, Any]]:
    """The same as they are stored, for one page."""
    pieces = pieces_of(record, chunks, {chunk.partition: offset for chunk in chunks})
    return [_parsed(piece, place) for piece in pieces for place in range(len(piece.events))][:EVENTS_ON_A_PAGE]


def _parsed(piece: Piece, place: int) -> dict[str, Any]:
    """An event of a piece; of one that cannot be read, such as one that is nested too deeply, its place."""
    try:
        event: dict[str, Any] = load_json(piece.events[place].decode())
    except Unreadable as error:
        return {"partition": piece.partition, "offset": piece.offsets[place], "data": f"cannot be read: {error.message}"[:200]}
    return event


def shown_text(view: View, name: str, value: Any) -> str:
    """The beginning of a document of an event, without what is masked."""
    return beginning_of(view.masking.json_of(name, value))


def beginning_of(text: str) -> str:
    """The beginning of a text, which all who may append can write."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


async def wanted_offsets(view: View, name: str, bounds: Mapping[int, Bounds], given: Mapping[str, str]) -> dict[int, int]:
    """The offsets that a seek goes to: the beginning or end, a time, or an offset of one partition. Raises `InvalidInput`."""
    if given.get("to") in ("earliest", "latest"):
        return {at: edge.first if given["to"] == "earliest" else edge.next for at, edge in bounds.items()}
    if given.get("time"):
        return await _offsets_at(view, name, given["time"])
    partition, offset = whole_number(given.get("partition", "")), whole_number(given.get("offset", ""))
    if partition is not None and offset is not None:
        if partition not in bounds or not bounds[partition].first <= offset <= bounds[partition].next:
            raise InvalidInput(f"partition {partition} has no offset {offset}", hint="The page of the stream shows the bounds.")
        return {partition: offset}
    raise InvalidInput("where to is not clear", hint="Give the beginning or end, a time, or a partition and an offset.")


async def _offsets_at(view: View, name: str, given: str) -> dict[int, int]:
    return await view.read(streams.offsets_at, name, parse_time("time", given))


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The stream of the dead letters of a stream.

    Attributes:
        record: The stream.
        bounds: What is stored of each partition.
        replayed: Up to which offset they were replayed, by partition.
    """

    record: StreamRecord
    bounds: Mapping[int, Bounds]
    replayed: Mapping[int, int]

    @property
    def letters(self) -> int:
        """How many are stored."""
        return sum(edge.next - edge.first for edge in self.bounds.values())

    @property
    def left(self) -> int:
        """How many of them were not replayed."""
        return sum(edge.next - self.begin(partition) for partition, edge in self.bounds.items())

    def begin(self, partition: int) -> int:
        """The offset of the first one that was not replayed."""
        edge = self.bounds[partition]
        return min(max(self.replayed.get(partition, 0), edge.first), edge.next)


async def dead_letters_of(view: View, record: StreamRecord) -> DeadLetters | None:
    """The dead letters of a stream that the user may see; None: no event of it was dead-lettered."""
    name = f"{record.name}.dead"
    dead = next((one for one in await view.read(streams.list_streams) if one.name == name), None)
    if dead is None or not view.user.may(record.name):
        return None
    return await view.read(_look_at_dead, dead, kept_s=1.0)


async def _look_at_dead(database: Database, dead: StreamRecord) -> DeadLetters:
    try:
        lags = await group_queries.lag(database, dead.name, REPLAY)
    except NotFound:
        # Nothing was replayed yet.
        lags = []
    return DeadLetters(dead, await streams.bounds(database, dead.name), {lag.partition: lag.next for lag in lags})


async def record_of(view: View) -> StreamRecord:
    """The stream of the path. Raises `ApiError` 404."""
    name = view.parameters["name"]
    records = await view.read(streams.list_streams)
    found = next((one for one in records if one.name == name and view.user.may(name)), None)
    if found is None:
        raise not_here(f"stream {name}")
    return found


async def _look(database: Database, name: str) -> _Stream:
    try:
        return _Stream(
            await streams.bounds(database, name),
            await group_queries.lag(database, name, None),
            await streams.offsets_at(database, name, datetime.now(UTC) - _RATE_OVER),
            await streams.segments(database, name),
        )
    except NotFound:
        return _Stream({}, [], {}, [])


async def chunks_of(view: View, name: str, partition: int, offset: int, edge: Bounds) -> list[Chunk]:
    """The chunks of a partition with the events of one page from an offset on."""
    # An offset names the same events for ever, until retention drops them; of the last page there may be more now.
    end = edge.next if edge.next - offset < EVENTS_ON_A_PAGE else None
    return await view.read(_chunks, name, partition, offset, end, kept_s=2.0)


async def _chunks(database: Database, name: str, partition: int, offset: int, end: int | None) -> list[Chunk]:
    return await streams.read_chunks(database, name, {partition: offset}, EVENTS_ON_A_PAGE, _MOST_BYTES)


def number_of(text: str, otherwise: int) -> int:
    """A number of an address; `otherwise` where it has none."""
    found = whole_number(text)
    return otherwise if found is None else found


PAGES = [
    Page("streams", show),
    Page("streams/{name}", show_one),
    Page("streams/{name}/events", events),
    Page("streams/{name}/groups/{group}/seek", seek_form, Role.ADMIN),
]
ACTIONS = [
    Action("streams/{name}/append", append, Role.ENQUEUE),
    Action("streams/{name}/groups/{group}/seek-to", seek),
    Action("streams/{name}/groups/{group}/skip", skip),
    Action("streams/{name}/groups/{group}/pause", pause),
    Action("streams/{name}/groups/{group}/resume", resume),
]
