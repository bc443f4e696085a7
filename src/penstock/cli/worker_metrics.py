"""The endpoint of `penstock worker --metrics`: of one process, or of several that report to their supervisor.

Each worker process sends its report once a second over a pipe; the supervisor keeps the latest of each, and the totals of those
that have ended. A process that is suspended, or whose event loop stands still, is seen by the age of its report.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from prometheus_client.core import Metric

from penstock.app import Penstock
from penstock.core.meter import Meter
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker import Worker
from penstock.worker.endpoint import Endpoint
from penstock.worker.exposition import Exposition, Report, merged, report_of, totals

_EVERY_S = 1.0


@contextmanager
def of_process(
    app: Penstock, url: str, address: tuple[str, int], meter: Meter, worker: Callable[[], Worker | None]
) -> Iterator[None]:
    """Serve the metrics of this process while the block lasts."""
    with _served(address, Exposition(_database(url, app.settings), lambda: [report_of(meter, worker())])):
        yield


@contextmanager
def of_processes(app: Penstock, address: tuple[str, int], processes: int) -> Iterator[Reports]:
    """Serve the metrics of worker processes, which report over pipes, while the block lasts."""
    reports = Reports()
    # `database_url` also keeps the embedded server running, as the workers do.
    database = _database(app.database_url(), app.settings)
    with _served(address, Exposition(database, reports.latest, reports.ended, lambda: processes)):
        yield reports


@contextmanager
def _served(address: tuple[str, int], exposition: Exposition) -> Iterator[None]:
    endpoint = Endpoint(address, exposition.routes, exposition.close)
    try:
        yield
    finally:
        endpoint.close()


def _database(url: str, settings: Settings) -> Database:
    """A connection for the endpoint alone, which is opened when it is first needed."""
    return Database(url, settings.model_copy(update={"pool_size": 1}), "penstock metrics")


class Reports:
    """The reports of worker processes, as their supervisor has them."""

    def __init__(self) -> None:
        self._latest: dict[Connection, Report] = {}
        self._ended: list[Metric] = []
        self._lock = threading.Lock()

    def pipe(self) -> Connection:
        """The end of a new pipe for a process that is about to be started."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
        threading.Thread(target=self._read, args=[ours], name="penstock-reports", daemon=True).start()
        return theirs

    def latest(self) -> list[Report]:
        """The latest report of each process that is there."""
        with self._lock:
            return list(self._latest.values())

    def ended(self) -> list[Metric]:
        """The totals of the processes that have ended."""
        with self._lock:
            return self._ended

    def _read(self, pipe: Connection) -> None:
        while True:
            try:
                report: Report = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from a process that this one has started
            except (EOFError, OSError):
                break
            with self._lock:
                self._latest[pipe] = replace(report, at=time.monotonic())
        with self._lock:
            if (last := self._latest.pop(pipe, None)) is not None:
                self._ended = merged([self._ended, totals(last)])
        pipe.close()


@contextmanager
def reporting(pipe: Connection, meter: Meter, worker: Callable[[], Worker | None]) -> Iterator[None]:
    """Send reports of this process while the block lasts, and a last one at its end."""
    ended = threading.Event()

    def run() -> None:
        with suppress(OSError):  # the supervisor is gone
            while True:
                last = ended.is_set()
                pipe.send_bytes(pickle.dumps(report_of(meter, worker())))
                if last:
                    return
                ended.wait(_EVERY_S)

    thread = threading.Thread(target=run, name="penstock-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_EVERY_S)
