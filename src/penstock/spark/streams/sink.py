"""Writes a DataFrame to streams: each row becomes one event, exactly once, by the method of `penstock.spark.writing`.

A task routes keys as any producer does and stages events in the chunks in which the stream will store them. The commit, which
locks the partitions, then copies chunks without reading them. When a stream has grown meanwhile, the commit routes again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import orjson

from penstock.errors import InvalidInput, NotFound
from penstock.spark import staging
from penstock.spark.blocking import DATABASES
from penstock.spark.json.to_json import as_json, in_json
from penstock.spark.streams.options import EventWriteOptions
from penstock.spark.writing import Stage, Staged, check_times, copy
from penstock.streams import queries as streams
from penstock.streams.models import CHUNK, StreamRecord
from penstock.streams.partitioner import Router

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_PAIRS = "array<struct<key:string,value:"
COLUMNS = {
    "value": ("string", "binary", "struct<", "map<string,", "array<"),
    "key": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int", "bigint", "smallint"),
    "happened_at": ("timestamp",),
    "headers": (_PAIRS, "map<string,", "string"),
}
# Columns that a reader returns and a writer cannot set; they are ignored so that a DataFrame that was read can be written.
_IGNORED = ("offset", "timestamp")
_HINT = f"The columns are {', '.join(COLUMNS)}. All but value may be left out, topic when the option stream is set."


def event_stage(options: EventWriteOptions, schema: StructType) -> Stage:
    """How rows with this schema are staged as events. Raises `InvalidInput` unless the columns are those of events."""
    check_schema(options, schema)
    return partial(stage, options)


def check_schema(options: EventWriteOptions, schema: StructType) -> None:
    """Raise `InvalidInput` unless the columns are those of events."""
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if unknown := [name for name in kinds if name not in COLUMNS and name not in _IGNORED]:
        raise InvalidInput(f"an event has no column {unknown[0]}", hint=_HINT)
    if "value" not in kinds:
        raise InvalidInput("the column value is missing", hint=_HINT)
    if options.stream is None and "topic" not in kinds:
        raise InvalidInput(
            "neither an option nor a column says which stream the rows are for",
            hint='Set option("stream", "..."), or have a column topic.',
        )
    for name, wanted in COLUMNS.items():
        kind = kinds.get(name)
        if kind is not None and not any(
            kind == one or (one.endswith(("<", ",", ":")) and kind.startswith(one)) for one in wanted
        ):
            raise InvalidInput(f"the column {name} is {kind}", hint=f"It can be {', '.join(wanted)}. {_HINT}")


def stage(options: EventWriteOptions, of: staging.Batch, batches: Iterator[pa.RecordBatch]) -> Staged:
    """Copy the rows of a task to the staging table, under a name of this attempt."""
    part = of.part()
    first = next(batches, None)
    if first is None:
        return Staged(of, part, {})
    with DATABASES.lent(options.url) as database:
        known = {stream.name: stream for stream in database.keep_trying(lambda: streams.list_streams(database.database))}
    chunks = Chunks(known, options.stream, of.writer, part)

    def staged() -> Iterator[pa.RecordBatch]:
        batch: pa.RecordBatch | None = first
        while batch is not None:
            yield from chunks.of(batch)
            batch = next(batches, None)

    copy(options.url, staging.EVENTS, Chunks.shape(), staged())
    return Staged(of, part, chunks.named)


class Chunks:
    """Makes the chunks of rows that the staging table holds.

    Args:
        known: The streams, by name.
        stream: The stream of all rows; None: the column `topic` has it.
        writer, part: Names under which the chunks are staged.
    """

    def __init__(self, known: Mapping[str, StreamRecord], stream: str | None, writer: str, part: str) -> None:
        self.named: dict[str, staging.Rows] = {}
        self._rows = 0
        self._known = known
        self._stream = stream
        self._writer = writer
        self._part = part
        self._place = 0
        self._routers: dict[int, Router] = {}
        self._turn = random.randrange(1 << 30)

    @staticmethod
    def shape() -> pa.Schema:
        """The columns of the staging table."""
        import pyarrow as pa

        return pa.schema(
            {
                "writer": pa.string(),
                "part": pa.string(),
                "place": pa.int64(),
                "stream": pa.string(),
                "width": pa.int32(),
                "partition": pa.int32(),
                "events": pa.int32(),
                "keys": pa.list_(pa.string()),
                "times": pa.list_(pa.timestamp("us", tz="UTC")),
                "headers": pa.list_(pa.string()),
                "data": pa.list_(pa.string()),
                "bytes": pa.list_(pa.binary()),
            }
        )

    def of(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of a batch as chunks. Raises `NotFound` for a stream that does not exist, and `InvalidInput`."""
        import numpy as np
        import pyarrow.compute as pc

        if not batch.num_rows:
            return
        rows = np.arange(self._rows, self._rows + batch.num_rows)
        self._rows += batch.num_rows
        if self._stream is not None:
            yield self._of_stream(self._stream, batch, rows)
            return
        topics = batch.column("topic")
        for name in pc.unique(topics).to_pylist():
            if name is None:
                raise InvalidInput("a row has no topic", hint=_HINT)
            mine = pc.equal(topics, name)
            yield self._of_stream(name, batch.filter(mine), rows[pc.fill_null(mine, False).to_numpy(zero_copy_only=False)])

    def _of_stream(self, name: str, batch: pa.RecordBatch, rows: Any) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa
        import zstandard

        stream = self._known.get(name)
        if stream is None:
            raise NotFound(f"no such stream: {name}", hint=f"Create it first: penstock streams create {name}")
        if stream.encrypted:
            raise InvalidInput(
                f"stream {name} is encrypted, and Spark has no keys",
                hint="Write to a stream that is not encrypted, and append from there in an application with the keys.",
            )
        before = self.named.get(name, staging.Rows(0))
        self.named[name] = staging.Rows(before.rows + batch.num_rows, stream.id)
        given = dict(zip(batch.schema.names, batch.columns, strict=True))
        keys = _text(given["key"], "key") if "key" in given else None
        headers = _headers(given["headers"]) if "headers" in given else None
        times = given["happened_at"].cast(pa.timestamp("us", tz="UTC")) if "happened_at" in given else None
        binary = stream.options.format == "bytes"
        payloads = _payloads(given["value"], binary, rows)
        for what, column in (("value", payloads), ("key", keys), ("headers", headers)):
            if column is not None:
                _check_size(stream, what, column, rows)
        if times is not None:
            check_times(times, "happened_at", rows)
        if stream.options.compression is not None:
            pack = zstandard.ZstdCompressor().compress
            payloads = pa.array([None if value is None else pack(value) for value in payloads.to_pylist()], pa.binary())
        places, chosen = self._places(stream, keys, given.get("partition"), batch.num_rows)
        # The rows of a partition stay together, in their order; rows whose partition was chosen are separate.
        groups = places * 2 + chosen
        order = np.argsort(groups, kind="stable")
        sorted_groups = groups[order]
        edges = np.concatenate(([0], np.flatnonzero(np.diff(sorted_groups)) + 1, [len(order)]))
        cuts = [cut for low, high in pairwise(edges) for cut in range(int(low), int(high), CHUNK)]
        starts = np.array(cuts, np.int32)
        ends = np.append(starts[1:], len(order)).astype(np.int32)
        number = len(cuts)
        taken = pa.array(order)
        offsets = pa.array(np.append(starts, len(order)).astype(np.int32))

        def lists(column: pa.Array | None, kind: Any) -> pa.Array:
            if column is None:
                return pa.nulls(number, pa.list_(kind))
            return pa.ListArray.from_arrays(offsets, column.take(taken))

        group = sorted_groups[starts]
        columns = {
            "writer": pa.repeat(self._writer, number),
            "part": pa.repeat(self._part, number),
            "place": pa.array(range(self._place, self._place + number), pa.int64()),
            "stream": pa.repeat(name, number),
            "width": pa.array([None if pinned else stream.partitions for pinned in (group & 1).tolist()], pa.int32()),
            "partition": pa.array((group >> 1).astype(np.int32)),
            "events": pa.array(ends - starts),
            "keys": lists(keys, pa.string()),
            "times": lists(times, pa.timestamp("us", tz="UTC")),
            "headers": lists(headers, pa.string()),
            "data": lists(None if binary else payloads, pa.string()),
            "bytes": lists(payloads if binary else None, pa.binary()),
        }  # fmt: skip
        self._place += number
        return pa.RecordBatch.from_pydict(columns, schema=self.shape())

    def _places(self, stream: StreamRecord, keys: pa.Array | None, partitions: pa.Array | None, size: int) -> tuple[Any, Any]:
        """The partition of each row, and whether the column `partition` chose it."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        self._turn += 1
        keyless = self._turn % stream.partitions
        if keys is None:
            places = np.full(size, keyless, np.int64)
        else:
            router = self._routers.setdefault(stream.partitions, Router(stream.partitions))
            encoded = keys.dictionary_encode()
            # Each key is hashed once. A missing index is a missing key, and its route comes last.
            routes = np.array([*router.partitions_of(encoded.dictionary.to_pylist(), keyless), keyless], np.int64)
            places = routes[pc.fill_null(encoded.indices, len(encoded.dictionary)).to_numpy()]
        if partitions is None:
            return places, np.zeros(size, np.int64)
        given = pc.fill_null(partitions.cast(pa.int64()), -1).to_numpy()
        if given.max(initial=-1) >= stream.partitions or given.min(initial=0) < -1:
            wrong = int(given[(given >= stream.partitions) | (given < -1)][0])
            raise InvalidInput(
                f"stream {stream.name} has no partition {wrong}", hint=f"Its partitions are 0 to {stream.partitions - 1}."
            )
        chosen = given >= 0
        return np.where(chosen, given, places), chosen.astype(np.int64)


def _check_size(stream: StreamRecord, what: str, column: pa.Array, rows: Any) -> None:
    """Raise `InvalidInput` for a value that is larger than an event of the stream may be, before it is compressed."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(column)
    largest = pc.max(sizes).as_py() or 0
    if largest > stream.max_event_bytes:
        raise InvalidInput(
            f"{what} of row {rows[pc.index(sizes, largest).as_py()]} of the task has {largest} bytes,"
            f" and an event of stream {stream.name} at most {stream.max_event_bytes}",
            hint="Keep large things elsewhere and append where they are, or change max_event_bytes.",
        )


