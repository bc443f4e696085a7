"""From a query to Arrow batches, through COPY (ADBC), in a transaction that lasts as long as the database needs.

Spark pulls batches at its own pace, which may be that of a slow sink. A snapshot that is held for so long would keep vacuum
from the hot tables. So a result is taken as fast as it comes, first into memory and past a limit into a file without a
name, and only then handed on.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.errors import DatabaseUnavailable, OffsetGone, PenstockError
from penstock.spark.connections import Connections
from penstock.spark.streams.offsets import Run
from penstock.spark.streams.rows import rows, stored_columns, unpacked

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.streams.options import StreamReadOptions

APPLICATION = "penstock-spark"  # as pg_stat_activity shows it
IN_MEMORY = 64 * 1024 * 1024
_BATCH_BYTES = 4 * 1024 * 1024
_RESTART_S = 30.0
# libpq gives no code for what happens before a login.
_PASSING = (
    "Connection refused",
    "No such file or directory",
    "starting up",
    "shutting down",
    "recovery mode",
    "closed the connection",
)


def connect(url: str) -> Any:
    """An ADBC connection that commits each statement. Waits some seconds for a server that restarts.

    Raises `DatabaseUnavailable`.
    """
    from adbc_driver_manager import Error
    from adbc_driver_postgresql import dbapi

    os.environ.setdefault("PGAPPNAME", APPLICATION)
    deadline = time.monotonic() + _RESTART_S
    while True:
        try:
            return dbapi.connect(url, autocommit=True)
        except Error as error:
            words = str(error)
            if time.monotonic() > deadline or not any(passing in words for passing in _PASSING):
                raise DatabaseUnavailable(f"the database is not available to Spark: {error}") from None
            time.sleep(random.uniform(0.1, 0.5))


def _usable(connection: Any) -> bool:
    """Whether a connection answers: the server may have been restarted, or a firewall forgotten it."""
    from adbc_driver_manager import Error

    try:
        with connection.cursor() as cursor:
            cursor.execute("select 1")
            cursor.fetchone()
    except Error:
        return False
    return True


KEPT: Connections[Any] = Connections(connect, _usable, lambda connection: connection.close())
"""Connections that Spark's Python processes keep from one task to the next."""


def read(url: str, query: str, schema: pa.Schema, in_memory: int = IN_MEMORY) -> Iterator[pa.RecordBatch]:
    """The result of a query, in batches of exactly this schema.

    Args:
        url: Of the database.
        query: Its columns are those of the schema, some of them perhaps together as `seldom`.
        schema: What the batches have to look like; values are cast.
        in_memory: Bytes of the result that are kept in memory; what exceeds them goes to a file.
    """
    with KEPT.lent(url) as connection, connection.cursor() as cursor:
        taken = _taken(cursor, query, in_memory)
    for batch in taken:
        yield shaped(batch, schema)


def read_events(
    options: StreamReadOptions, runs: Sequence[Run], schema: pa.Schema, filters: str, in_memory: int = IN_MEMORY
) -> Iterator[pa.RecordBatch]:
    """Events of some partitions of one stream, in batches of exactly this schema: one statement for all of them.

    Args:
        options: What to do with events that are gone, or that do not fit the schema.
        runs: Which events.
        schema: What the batches have to look like, see `stream_rows`.
        filters: What the database leaves out, as `penstock.scan_events` takes it.
        in_memory: As for `read`.

    Raises:
        OffsetGone: Retention dropped events meanwhile, or the stream was created again.
        InvalidInput: A payload does not fit, with `fail_fast`.
    """
    from adbc_driver_manager import Error

    columns = stored_columns(schema.names)
    stream = runs[0].stream
    with KEPT.lent(options.url) as connection, connection.cursor() as cursor:
        try:
            # The text is made now and not when the read was planned, since segments come and go.
            cursor.execute(
                "select penstock.scan_events($1::text, nullif($2::text, ''), string_to_array($3::text, ',')::integer[],"
                " string_to_array($4::text, ',')::bigint[], string_to_array($5::text, ',')::bigint[],"
                " string_to_array(nullif($6::text, ''), ','), $7::text::jsonb, $8::boolean)",
                (
                    stream,
                    runs[0].identity or "",
                    ",".join(str(run.partition) for run in runs),
                    ",".join(str(run.begin) for run in runs),
                    ",".join(str(run.end) for run in runs),
                    ",".join(columns),
                    filters,
                    not options.fail_on_data_loss,
                ),
            )
            query = cursor.fetchone()[0]
        except Error as error:
            if error.sqlstate == "PS410":
                raise OffsetGone(
                    f"events of {', '.join(f'partition {run.partition} from {run.begin} to {run.end - 1}' for run in runs[:3])}"
                    f"{' and others' if len(runs) > 3 else ''} of {stream} are gone",
                    hint="Retention, or a recreated stream: set failOnDataLoss to false to continue without them.",
                ) from None
            raise PenstockError(f"the database refused a scan: {error}") from None
        taken = _taken(cursor, query, in_memory)
    for batch in taken:
        for part in unpacked(batch, options.fail_fast) if runs[0].compressed else (batch,):
            yield rows(part, stream, schema, options)


def _taken(cursor: Any, query: str, in_memory: int) -> Iterator[pa.RecordBatch]:
    """Run a query and take all of its result, as fast as it comes. Returns what hands it on."""
    from adbc_driver_manager import Error

    kept: list[pa.RecordBatch] = []
    spool = None
    try:
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(_BATCH_BYTES)})
        cursor.execute(query)
        size = 0
        for batch in cursor.fetch_record_batch():
            size += batch.nbytes
            if spool is None and size <= in_memory:
                kept.append(batch)
                continue
            if spool is None:
                spool = _Spool(batch.schema)
            spool.write(batch)
    except Error as error:
        raise PenstockError(f"the database refused a scan: {error}") from None
    return chain(kept, () if spool is None else spool.read())


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the names and types of a schema, column by column. What it lacks is in `seldom`, see `penstock.scan`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if batch.schema.equals(schema):
        return batch
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    if (seldom := columns.get("seldom")) is not None:
        for place, field in enumerate(field for field in schema if field.name not in columns):
            nothing = seldom.null_count == len(seldom)
            columns[field.name] = pa.nulls(len(seldom), field.type) if nothing else pc.list_element(seldom, place)
    return pa.RecordBatch.from_arrays(
        [
            columns[field.name] if columns[field.name].type == field.type else columns[field.name].cast(field.type)
            for field in schema
        ],
        schema=schema,
    )


class _Spool:
    """A file without a name that holds batches until they are read, once."""

    def __init__(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115 - closed when it has been read
        self._writer = pa.ipc.new_stream(self._file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def read(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        self._writer.close()
        self._file.seek(0)
        with self._file:
            yield from pa.ipc.open_stream(self._file)
