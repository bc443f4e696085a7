"""The metrics of one process, by the names of docs/metrics.md.

What is counted once for a batch is a counter or histogram of prometheus-client. The times of each job are not: an `observe` of
that library for each would cost a worker a tenth of its throughput. The executor appends a tuple for each attempt that ended, and
they are folded into the buckets many at a time, by functions that are written in C.

Labels are bounded. Job types, streams, groups and topics are names that users make, so the first thousand of each have series of
their own, and all others share one with the name "others". No label is an id, a key or a text of a payload.
"""

from __future__ import annotations

import operator
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter as Counted
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Protocol, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock._version import __version__
from penstock.errors import DatabaseUnavailable, PenstockError

OTHERS = "others"
_MOST_NAMES = 1_000
_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_CALLS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCHES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
K = TypeVar("K", bound=tuple[str, ...])
# Of so many attempts and more that are counted together, only the waits of about so many are.
_MOST_WAITS = 32
# Of a callback for a job that is not there the type may be anything: it is no label.
_REFUSED = frozenset(("stale", "unknown"))
_EXPECTED = ("succeeded", "retried", "failed", "quarantined")


class Timed(Protocol):
    """A claimed job, with its times by the clock of the database."""

    @property
    def created_at(self) -> datetime:
        """When it was enqueued."""

    @property
    def run_after(self) -> datetime:
        """The time before which it could not run."""


Ended: TypeAlias = tuple[str, str, Timed, float, float]
"""An attempt that ended: job type, outcome, the job, when it got its place and when it ended (both by the monotonic clock)."""


class BoundedNames:
    """Names as values of a label: the first ones that come as they are, all others as "others".

    Args:
        most: Number of names that have a value of their own.
    """

    def __init__(self, most: int = _MOST_NAMES) -> None:
        self._most = most
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        """The value of the label for a name."""
        if name in self._names:
            return name
        if len(self._names) < self._most:
            self._names.add(name)
            return name
        return OTHERS


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
        # Counts of each bucket, the last one for what is longer than all bounds, then the sum.
        self._series: dict[tuple[str, ...], list[float]] = {}

    def observe(self, labels: tuple[str, ...], times: Sequence[float], weight: float = 1.0) -> None:
        """Count times, which are sorted, as `weight` times as many."""
        series = self._series.get(labels)
        if series is None:
            labels = (self._names.label(labels[0]), *labels[1:])
            series = self._series.setdefault(labels, [0.0] * (len(_TIMES) + 2))
        series[-1] += sum(times) * weight
        begin = 0
        while begin < len(times):
            # As many as are in the bucket of the shortest of those that are left.
            bucket = bisect_left(_TIMES, times[begin])
            end = bisect_right(times, _TIMES[bucket], begin) if bucket < len(_TIMES) else len(times)
            series[bucket] += (end - begin) * weight
            begin = end

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client`."""
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for labels, series in list(self._series.items()):
            seen, total = 0.0, 0.0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*_TIMES, float("inf")), series, strict=False):
                seen += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), seen))
            total = series[-1]
            family.add_metric(list(labels), buckets, total)
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
        ended: Attempts that ended, to which the executor appends.
        times: The histograms of the times of each job.
        clock_ahead_s: Seconds that the database's clock is ahead of this machine's, as far as is known.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._types, self._streams, self._groups = BoundedNames(), BoundedNames(), BoundedNames()
        self.clock_ahead_s = 0.0
        self._wall = time.time() - time.monotonic()
        self._wait = Times(
            "penstock_job_wait_seconds",
            "Time from when a job could run to its start; counted when the attempt ends.",
            ["type", "outcome"],
            self._types,
        )
        self._run = Times(
            "penstock_job_run_seconds", "Time that an attempt ran, by its outcome.", ["type", "outcome"], self._types
        )
        self.ended: list[Ended] = []
        self._folding = threading.Lock()
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

    def fold(self) -> None:
        """Count the attempts that ended. May be called from any thread."""
        with self._folding:
            ended = self.ended[:]
            del self.ended[: len(ended)]
            if not ended:
                return
            names, outcomes, jobs, since, until = zip(*ended, strict=True)
            if len(set(names)) == 1 and len(set(outcomes)) == 1:
                self._count(names[0], outcomes[0], jobs, since, until)
                return
            groups: dict[tuple[str, str], list[Ended]] = {}
            for one in ended:
                groups.setdefault(one[:2], []).append(one)
            for (name, outcome), group in groups.items():
                _, _, jobs, since, until = zip(*group, strict=True)
                self._count(name, outcome, jobs, since, until)

    def _count(self, name: str, outcome: str, jobs: Sequence[Timed], since: Sequence[float], until: Sequence[float]) -> None:
        """Count attempts of one type with one outcome."""
        self._run.observe((name, outcome), sorted(map(operator.sub, until, since)))
        # Times of jobs are by the clock of the database. To convert them costs more than all else: of many, a part is enough.
        step = 1 + len(jobs) // _MOST_WAITS
        ahead = self._wall + self.clock_ahead_s
        waits = [
            max(began + ahead - max(job.run_after, job.created_at).timestamp(), 0.0)
            for job, began in zip(jobs[::step], since[::step], strict=True)
        ]
        self._wait.observe((name, outcome), sorted(waits), len(jobs) / len(waits))

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
            if outcome in _REFUSED:
                self._stale.inc(results)
            else:
                self._settled.labels(self._types.label(name), outcome).inc(results)
        for name, results in succeeded.items():
            if results:
                self._settled.labels(self._types.label(name), "succeeded").inc(results)
        self._settle_s.observe(seconds)
        self._settle_jobs.observe(len(names))
        self.fold()

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
