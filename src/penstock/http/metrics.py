"""Numbers for Prometheus. Counters and histograms live in the process; queue depths are asked of the database at each scrape."""

from __future__ import annotations

import os
from collections import Counter as Counted
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.core.meter import BoundedNames, Gauges, Meter, gauge, info
from penstock.http.scaling import ScalingGauges
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.records import JobCounts
from penstock.jobs.scaling import ScaleAdvice

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_MOST_TYPES = 1_000
_QUEUE = {
    "ready": ("penstock_jobs_ready", "Jobs that wait for a worker."),
    "deferred": ("penstock_jobs_deferred", "Jobs that wait for their time."),
    "in_progress": ("penstock_jobs_in_progress", "Jobs that a worker holds."),
    "oldest_ready_s": ("penstock_oldest_ready_seconds", "Age of the job that has waited longest."),
    "paused": ("penstock_job_type_paused", "1 while the job type is paused."),
}
# Of job types that share a series the largest value counts, of all others the sum.
_LARGEST = frozenset(("oldest_ready_s", "paused"))


class _Depths(Collector):
    """The queue as it was counted last."""

    def __init__(self, counts: list[JobCounts], names: BoundedNames) -> None:
        self._counts = counts
        self._names = names

    def collect(self) -> list[Metric]:
        """See `prometheus_client`."""
        families = []
        for field, (name, help) in _QUEUE.items():
            values: dict[tuple[str], float] = {}
            for count in self._counts:
                label, value = (self._names.label(count.name),), float(getattr(count, field) or 0)
                values[label] = max(values.get(label, 0.0), value) if field in _LARGEST else values.get(label, 0.0) + value
            families.append(gauge(name, help, values, ["type"]))
        return families


class _Quarantined(Collector):
    """Keys of pools for which the pool's rule fails."""

    def __init__(self, keys: Mapping[str, int], names: BoundedNames) -> None:
        self._keys = keys
        self._names = names

    def collect(self) -> list[Metric]:
        """See `prometheus_client`."""
        values = Counted[tuple[str]]()
        for name, keys in self._keys.items():
            values[self._names.label(name),] += keys
        return [
            gauge("penstock_quarantined_keys", "Keys for which the rule of their pool fails: their jobs wait.", values, ["type"])
        ]


class _LargestKeys(Collector):
    """The fullest key of each job type. The key is no label, since labels must have few values: `penstock top keys` names it."""

    def __init__(self, jobs: Mapping[str, int]) -> None:
        self._jobs = jobs

    def collect(self) -> list[GaugeMetricFamily]:
        """See `prometheus_client`."""
        family = GaugeMetricFamily(
            "penstock_largest_key_jobs",
            "Ready jobs of the key that has most of them; an estimate when many wait.",
            labels=["type"],
        )
        for name, jobs in self._jobs.items():
            family.add_metric([name], float(jobs))
        return [family]


