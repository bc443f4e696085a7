"""The metrics of a server for which the database is asked."""

from __future__ import annotations

from prometheus_client.core import Metric

from penstock.core.bounded import Bounded
from penstock.http.scaling import GAUGE_WAIT_S
from penstock.http.service import Service
from penstock.jobs.top import largest_keys
from penstock.pools import views as pool_views
from penstock.worker.exposition import GAUGES_S


class AskedMetrics:
    """Reads them. No scrape waits longer for the database than Prometheus waits for a scrape.

    Args:
        service: Where they are read.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.read = Bounded(self._read, GAUGES_S)

    async def _read(self) -> list[Metric]:
        service = self._service
        return service.metrics.asked(
            await service.counts(),
            await service.scaling.advice(GAUGE_WAIT_S),
            await pool_views.quarantined_counts(service.database),
            await service.gauges(),
            await largest_keys(service.database),
        )
