"""The reports of one process or of several, and the endpoint that shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prometheus_client.core import Metric

from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.endpoint import Endpoint
from penstock.worker.exposition import Exposition, Report, merged, totals


class Collected:
    """The latest report of each process that reports, and the totals of those that have ended. Safe to use from many threads."""

    def __init__(self) -> None:
        self._latest: dict[Hashable, Report] = {}
        self._ended: list[Metric] = []
        self._lock = threading.Lock()

    def take(self, process: Hashable, report: Report) -> None:
        """A process has reported. The report counts as made now, by the clock of this process."""
        with self._lock:
            self._latest[process] = replace(report, at=time.monotonic())

    def lose(self, process: Hashable) -> None:
        """A process has ended. Its counts stay."""
        with self._lock:
            if (last := self._latest.pop(process, None)) is not None:
                self._ended = merged([self._ended, totals(last)])

    def latest(self) -> list[Report]:
        """The latest report of each process that is there."""
        with self._lock:
            return list(self._latest.values())

    def ended(self) -> list[Metric]:
        """The totals of the processes that have ended."""
        with self._lock:
            return self._ended


@contextmanager
def serving(
    address: tuple[str, int],
    url: str,
    settings: Settings,
    reports: Callable[[], Sequence[Report]],
    ended: Callable[[], Sequence[Metric]] = lambda: (),
    processes: int = 1,
) -> Iterator[int]:
    """Serve `/metrics`, `/livez` and `/readyz` while the block lasts. Yields the port.

    Args:
        address: Host and port; port 0: any free one.
        url: URL of the database, to which the endpoint has a connection of its own, opened when it is first needed.
        settings: Settings of the application.
        reports: The latest reports of all processes.
        ended: Totals of processes that have ended.
        processes: Number of processes that should report.

    Raises:
        InvalidInput: The address cannot be used.
    """
    database = Database(url, settings.model_copy(update={"pool_size": 1}), "penstock metrics")
    exposition = Exposition(database, reports, ended, lambda: processes)
    endpoint = Endpoint(address, exposition.routes, exposition.close)
    try:
        yield endpoint.port
    finally:
        endpoint.close()