class Metrics:
    """The counters of one process; with several processes those of all, through files that they share.

    Args:
        meter: What every process of Penstock counts; None: a new one.

    Attributes:
        meter: What every process of Penstock counts.
        waiting: Long polls under way.
        places, places_used: How many live connections there may be, and are.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter or Meter()
        self._registry = CollectorRegistry()
        registry = self._registry
        self._requests = Counter("penstock_http_requests", "Requests.", ["method", "route", "status"], registry=registry)
        self._seconds = Histogram(
            "penstock_http_request_seconds", "Time to answer.", ["method", "route"], buckets=_LATENCIES, registry=registry
        )
        self._enqueued = Counter("penstock_jobs_enqueued", "Jobs enqueued through HTTP.", ["type", "outcome"], registry=registry)
        self._claimed = Counter("penstock_jobs_claimed", "Jobs claimed through HTTP.", ["type"], registry=registry)
        self._batches = Histogram(
            "penstock_put_batch_size", "Single enqueues in one commit.", buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
            registry=registry,
        )  # fmt: skip
        self._refused = Counter("penstock_http_refused_logins", "Requests with bad credentials.", registry=registry)
        self._read = Counter("penstock_events_read", "Events read through HTTP.", ["stream", "how"], registry=registry)
        self._published = Counter("penstock_messages_published", "Messages published through HTTP.", ["topic"], registry=registry)
        self._delivered = Counter(
            "penstock_messages_delivered", "Messages delivered to connections.", ["topic", "how"], registry=registry
        )
        self._connected = Gauge(
            "penstock_live_connections", "Live connections.", ["kind"], registry=registry, multiprocess_mode="livesum"
        )
        self.waiting = Gauge(
            "penstock_waiting_requests",
            "Requests that wait for something to come.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        places = Gauge(
            "penstock_places", "Places: live connections that there may be.", ["kind"], registry=registry,
            multiprocess_mode="livesum",
        )  # fmt: skip
        places_used = Gauge(
            "penstock_places_used", "Places taken by live connections.", ["kind"], registry=registry, multiprocess_mode="livesum"
        )
        self.places, self.places_used = places.labels("live"), places_used.labels("live")
        self._names = BoundedNames(_MOST_TYPES)
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._by_outcome: dict[tuple[str, EnqueueOutcome], Counter] = {}

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a template, never a path with ids in it."""
        key = (method, route, status)
        children = self._children.get(key)
        if children is None:
            children = (self._requests.labels(method, route, str(status)), self._seconds.labels(method, route))
            self._children[key] = children
        children[0].inc()
        children[1].observe(seconds)

    def enqueued(self, name: str, outcome: EnqueueOutcome, jobs: int = 1) -> None:
        """Count enqueued jobs."""
        child = self._by_outcome.get((name, outcome))
        if child is None:
            child = self._enqueued.labels(self._names.label(name), str(outcome))
            if len(self._by_outcome) < _MOST_TYPES:
                self._by_outcome[name, outcome] = child
        child.inc(jobs)

    def claimed(self, name: str, jobs: int) -> None:
        """Count claimed jobs."""
        self._claimed.labels(self._names.label(name)).inc(jobs)

    def read(self, stream: str, how: str, events: int) -> None:
        """Count events that were read: by a get, a follower or a group."""
        self._read.labels(self._names.label(stream), how).inc(events)

    def published(self, topic: str, messages: int = 1) -> None:
        """Count published messages."""
        self._published.labels(self._names.label(topic)).inc(messages)

    def delivered(self, topic: str, how: str, messages: int) -> None:
        """Count messages that were written to connections."""
        self._delivered.labels(self._names.label(topic), how).inc(messages)

    def connected(self, kind: str, connections: int) -> None:
        """A live connection began or ended."""
        self._connected.labels(kind).inc(connections)

    def batch(self, jobs: int) -> None:
        """Note the size of a group commit."""
        self._batches.observe(jobs)

    def refused(self) -> None:
        """Count a refused login."""
        self._refused.inc()

    def exposition(
        self,
        counts: list[JobCounts],
        advice: Sequence[ScaleAdvice] = (),
        quarantined_keys: Mapping[str, int] | None = None,
        database: Sequence[Metric] = (),
        largest_keys: Mapping[str, int] | None = None,
        up: bool = True,
    ) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            counts: The queue as it was counted last.
            advice: Scaling advice.
            quarantined_keys: Number of quarantined keys of each pool.
            database: Gauges of the database.
            largest_keys: Ready jobs of the fullest key of each type.
            up: Whether the database answers.
        """
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            shared = CollectorRegistry()
            multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
            registries = [shared, _only(self.meter.times), _only(Gauges(lambda: [info()]))]
        else:
            registries = [self._registry, self.meter.registry]
        answers = gauge("penstock_database_up", "Whether the database answers.", {(): float(up)}, [])
        asked = [
            _Depths(counts, self._names),
            ScalingGauges(advice),
            _Quarantined(quarantined_keys or {}, self._names),
            _LargestKeys(largest_keys or {}),
            Gauges(lambda: [*database, answers]),
        ]
        return b"".join(generate_latest(registry) for registry in [*registries, *map(_only, asked)])


def _only(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry
