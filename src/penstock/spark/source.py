"""`format("penstock")`: what Spark asks of a data source. The options decide whether `jobs` or `streams` answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader

from penstock.errors import InvalidInput
from penstock.jobs.spark_attempt import SparkAttempt
from penstock.spark.jobs.options import JobReadOptions, JobWriteOptions
from penstock.spark.jobs.sink import job_stage
from penstock.spark.jobs.source import job_reader, job_stream_reader
from penstock.spark.options import WriteOptions
from penstock.spark.processes import spare_modules
from penstock.spark.schemas import columns_of, ddl
from penstock.spark.streams import rows as stream_rows
from penstock.spark.streams.options import EventReadOptions, EventWriteOptions
from penstock.spark.streams.sink import event_stage
from penstock.spark.streams.source import event_reader, event_stream_reader
from penstock.spark.writing import BatchWriter, MicroBatchWriter, Stage

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

_IN_SQL = (
    "In Spark SQL use create temporary view v using penstock options (...), or give the options where the table is used: "
    "select * from t with (subscribe = 'orders'), insert into t with (stream = 'orders') values (...)."
)


class PenstockSource(DataSource):
    """The data source. It reads streams, `archived_jobs` and `queued_jobs`; it writes jobs to the queue and events to streams."""

    zone: str | None = None
    """Default of the option `timeZone`."""
    of: SparkAttempt | None = None
    """Spark job to which all writes of the session belong."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        spare_modules()

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "penstock"

    def schema(self) -> str:
        """The columns, all or those of the option `columns`."""
        if any(name.lower().startswith("option.") for name in self.options):
            # Spark passes these options while it creates the table, and never again.
            raise InvalidInput("a table of Spark SQL keeps no options for a format in Python", hint=_IN_SQL)
        if EventReadOptions.wanted(self.options):
            streams = self._of_streams()
            return ddl(stream_rows.columns_of(streams.columns, streams.include_headers))
        options = JobReadOptions.parse(self.options)
        return ddl(columns_of(options.table, options.columns))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch reader of streams, or of a table of jobs."""
        if EventReadOptions.wanted(self.options):
            return event_reader(self._of_streams(), schema)
        return job_reader(self._of_jobs(schema), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of streams, or of the archive in commit order."""
        if EventReadOptions.wanted(self.options):
            return event_stream_reader(self._of_streams(), schema)
        return job_stream_reader(self._of_jobs(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch writer to the queue or to streams."""
        return BatchWriter(*self._sink(schema), overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A streaming writer to the queue or to streams."""
        return MicroBatchWriter(*self._sink(schema), overwrite)

    def _sink(self, schema: StructType) -> tuple[WriteOptions, Stage]:
        """Where to write, and how rows are staged for it."""
        # A server of Spark Connect has no environment of the driver, and a session that was not registered no attribute.
        of = self.of or SparkAttempt.here()
        if EventWriteOptions.wanted(self.options, schema.fieldNames()):
            events = replace(EventWriteOptions.parse(self.options), of=of)
            return events, event_stage(events, schema)
        jobs = replace(JobWriteOptions.parse(self.options), of=of)
        return jobs, job_stage(jobs, schema)

    def _of_streams(self) -> EventReadOptions:
        given = dict(self.options)
        if self.zone is not None and not any(name.lower() == "timezone" for name in given):
            given["timeZone"] = self.zone
        return EventReadOptions.parse(given)

    def _of_jobs(self, schema: StructType) -> JobReadOptions:
        if not self.options and schema.fieldNames() != list(columns_of("archived_jobs")):
            # The table of Spark SQL was created for another read, or a schema for streams comes without a selection of streams.
            raise InvalidInput("there are no options that say what to read", hint=f"Set subscribe, or table. {_IN_SQL}")
        return JobReadOptions.parse(self.options)


def in_zone(zone: str) -> type[PenstockSource]:
    """The data source with a time zone as the default of the option `timeZone`, and with the Spark job of this process."""
    # The class cannot be imported by its name, so cloudpickle sends its definition to Spark's processes.
    return type(
        "PenstockSourceInZone", (PenstockSource,), {"zone": zone, "of": SparkAttempt.here(), "__doc__": PenstockSource.__doc__}
    )
