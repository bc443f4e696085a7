"""Scaling advice in a server: read seldom, and shown as gauges to external scalers such as KEDA.

Reading the load looks at the whole queue. However many scrape, and however large the queue is, that takes at most a twentieth of
a processor of the database: a reading is kept for five seconds, and for twenty times what it cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.core.cached import Kept
from penstock.jobs.scaling import Load, ScaleAdvice, advise
from penstock.pools import views as pool_views
from penstock.postgres.database import Database

_KEPT_S = 5.0
_OVER = timedelta(minutes=1)
_MOST_TYPES = 1_000
GAUGE_WAIT_S = 5.0
_GAUGES = {
    "oldest_ready_s": ("penstock_queueing_delay_seconds", "How long the oldest job has lacked a worker; 0: none does."),
    "ready": ("penstock_scale_ready", "Jobs that wait for a worker, as the advice counted them."),
    "drain_s": ("penstock_drain_seconds", "How long what waits takes at the rate of the last minute; Inf: nothing finished."),
    "finished_per_s": ("penstock_finished_per_second", "Jobs finished a second in the last minute."),
    "workers": ("penstock_scale_workers", "Workers of the type or pool."),
    "advised": ("penstock_advised_workers", "How many workers there should be for jobs to wait five seconds at most."),
}


class Scaling:
    """The load of all types, at most some seconds old.

    Args:
        database: Database to read from.
        kept_s: How long a reading is kept at least.
    """

    def __init__(self, database: Database, *, kept_s: float = _KEPT_S) -> None:
        self._loads: Kept[list[Load]] = Kept(lambda: pool_views.load_of_types(database, _OVER), kept_s=kept_s)

    async def advice(self, wait_s: float) -> list[ScaleAdvice]:
        """Advice for each job type, for jobs to wait `wait_s` seconds at most."""
        return [advise(load, wait_s) for load in await self._loads()]


class ScalingGauges(Collector):
    """Advice as gauges, for the first thousand types by name."""

    def __init__(self, advice: Sequence[ScaleAdvice]) -> None:
        self._advice = advice[:_MOST_TYPES]

    def collect(self) -> list[GaugeMetricFamily]:
        """See `prometheus_client`."""
        families = []
        for field, (name, help) in _GAUGES.items():
            family = GaugeMetricFamily(name, help, labels=["type"])
            for one in self._advice:
                value = getattr(one, field)
                if value is None:
                    # Nothing waits: no delay. Nothing finished: what waits never drains, as far as one can tell.
                    value = float("inf") if field == "drain_s" and one.ready else 0.0
                family.add_metric([one.name], float(value))
            families.append(family)
        return families
