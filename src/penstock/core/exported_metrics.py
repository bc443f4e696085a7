"""The metrics of this process through OpenTelemetry's metrics API, under the names of a scrape.

The instruments are asynchronous: at each export they read what the process counts anyway, so that nothing is added to what a job
or an event costs. The API knows no asynchronous histogram; the series of one, which a scrape shows as `_bucket`, `_sum` and
`_count`, are instruments of their own. They are up-down counters, and not counters: only those have the same name on each way to
a Prometheus (counters get the ending `_total`), and only those are cumulative whatever an exporter prefers.

Instruments cannot be removed, so a process makes each once, and they read from what the process counts at the time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

from penstock._version import __version__
from penstock.core.extras import needs
from penstock.core.logs import get_logger

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from prometheus_client.core import Metric

log = get_logger("penstock.metrics")
_FLUSHES_WITHIN_MS = 5_000
_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


@asynccontextmanager
async def exporting(
    declared: Iterable[Metric], read: Callable[[], Iterable[Metric]], provider: MeterProvider | None = None
) -> AsyncIterator[None]:
    """Let OpenTelemetry read metrics while the block lasts. At its end they are exported once more.

    Args:
        declared: The families that there are, with or without samples.
        read: Returns them with their samples. It is called in threads of exporters, and may block.
        provider: Meter provider; None: that of the process, also when it is set later.

    Raises:
        MissingExtra: OpenTelemetry is not installed.
    """
    with needs("otel", "metrics through OpenTelemetry (Settings.otel_metrics)"):
        from opentelemetry import metrics
    used = provider or metrics.get_meter_provider()
    flush: Callable[[float], Any] | None = getattr(used, "force_flush", None)
    if flush is None:
        log.warning("no_meter_provider", hint="Set one when the application is imported, or start with opentelemetry-instrument.")
    instruments = _Instruments.of(used)
    instruments.sources.append(read)
    instruments.declare(declared)
    try:
        yield
    finally:
        flush = flush or getattr(metrics.get_meter_provider(), "force_flush", None)
        if flush is not None:
            # The exporter reads, for which it may need this loop.
            await asyncio.to_thread(flush, _FLUSHES_WITHIN_MS)
        instruments.sources.remove(read)


class _Instruments:
    """The instruments of one meter provider.

    Attributes:
        sources: Who is read; the last one counts.
    """

    _known: dict[int, tuple[MeterProvider, _Instruments]] = {}  # noqa: RUF012 - of the process, as its instruments are

    def __init__(self, provider: MeterProvider) -> None:
        self.sources: list[Callable[[], Iterable[Metric]]] = []
        self._meter = provider.get_meter("penstock", __version__)
        self._names: set[str] = set()
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        # Who has got the samples that are there. The first one that asks again begins another export.
        self._given: set[str] = set()
        self._reading = threading.Lock()

    @classmethod
    def of(cls, provider: MeterProvider) -> _Instruments:
        """Those of a provider."""
        return cls._known.setdefault(id(provider), (provider, cls(provider)))[1]

    def declare(self, families: Iterable[Metric]) -> None:
        """Make the instruments of families, where they are not there yet."""
        make = {"counter": self._meter.create_observable_counter, "gauge": self._meter.create_observable_gauge}
        for family in families:
            for name in _names_of(family):
                if name not in self._names:
                    self._names.add(name)
                    create: Any = make.get(family.type, self._meter.create_observable_up_down_counter)
                    create(name, [self._callback(name)], description=family.documentation)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            for labels, value in self._read(name):
                yield Observation(value, labels)

        return observe

    def _read(self, name: str) -> Sequence[tuple[dict[str, str], float]]:
        """The samples of a name, read once for all instruments in an export."""
        with self._reading:
            if name in self._given or not self._given:
                self._given.clear()
                self._samples = {}
                for family in self.sources[-1]() if self.sources else ():
                    # OpenTelemetry refuses values without an end, with a line in the log for each.
                    for sample in filter(lambda one: isfinite(one.value), family.samples):
                        self._samples.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
            self._given.add(name)
            return self._samples.get(name, ())


def _names_of(family: Metric) -> list[str]:
    """The names of the series of a family, as a scrape shows them."""
    if family.type == "counter":
        return [f"{family.name}_total"]
    if family.type == "histogram":
        return [family.name + ending for ending in _OF_HISTOGRAMS]
    return [family.name]
