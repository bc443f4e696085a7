"""From a query to Arrow batches, through COPY (ADBC), in a transaction that lasts as long as the database needs.

Spark pulls batches at its own pace, which may be that of a slow sink. A snapshot that is held for that long would keep vacuum
from the hot tables. A result is therefore fetched as fast as it comes, first into memory and past a limit into an unnamed file,
and only then passed to Spark.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from penstock.errors import DatabaseUnavailable, PenstockError
from penstock.postgres.credentials import with_password
from penstock.postgres.pinned import pinned_url
from penstock.settings import Settings
from penstock.spark.connections import APPLICATION, Connections
from penstock.spark.processes import spare_modules

if TYPE_CHECKING:
    import pyarrow as pa

IN_MEMORY = 64 * 1024 * 1024
_BATCH_BYTES = 4 * 1024 * 1024
_RESTART_S = 30.0
# libpq has no error code for failures before a login.
_PASSING = (
    "Connection refused",
    "No such file or directory",
    "starting up",
    "shutting down",
    "recovery mode",
    "closed the connection",
)


_NO_OPTIONS = "unsupported startup parameter"


def connect(url: str) -> Any:
    """An ADBC connection that commits each statement. While the server restarts, it waits for up to 30 s.

    Raises:
        DatabaseUnavailable: The server cannot be reached.
    """
    from adbc_driver_manager import Error
    from adbc_driver_postgresql import dbapi

    spare_modules()
    os.environ.setdefault("PGAPPNAME", APPLICATION)
    deadline = time.monotonic() + _RESTART_S
    pooled = False
    while True:
        try:
            complete = with_password(url, Settings.read())
            return dbapi.connect(complete if pooled else pinned_url(complete), autocommit=True)
        except Error as error:
            message = str(error)
            if _NO_OPTIONS in message and not pooled:
                # A pooler takes none, and gives what is set later to others: its own settings have to do.
                pooled = True
                continue
            if time.monotonic() > deadline or not any(passing in message for passing in _PASSING):
                raise DatabaseUnavailable(f"the database is not available to Spark: {error}") from None
            time.sleep(random.uniform(0.1, 0.5))


def usable(connection: Any) -> bool:
    """Whether a connection still works: the server may have restarted, or a firewall may have dropped the connection."""
    from adbc_driver_manager import Error

    try:
        with connection.cursor() as cursor:
            cursor.execute("select 1")
            cursor.fetchone()
    except Error:
        return False
    return True


CONNECTIONS: Connections[Any] = Connections(connect, usable, lambda connection: connection.close())
"""ADBC connections that Spark's Python processes keep from one task to the next."""


def read(url: str, query: str, schema: pa.Schema, in_memory: int = IN_MEMORY) -> Iterator[pa.RecordBatch]:
    """The result of a query, in batches of exactly this schema.

    Args:
        url: URL of the database.
        query: Its columns are those of the schema; some of them may come together in the column `seldom`.
        schema: Names and types of the batches. Values are cast to them.
        in_memory: How many bytes of the result are kept in memory. The rest goes to a file.
    """
    with CONNECTIONS.lent(url) as connection, connection.cursor() as cursor:
        fetched = fetch(cursor, query, in_memory)
    for batch in fetched:
        yield shaped(batch, schema)


def fetch(cursor: Any, query: str, in_memory: int) -> Iterator[pa.RecordBatch]:
    """Run a query and fetch all of its result, as fast as it comes. The iterator returned does not use the cursor.

    Raises:
        PenstockError: The database refused the query.
    """
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
    """The batch with the names and types of a schema. Columns that the batch lacks are in `seldom`, see `penstock.scan`."""
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
    """An unnamed file that holds batches until they are read, once."""

    def __init__(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115 - `read` closes it
        self._writer = pa.ipc.new_stream(self._file, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def read(self) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        self._writer.close()
        self._file.seek(0)
        with self._file:
            yield from pa.ipc.open_stream(self._file)
