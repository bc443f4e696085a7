"""Numbers for Prometheus. Counters and histograms live in the process; queue depths are asked of the database at each scrape."""

from __future__ import annotations

import os
from collections import Counter as Counted
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.core.meter import Gauges, Meter, gauge, info
from penstock.core.tally import BoundedNames, Tally
from penstock.http.scaling import ScalingGauges
from penstock.jobs.models import EnqueueOutcome
from penstock.jobs.records import JobCounts
from penstock.jobs.scaling import ScaleAdvice
from penstock.worker.exposition import database_up

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


class Metrics:
    """The counters of one process; with several processes those of all, through files that they share.

    Args:
        meter: What every process of Penstock counts; None: a new one.
        tally: What it counts for the rates in the database; None: nothing.

    Attributes:
        meter: What every process of Penstock counts.
        waiting: Long polls under way.
        places, places_used: How many live connections there may be, and are.
    """

    def __init__(self, meter: Meter | None = None, tally: Tally | None = None) -> None:
        self.meter = meter or Meter()
        self._tally = tally
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

    def settled(self, names: Sequence[str], others: Sequence[tuple[str, str]], seconds: float) -> None:
        """A batch was settled, see `Meter.settled`."""
        self.meter.settled(names, others, seconds)
        if self._tally is not None:
            self._tally.settled(names, others)

    def timed(self, ended: Iterable[tuple[str, str, float, float]]) -> None:
        """Attempts were settled that ran elsewhere, see `Tally.timed`."""
        if self._tally is not None:
            self._tally.timed(ended)

    def refused(self) -> None:
        """Count a refused login."""
        self._refused.inc()

    def exposition(self, asked: Iterable[Metric]) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            asked: What was asked of the database, see `asked`.
        """
        if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            shared = CollectorRegistry()
            multiprocess.MultiProcessCollector(shared)  # type: ignore[no-untyped-call]
            registries = [shared, _only(self.meter.times), _only(Gauges(lambda: [info()]))]
        else:
            registries = [self._registry, self.meter.registry]
        return b"".join(generate_latest(registry) for registry in [*registries, _only(Gauges(lambda: asked))])

    def families(self, asked: Iterable[Metric]) -> list[Metric]:
        """Everything of this process, and what was asked of the database."""
        return [*self._registry.collect(), *self.meter.registry.collect(), *asked]

    def asked(
        self,
        counts: Sequence[JobCounts] = (),
        advice: Sequence[ScaleAdvice] = (),
        quarantined_keys: Mapping[str, int] | None = None,
        database: Sequence[Metric] = (),
        largest_keys: Mapping[str, int] | None = None,
        up: bool = True,
    ) -> list[Metric]:
        """What was asked of the database, as families.

        Args:
            counts: The queue as it was counted last.
            advice: Scaling advice.
            quarantined_keys: Number of quarantined keys of each pool.
            database: Gauges of the database.
            largest_keys: Ready jobs of the fullest key of each type.
            up: Whether the database answers.
        """
        return [
            *_depths(counts, self._names),
            *ScalingGauges(advice).collect(),
            _quarantined(quarantined_keys or {}, self._names),
            _largest_keys(largest_keys or {}),
            *database,
            database_up(up),
        ]


def _only(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(collector)
    return registry


def _depths(counts: Sequence[JobCounts], names: BoundedNames) -> list[Metric]:
    """The queue as it was counted last."""
    families = []
    for field, (name, help) in _QUEUE.items():
        values: dict[tuple[str], float] = {}
        for count in counts:
            label, value = (names.label(count.name),), float(getattr(count, field) or 0)
            values[label] = max(values.get(label, 0.0), value) if field in _LARGEST else values.get(label, 0.0) + value
        families.append(gauge(name, help, values, ["type"]))
    return families


def _quarantined(keys: Mapping[str, int], names: BoundedNames) -> Metric:
    """Keys of pools for which the pool's rule fails."""
    values = Counted[tuple[str]]()
    for name, number in keys.items():
        values[names.label(name),] += number
    return gauge("penstock_quarantined_keys", "Keys for which the rule of their pool fails: their jobs wait.", values, ["type"])


def _largest_keys(jobs: Mapping[str, int]) -> Metric:
    """The fullest key of each job type. The key is no label, since labels must have few values: `penstock top keys` names it."""
    help = "Ready jobs of the key that has most of them; an estimate when many wait."
    return gauge("penstock_largest_key_jobs", help, {(name,): float(number) for name, number in jobs.items()}, ["type"])
