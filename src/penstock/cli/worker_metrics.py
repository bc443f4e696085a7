"""The endpoint of `penstock worker --metrics`: of one process, or of several that report to their supervisor.

Each worker process sends its report once a second over a pipe; the supervisor keeps the latest of each, and the totals of those
that have ended. A process that is suspended, or whose event loop stands still, is seen by the age of its report.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from penstock.app import Penstock
from penstock.core.meter import Meter
from penstock.worker.collected import Collected, serving
from penstock.worker.exposition import Report, report_of
from penstock.worker.progress import Progressing

_EVERY_S = 1.0


@contextmanager
def of_process(
    app: Penstock, url: str, address: tuple[str, int], meter: Meter, workers: Callable[[], Sequence[Progressing]]
) -> Iterator[int]:
    """Serve the metrics of this process while the block lasts. Yields the port."""
    with serving(address, url, app.settings, lambda: [report_of(meter, workers())]) as port:
        yield port


@contextmanager
def of_processes(app: Penstock, address: tuple[str, int], processes: int) -> Iterator[Reports]:
    """Serve the metrics of worker processes, which report over pipes, while the block lasts."""
    reports = Reports()
    # `database_url` also keeps the embedded server running, as the workers do.
    url = app.database_url()
    with serving(address, url, app.settings, reports.collected.latest, reports.collected.ended, processes):
        yield reports


class Reports:
    """The reports of worker processes, as their supervisor gets them.

    Attributes:
        collected: The reports.
    """

    def __init__(self) -> None:
        self.collected = Collected()

    def pipe(self) -> Connection:
        """The end of a new pipe for a process that is about to be started."""
        ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
        threading.Thread(target=self._read, args=[ours], name="penstock-reports", daemon=True).start()
        return theirs

    def _read(self, pipe: Connection) -> None:
        while True:
            try:
                report: Report = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from a process that this one has started
            except (EOFError, OSError):
                break
            self.collected.take(pipe, report)
        self.collected.lose(pipe)
        pipe.close()


@contextmanager
def reporting(pipe: Connection, meter: Meter, workers: Callable[[], Sequence[Progressing]]) -> Iterator[None]:
    """Send reports of this process while the block lasts, and a last one at its end."""
    ended = threading.Event()

    def run() -> None:
        with suppress(OSError):  # the supervisor is gone
            while True:
                last = ended.is_set()
                pipe.send_bytes(pickle.dumps(report_of(meter, workers())))
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
