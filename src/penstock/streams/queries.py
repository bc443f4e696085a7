"""One typed function for each SQL function about streams and their events. No logic beyond converting rows to models."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import orjson

from penstock.core import measuring
from penstock.core.serialization import dump_options
from penstock.errors import Unreadable
from penstock.postgres.database import Database, Transaction
from penstock.streams.models import Bounds, Chunk, Columns, Segment, StreamRecord

_APPEND = (
    "select * from penstock.append_routed($1, $2, $3, $4, $5::json[], $6::bytea[], $7, $8::json[], $9::timestamptz[], $10, $11,"
    " $12)"
)


# The driver needs more time to encode an array than for the rest of an append; one text costs nothing, and little to split.
_APPEND_JOINED = (
    "select * from penstock.append_routed($1, $2, $3, $4, string_to_array($5::text, e'\\x1e', e'\\x1d')::json[], $6::bytea[],"
    " string_to_array($7::text, e'\\x1e', e'\\x1d'), $8::json[], $9::timestamptz[], $10, $11, $12)"
)


_OF_STREAM = tuple(column.name for column in fields(StreamRecord))


_COMPACTION_S = 3600.0


# Limits of one call, see `penstock.read_chunks`.
_MOST_EVENTS = 1_000_000


_MOST_BYTES = 1 << 30


_SEPARATOR, _NULL = "\x1e", "\x1d"


_APPEND_EACH = "select * from penstock.append_each($1, $2::json[], $3, $4::json[], $5::timestamptz[], $6::bytea[])"


_READ = "select * from penstock.read_chunks($1, $2, $3, $4, $5, $6)"


_READ_ODD = """
    select partition, first_offset, events, penstock.shown_time(appended_at), keys,
           case when times is not null then
               array(select case when given = penstock.shown_time(given) then given end
                     from unnest(times) with ordinality as one (given, place) order by place)
           end,
           headers, data, bytes, offsets,
           array(select place::integer - 1 from unnest(times) with ordinality as one (given, place)
                 where given <> penstock.shown_time(given) order by place)
    from (select * from penstock.read_chunks($1, $2, $3, $4, $5, $6)) as chunk
