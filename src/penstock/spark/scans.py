"""From a query to Arrow batches, through COPY (ADBC), in a transaction that lasts as long as the database needs.

Spark pulls batches at its own pace, which may be that of a slow sink. A snapshot that is held for so long would keep vacuum
from the hot tables. So a result is taken as fast as it comes, first into memory and past a limit into a file without a
name, and only then handed on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.errors import DatabaseUnavailable, PenstockError

if TYPE_CHECKING:
    import pyarrow as pa

IN_MEMORY = 64 * 1024 * 1024
_BATCH_BYTES = 4 * 1024 * 1024


def connect(url: str) -> Any:
    """An ADBC connection that commits each statement. Raises `DatabaseUnavailable`."""
    from adbc_driver_manager import Error
    from adbc_driver_postgresql import dbapi

    os.environ.setdefault("PGAPPNAME", "penstock-spark")
    try:
        return dbapi.connect(url, autocommit=True)
    except Error as error:
        raise DatabaseUnavailable(f"the database is not available to Spark: {error}") from None


def read(url: str, query: str, schema: pa.Schema, in_memory: int = IN_MEMORY) -> Iterator[pa.RecordBatch]:
    """The result of a query, in batches of exactly this schema.

    Args:
        url: Of the database.
        query: Its columns are those of the schema, in order; or one column for an empty schema.
        schema: What the batches have to look like; values are cast.
        in_memory: Bytes of the result that are kept in memory; what exceeds them goes to a file.
    """
    from adbc_driver_manager import Error

    kept: list[pa.RecordBatch] = []
    spool = None
    with connect(url) as connection, connection.cursor() as cursor:
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
    for batch in kept:
        yield shaped(batch, schema)
    if spool is not None:
        for batch in spool.read():
            yield shaped(batch, schema)


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the names and types of a schema, column by column."""
    import pyarrow as pa

    if batch.schema.equals(schema):
        return batch
    return pa.RecordBatch.from_arrays(
        [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(batch.columns, schema, strict=True)
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
