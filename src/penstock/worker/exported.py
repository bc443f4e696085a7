"""The metrics of a worker through OpenTelemetry: what its endpoint would show, read when they are exported."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from prometheus_client.core import Metric

from penstock.core import measuring
from penstock.core.blocking import BackgroundLoop
from penstock.core.exported_metrics import exporting
from penstock.errors import PenstockError
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.exposition import Exposition, database_families, database_up, report_of
from penstock.worker.progress import Progressing

_ANSWERS_WITHIN = timedelta(seconds=10)


@asynccontextmanager
async def exported(worker: Progressing, url: str, settings: Settings) -> AsyncIterator[None]:
    """Export the metrics of a worker while the block lasts.

    Args:
        worker: The worker.
        url: URL of the database. The gauges of the database are read through a connection and a thread of their own, as at an
            endpoint, since a handler may block the worker's loop.
        settings: Settings of the worker.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """
    meter = measuring.measure()
    database = Database(url, settings.model_copy(update={"pool_size": 1}), "penstock metrics")
    exposition = Exposition(database, lambda: [report_of(meter, [worker])])
    loop = BackgroundLoop(timeout=_ANSWERS_WITHIN)

    def read() -> list[Metric]:
        try:
            return loop.run(exposition.families())
        except PenstockError:
            return [*report_of(meter, [worker]).families, database_up(False)]

    declared = [*report_of(meter, [worker]).families, *database_families(), database_up(False)]
    try:
        async with exporting(declared, read):
            yield
    finally:
        loop.close(exposition.close())
