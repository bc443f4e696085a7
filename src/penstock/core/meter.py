"""The metrics of one process, by the names of docs/metrics.md.

What is counted once for a batch is a counter or histogram of prometheus-client. The times of each job come from the tallies that
the meter follows (`tally.py`).

Labels are bounded. Job types, streams, groups and topics are names that users make, so the first thousand of each have series of
their own, and all others share one with the name "others". No label is an id, a key or a text of a payload.
"""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock._version import __version__
from penstock.core.tally import OTHERS, REFUSED, TIMES, BoundedNames, Tally, buckets, observe
from penstock.errors import DatabaseUnavailable, PenstockError

_CALLS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
K = TypeVar("K", bound=tuple[str, ...])
_EXPECTED = ("succeeded", "retried", "failed", "quarantined")


class Times(Collector):
    """Histograms of seconds, one for each set of labels, the first of which is a name.

    Args:
        name: Name of the metric.
        help: What it says.
        labels: Names of the labels.
        names: Bounds the values of the first label; the values of others must come from a fixed list.
    """

    def __init__(self, name: str, help: str, labels: Sequence[str], names: BoundedNames) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._names = names
        self._series: dict[tuple[str, ...], list[float]] = {}

    def observe(self, labels: tuple[str, ...], times: Sequence[float], weight: float = 1.0) -> None:
        """Count times, which are sorted, as `weight` times as many."""
        series = self._series.get(labels)
        if series is None:
            labels = (self._names.label(labels[0]), *labels[1:])
            series = self._series.setdefault(labels, buckets())
        observe(series, times, weight)

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client`."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, series in list(self._series.items()):
            seen, total = 0.0, 0.0
            bounded: list[tuple[str, float]] = []
            for bound, count in zip((*TIMES, float("inf")), series, strict=False):
                seen += count
                bounded.append(("+Inf" if bound == float("inf") else str(float(bound)), seen))
            total = series[-1]
            family.add_metric(list(labels), bounded, total)
        yield family


class Gauges(Collector):
    """Gauges that are asked for at each scrape.

    Args:
        read: Returns families.
    """

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client`."""
        return self._read()

    def describe(self) -> Iterable[Metric]:
        """See `prometheus_client`: it asks when a collector is registered."""
        return ()


def gauge(name: str, help: str, values: Mapping[K, float], labels: Sequence[str]) -> Metric:
    """A family of gauges, by the values of their labels."""
    family = GaugeMetricFamily(name, help, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def info() -> Metric:
    """The version, as a gauge whose value is 1."""
    return gauge("penstock_info", "1; the version.", {(__version__,): 1.0}, ["version"])


class Meter:
    """The metrics of one process.

    Attributes:
        registry: All of them.
        times: The histograms of the times of each job.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._types, self._streams, self._groups = BoundedNames(), BoundedNames(), BoundedNames()
        self._wait = Times(
            "penstock_job_wait_seconds",
            "Time from when a job could run to its start; counted when the attempt ends.",
            ["type", "outcome"],
            self._types,
        )
        self._run = Times(
            "penstock_job_run_seconds", "Time that an attempt ran, by its outcome.", ["type", "outcome"], self._types
        )
        self._tallies: list[Tally] = []
        self.times = Gauges(self._times)
        registry.register(self.times)
        registry.register(Gauges(lambda: [info()]))
        self._settled = Counter(
            "penstock_jobs_settled", "Attempts settled, by what became of the job.", ["type", "outcome"], registry=registry
        )
        self._recovered = Counter(
            "penstock_recovered_jobs", "Jobs taken back from lost workers and ended leases.", registry=registry
        )
        self._stale = Counter(
            "penstock_stale_results", "Results refused, since the job no longer belonged to the worker.", registry=registry
        )
        self._claim_s = Histogram("penstock_claim_seconds", "Time of a claim.", buckets=_CALLS, registry=registry)
        self._claim_jobs = Histogram(
            "penstock_claim_batch_jobs", "Jobs of a claim that found some.", buckets=_BATCHES, registry=registry
        )
        self._settle_s = Histogram("penstock_settle_seconds", "Time to settle a batch.", buckets=_CALLS, registry=registry)
        self._settle_jobs = Histogram(
            "penstock_settle_batch_jobs", "Results settled in a batch.", buckets=_BATCHES, registry=registry
        )
        self._lag = Histogram("penstock_loop_lag_seconds", "How late the event loop wakes.", buckets=_CALLS, registry=registry)
        self._errors = Counter("penstock_database_errors", "Failed calls of the database.", ["error"], registry=registry)
        self._errors.labels(DatabaseUnavailable.__name__)
        self._appended = Counter("penstock_events_appended", "Events appended.", ["stream"], registry=registry)
        self._handled = Counter(
            "penstock_events_handled", "Events handled and committed.", ["stream", "group"], registry=registry
        )
        self._moves = Counter(
            "penstock_slot_moves", "Slots of pools and partitions of streams that came or went.", ["group", "how"],
            registry=registry,
        )  # fmt: skip

    def _times(self) -> Iterable[Metric]:
        self.fold()
        yield from self._wait.collect()
        yield from self._run.collect()

    def follow(self, tally: Tally) -> None:
        """Count the times of a tally, from now on."""
        if tally not in self._tallies:
            self._tallies.append(tally)
            tally.follow(self)

    def close(self) -> None:
        """Follow no tally any more."""
        for tally in self._tallies:
            tally.leave(self)
        self._tallies.clear()

    def fold(self) -> None:
        """Count the attempts that ended. May be called from any thread."""
        for tally in list(self._tallies):
            tally.fold()

    def ran(self, name: str, outcome: str, runs: Sequence[float]) -> None:
        """See `penstock.core.tally.Follower`."""
        self._run.observe((name, outcome), runs)

    def waited(self, name: str, outcome: str, waits: Sequence[float], weight: float) -> None:
        """See `penstock.core.tally.Follower`."""
        self._wait.observe((name, outcome), waits, weight)

    def claimed(self, jobs: int, seconds: float) -> None:
        """A source was asked for jobs."""
        self._claim_s.observe(seconds)
        if jobs:
            self._claim_jobs.observe(jobs)

    def settled(self, names: Sequence[str], others: Sequence[tuple[str, str]], seconds: float) -> None:
        """A batch was settled: the job type of each result, and type and outcome of those that are not plain successes."""
        succeeded, unlike = Counted(names), Counted(others)
        for (name, outcome), results in unlike.items():
            succeeded[name] -= results
            if outcome in REFUSED:
                self._stale.inc(results)
            else:
                self._settled.labels(self._types.label(name), outcome).inc(results)
        for name, results in succeeded.items():
            if results:
                self._settled.labels(self._types.label(name), "succeeded").inc(results)
        self._settle_s.observe(seconds)
        self._settle_jobs.observe(len(names))

    def expect(self, names: Iterable[str]) -> None:
        """Show job types that this process works on from the start, so that the first failure is an increase from zero."""
        for name in names:
            for outcome in _EXPECTED:
                self._settled.labels(self._types.label(name), outcome)

    def quarantined(self, name: str | None, jobs: int) -> None:
        """Jobs were archived as quarantined, though no worker settled them. None: their type is not known."""
        self._settled.labels(OTHERS if name is None else self._types.label(name), "quarantined").inc(jobs)

    def recovered(self, jobs: int) -> None:
        """Jobs were taken back."""
        self._recovered.inc(jobs)

    def lagged(self, seconds: float) -> None:
        """The event loop woke this much too late."""
        self._lag.observe(seconds)

    def failed(self, error: PenstockError) -> None:
        """A call of the database failed."""
        self._errors.labels(type(error).__name__).inc()

    def appended(self, stream: str, events: int) -> None:
        """Events were appended."""
        self._appended.labels(self._streams.label(stream)).inc(events)

    def handled(self, stream: str, group: str, events: int) -> None:
        """Events were handled and committed."""
        self._handled.labels(self._streams.label(stream), self._groups.label(group)).inc(events)

    def moved(self, group: str, how: str, slots: int) -> None:
        """Slots of a membership group were gained, revoked or lost."""
        self._moves.labels(self._groups.label(group), how).inc(slots)