def _payloads(column: pa.Array, binary: bool, rows: Any) -> pa.Array:
    """Payloads in the form in which the stream stores them, before they are compressed."""
    import pyarrow as pa

    kind = column.type
    plain = any(
        check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )
    if not plain:
        column = as_json(column, rows)
    return column.cast(pa.binary()) if binary else _text(column, "value")


def _text(column: pa.Array, name: str) -> pa.Array:
    import pyarrow as pa

    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        hint = (
            "A stream of format bytes takes any value; keys are text." if name == "value" else "Keys are text: write base64(...)."
        )
        raise InvalidInput(f"the column {name} is not UTF-8", hint=hint) from None


def _headers(column: pa.Array) -> pa.Array:
    """Headers as JSON text, from pairs as Kafka has them, from a map, or from JSON text."""
    import pyarrow as pa

    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column.cast(pa.string())

    def text(value: Any) -> str | None:
        if not value:
            return None
        pairs = value if isinstance(value[0], tuple) else [(pair["key"], pair["value"]) for pair in value]
        return orjson.dumps({_header_name(name): _header(name, one) for name, one in pairs}, default=in_json).decode()

    return pa.array([text(value) for value in column.to_pylist()], pa.string())


def _header_name(name: str | None) -> str:
    if name is None:
        raise InvalidInput("a header has no key", hint="Give each header a key, or leave it out.")
    return name


def _header(name: str, value: Any) -> Any:
    """The value of a header in JSON, where bytes are text."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise InvalidInput(
            f"the header {name} is not UTF-8: {value[:20]!r}",
            hint="Headers are stored as JSON: write it as text, such as base64(...), or leave it out.",
        ) from None