"""


@dataclass(frozen=True, slots=True)
class Routed:
    """Events sorted by partition, `counts[i]` of them for `partitions[i]`, routed for `width` partitions."""

    width: int
    partitions: list[int]
    counts: list[int]
    columns: Columns


async def create_stream(database: Database, name: str, partitions: int, options: Mapping[str, Any]) -> StreamRecord:
    """Create a stream. Raises `Conflict` when it exists, `InvalidInput`."""
    return _record(
        await database.fetchrow(
            "select * from penstock.create_stream($1, $2, $3::jsonb)", name, partitions, dump_options(f"stream {name}", options)
        )
    )


async def change_stream(database: Database, name: str, options: Mapping[str, Any]) -> StreamRecord:
    """Change the given options. Raises `NotFound`, `InvalidInput`."""
    return _record(
        await database.fetchrow(
            "select * from penstock.change_stream($1, $2::jsonb)", name, dump_options(f"stream {name}", options)
        )
    )


async def declare_stream(
    database: Database, name: str, partitions: int, options: Mapping[str, Any], *, retry: bool = False
) -> StreamRecord:
    """Create a stream, or change its options when this declaration differs from the last one."""
    query = "select * from penstock.declare_stream($1, $2, $3::jsonb)"
    return _record(await database.fetchrow(query, name, partitions, dump_options(f"stream {name}", options), retry=retry))


async def grow_stream(database: Database, name: str, partitions: int) -> StreamRecord:
    """Give a stream more partitions. Raises `NotFound`, `InvalidInput`, `DatabaseUnavailable` when appends block it."""
    return _record(await database.fetchrow("select * from penstock.grow_stream($1, $2)", name, partitions))


async def alter_stream(database: Database, name: str, options: Mapping[str, Any], partitions: int | None) -> StreamRecord:
    """Change the given options and the number of partitions atomically. Raises as `change_stream` and `grow_stream`."""
    async with database.transaction() as transaction:
        row = await transaction.fetchrow(
            "select * from penstock.change_stream($1, $2::jsonb)", name, dump_options(f"stream {name}", options)
        )
        if partitions is not None:
            row = await transaction.fetchrow("select * from penstock.grow_stream($1, $2)", name, partitions)
    return _record(row)


async def drop_stream(database: Database, name: str, *, force: bool = False) -> None:
    """Drop a stream, and its tables that have no reader. Raises `NotFound`, and `Conflict` while a group has live members."""
    await database.fetch("select penstock.drop_stream($1, $2)", name, force)
    await drop_retired(database)


async def list_streams(database: Database) -> list[StreamRecord]:
    """All streams, by name."""
    return [_record(row) for row in await database.fetch("select * from penstock.streams order by name")]


async def find_stream(database: Database, name: str) -> StreamRecord | None:
    """A stream, or None."""
    row = await database.fetchrow("select * from penstock.streams where name = $1", name)
    return None if row is None else _record(row)


def append_call(
    name: str, routed: Routed, producer: str | None = None, sequence: int | None = None, user: str | None = None
) -> tuple[Any, ...]:
    """The statement that appends events, and its parameters. Its rows are (partition, first offset, events)."""
    columns = routed.columns
    payloads = None if columns.bytes else columns.payloads
    texts: list[Any] = [payloads, columns.keys]
    try:
        query, texts = _APPEND_JOINED, [_joined(column) for column in texts]
    except _NotJoined:
        query = _APPEND
    return (
        query,
        name,
        routed.width,
        routed.partitions,
        routed.counts,
        texts[0],
        columns.payloads if columns.bytes else None,
        texts[1],
        columns.headers,
        columns.times,
        producer,
        sequence,
        user,
    )


class _NotJoined(Exception):
    """A text contains the character that separates texts or stands for null."""


def _joined(texts: list[Any] | None) -> str | None:
    """Join texts into one."""
    if texts is None:
        return None
    nulls = texts.count(None)
    joined = _SEPARATOR.join([_NULL if text is None else text for text in texts] if nulls else texts)
    if not joined or joined.count(_SEPARATOR) != len(texts) - 1 or joined.count(_NULL) != nulls:
        raise _NotJoined
    return joined


def append_each_call(name: str, columns: Columns) -> tuple[Any, ...]:
    """The statement that routes and appends events, and its parameters. Its rows are (partition, offset) of each event."""
    return (
        _APPEND_EACH,
        name,
        None if columns.bytes else columns.payloads,
        columns.keys,
        columns.headers,
        columns.times,
        columns.payloads if columns.bytes else None,
    )


def as_json(columns: Columns) -> str:
    """Events as the document of `penstock.append_each_json`, which routes them itself."""
    documents = []
    for index, payload in enumerate(columns.payloads):
        document: dict[str, Any] = {}
        if payload is not None and columns.bytes:
            document["bytes"] = base64.b64encode(payload).decode()
        elif payload is not None:
            document["data"] = orjson.Fragment(payload)
        if columns.keys is not None:
            document["key"] = columns.keys[index]
        if columns.headers is not None and (headers := columns.headers[index]) is not None:
            document["headers"] = orjson.Fragment(headers)
        if columns.times is not None:
            document["time"] = columns.times[index]
        documents.append(document)
    return orjson.dumps(documents).decode()


async def append_routed(
    database: Database,
    name: str,
    routed: Routed,
    producer: str | None = None,
    sequence: int | None = None,
    user: str | None = None,
) -> list[Any]:
    """Append events. Returns (partition, first offset, events) of each chunk. Raises `Outgrown` when the width has changed.

    The name of a producer belongs to the database role, and within it to the user for whom the role appends, if any.
    """
    appended = await database.fetch(*append_call(name, routed, producer, sequence, user))
    if measuring.meter is not None:
        measuring.meter.appended(name, sum(routed.counts))
    return appended


async def last_sequence(database: Database, name: str, producer: str) -> int:
    """Number of the last batch of a producer of this database role; 0: it has none."""
    return int(await database.fetchval("select penstock.last_sequence($1, $2)", name, producer, retry=True))


async def begin_load(transaction: Transaction, name: str) -> int:
    """Begin a load in this transaction. Returns the number of partitions to route for."""
    return int((await transaction.fetchrow("select penstock.begin_load($1) as partitions", name))["partitions"])


async def copy_load(transaction: Transaction, chunks: AsyncIterable[tuple[Any, ...]]) -> None:
    """Copy chunks: (stream, partition, events, keys, times, headers, data, bytes)."""
    columns = ["stream", "partition", "events", "keys", "times", "headers", "data", "bytes"]
    await transaction.copy("loaded_chunks", columns, chunks)


async def end_load(transaction: Transaction, name: str, width: int) -> int:
    """Append the copied events. Returns their number. Raises `Outgrown`."""
    return sum(row["events"] for row in await transaction.fetch("select * from penstock.end_load($1, $2)", name, width))


async def read_chunks(
    database: Database, name: str, wanted: Mapping[int, int], limit: int, most_bytes: int = 8_388_608, *, id: int | None = None
) -> list[Chunk]:
    """Read from several partitions, {partition: offset}; see `penstock.read_chunks`. Raises `OffsetGone`, `NotFound`."""
    limits = min(limit, _MOST_EVENTS), max(1, min(most_bytes, _MOST_BYTES))
    given = (name, list(wanted.keys()), list(wanted.values()), *limits, id)
    try:
        rows = await database.fetch(_READ, *given)
    except Unreadable:
        # An event has a time that Python cannot represent: read again without such times, and mark their events.
        rows = await database.fetch(_READ_ODD, *given)
    return [Chunk(*row) for row in rows]


async def bounds(database: Database, name: str) -> dict[int, Bounds]:
    """The stored range of offsets of each partition. Raises `NotFound`."""
    rows = await database.fetch("select * from penstock.stream_bounds($1)", name)
    return {row["partition"]: Bounds(row["first_offset"], row["next_offset"]) for row in rows}


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """The stored range of offsets of a partition, with its stream.

    Attributes:
        stream: Name of the stream.
        partition: Number of the partition.
        first: First stored offset.
        next: Offset of the next event to be appended.
        compressed: Whether payloads are compressed.
        identity: Identity of the stream, which changes when the stream is dropped and created again.
        growths: Growths of the stream, at partition 0: (number of partitions after it, ends of the old ones).
        restored: Where the partition ended at each restore of the database, by the number of the restore.
    """

    stream: str
    partition: int
    first: int
    next: int
    compressed: bool
    identity: str
    growths: list[tuple[int, list[int]]]
    restored: dict[int, int]


async def bounds_of(database: Database, names: Sequence[str]) -> list[PartitionBounds]:
    """The stored range of offsets of each partition of these streams, in one snapshot. Raises `NotFound`."""
    return [
        PartitionBounds(
            row["stream"],
            row["partition"],
            row["first_offset"],
            row["next_offset"],
            row["compression"] is not None,
            row["identity"],
            [(one["width"], one["ends"]) for one in orjson.loads(row["growths"] or "[]")],
            {int(number): end for number, end in orjson.loads(row["restored"] or "{}").items()},
        )
        for row in await database.fetch("select * from penstock.bounds_of_streams($1)", names)
    ]


async def growths(database: Database) -> list[tuple[str, int, list[int]]]:
    """The growths of all streams: (stream, number of partitions after it, ends of the old ones)."""
    return [(row["stream"], row["width"], row["ends"]) for row in await database.fetch("select * from penstock.growths()")]


async def offsets_at(database: Database, name: str, time: datetime) -> dict[int, int]:
    """The offset in each partition of the first event that was appended at or after a time."""
    return {
        row["partition"]: row["event_offset"]
        for row in await database.fetch("select * from penstock.offsets_at($1, $2)", name, time)
    }


async def segments(database: Database, name: str) -> list[Segment]:
    """The segments of a stream, oldest first."""
    return [Segment(*row) for row in await database.fetch("select * from penstock.stream_segments($1)", name)]


async def wait_for_events(database: Database, name: str, channel: str) -> None:
    """Register an idle reader, which listens on a channel."""
    await database.fetch("select penstock.wait_for_events($1, $2)", name, channel)


async def wait_for_events_of(database: Database, names: Sequence[str], channel: str) -> None:
    """Register an idle reader of several streams, which listens on a channel."""
    await database.fetch("select penstock.wait_for_events_of($1, $2)", names, channel)


async def stop_waiting(database: Database, channel: str) -> None:
    """Remove the registration of an idle reader."""
    await database.fetch("select penstock.stop_waiting($1)", channel)


async def to_maintain(database: Database) -> list[str]:
    """The names of the streams for which `maintain_stream` may have something to do."""
    return [row["name"] for row in await database.fetch("select name from penstock.streams_to_maintain() as name")]


async def maintain_stream(database: Database, name: str) -> tuple[bool, int, bool]:
    """Roll segments and apply retention once. Returns (rolled, number retired, whether segments are to be compacted)."""
    row = await database.fetchrow("select * from penstock.maintain_stream($1)", name)
    return bool(row["rolled"]), int(row["retired"]), bool(row["compact"])


async def compact_stream(database: Database, name: str) -> int:
    """Rewrite segments of a bounded number of bytes. Returns the number of segments; 0: there are none left to rewrite."""
    return int((await database.fetch("select penstock.compact_stream($1)", name, timeout=_COMPACTION_S))[0][0])


async def drop_retired(database: Database) -> int:
    """Drop retired segments that have no reader. Returns their number."""
    return int(await database.fetchval("select penstock.drop_retired()"))


async def prune_staged(database: Database) -> int:
    """Drop a part of the rows that writers staged or loaded more than a day ago and never committed. Returns their number."""
    return int(await database.fetchval("select penstock.prune_staged()"))


def _record(row: Any) -> StreamRecord:
    return StreamRecord(**{column: row[column] for column in _OF_STREAM})
