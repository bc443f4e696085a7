"""Reads events of one stream from the database, by column. The database writes the query, see `penstock.scan_events`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import OffsetGone, PenstockError
from penstock.spark.scans import CONNECTIONS, IN_MEMORY, fetch
from penstock.spark.streams.offsets import Run
from penstock.spark.streams.options import EventReadOptions
from penstock.spark.streams.rows import rows, stored_columns, unpacked

if TYPE_CHECKING:
    import pyarrow as pa


def read_events(
    options: EventReadOptions, runs: Sequence[Run], schema: pa.Schema, filters: str, in_memory: int = IN_MEMORY
) -> Iterator[pa.RecordBatch]:
    """Events of some partitions of one stream, in batches of exactly this schema. One statement reads all of them.

    Args:
        options: What to do with events that are gone, or that do not fit the schema.
        runs: The events to read, all of one stream.
        schema: Names and types of the batches, see `rows`.
        filters: Filters that the database applies, in the form that `penstock.scan_events` takes.
        in_memory: As for `penstock.spark.scans.read`.

    Raises:
        OffsetGone: Retention dropped events meanwhile, or the stream was created again.
        InvalidInput: A payload does not fit, with `fail_fast`.
    """
    from adbc_driver_manager import Error

    columns = stored_columns(schema.names)
    stream = runs[0].stream
    with CONNECTIONS.lent(options.url) as connection, connection.cursor() as cursor:
        try:
            # The query is written now and not when the read was planned, since segments come and go.
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
        fetched = fetch(cursor, query, in_memory)
    for batch in fetched:
        for part in unpacked(batch, options.fail_fast) if runs[0].compressed else (batch,):
            yield rows(part, stream, schema, options)
