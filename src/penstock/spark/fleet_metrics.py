"""The metrics of a fleet: its workers report to the driver, whose endpoint shows them together.

An executor's address is known to Spark alone, so that nothing outside could scrape it. The driver is known, and each executor
reaches it, or Spark would not use it. So a worker opens a connection to the driver, says the token of the fleet, and sends its
report every few seconds. It does not connect again once the connection has ended: an executor that loses its driver ends too.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import orjson

from penstock.core.blocking import BackgroundLoop
from penstock.core.logs import get_logger
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.core.meter import Meter
    from penstock.settings import Settings
    from penstock.worker.collected import Collected
    from penstock.worker.exposition import Report
    from penstock.worker.progress import Progressing

log = get_logger("penstock.fleet")
_EVERY_S = 5.0
_CONNECTS_WITHIN_S = 5.0
_STALLS_AT_MOST_S = 120.0
_MOST_BYTES = 64 * 1024 * 1024
_SIZE_BYTES = 4


@dataclass(frozen=True, slots=True)
class ReportsTo:
    """Where the workers of a fleet report: host and port of the driver, and the token that it expects."""

    host: str
    port: int
    token: str


@contextmanager
def collecting(
    address: tuple[str, int], url: str, settings: Settings, workers: int, host: str, bind: str | None = None
) -> Iterator[ReportsTo]:
    """Serve the metrics of a fleet while the block lasts.

    Args:
        address: Host and port of the endpoint.
        url: URL of the database.
        settings: Settings for the endpoint's connection.
        workers: Number of workers that should report.
        host: Host under which executors reach this process.
        bind: Address to listen at for them; None: `host`.

    Raises:
        InvalidInput: The address cannot be used.
    """
    from penstock.worker.collected import Collected, serving

    collected = Collected()
    loop = BackgroundLoop(timeout=timedelta(seconds=10))
    receiver = _Receiver(collected)
    try:
        port = loop.run(receiver.listen(bind or host))
        with serving(address, url, settings, collected.latest, collected.ended, workers):
            yield ReportsTo(host, port, receiver.token)
    finally:
        loop.close(receiver.close())


class _Receiver:
    """Takes the reports of workers, by the token that they were given."""

    def __init__(self, collected: Collected) -> None:
        self.token = secrets.token_hex(16)
        self._collected = collected
        self._server: asyncio.Server | None = None

    async def listen(self, host: str) -> int:
        """Begin. Returns the port. Raises `InvalidInput` when this machine has no such address."""
        try:
            self._server = await asyncio.start_server(self._accept, host, 0)
        except OSError as error:
            raise InvalidInput(
                f"cannot listen for a fleet's reports on {host}: {error.strerror or error}",
                hint="Set spark.driver.bindAddress to an address of this machine, or leave out --metrics.",
            ) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End."""
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        process = object()
        try:
            async with asyncio.timeout(_CONNECTS_WITHIN_S):
                token = await reader.readexactly(len(self.token))
            if not hmac.compare_digest(token, self.token.encode()):
                return
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "big")
                if size > _MOST_BYTES:
                    log.error("fleet_report_refused", bytes=size)
                    return
                self._collected.take(process, read(await reader.readexactly(size)))
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # it is gone
        except Exception as error:
            log.error("fleet_report_failed", error=error)
        finally:
            self._collected.lose(process)
            writer.close()


@contextmanager
def reporting(to: ReportsTo, meter: Meter, workers: Callable[[], Sequence[Progressing]]) -> Iterator[None]:
    """Send reports of this process to the driver while the block lasts, and a last one at its end."""
    from penstock.worker.exposition import report_of

    ended = threading.Event()

    def run() -> None:
        connection = _connected(to, ended)
        if connection is None:
            return
        with connection:
            # A driver that stands still for a while is not gone.
            connection.settimeout(_STALLS_AT_MOST_S)
            try:
                connection.sendall(to.token.encode())
                while True:
                    last = ended.is_set()
                    report = written(report_of(meter, workers()))
                    connection.sendall(len(report).to_bytes(_SIZE_BYTES, "big") + report)
                    if last:
                        return
                    ended.wait(_EVERY_S)
            except OSError as error:
                log.warning("fleet_reports_ended", error=error)

    thread = threading.Thread(target=run, name="penstock-report", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CONNECTS_WITHIN_S)


def _connected(to: ReportsTo, ended: threading.Event) -> socket.socket | None:
    """A connection to the driver; None: it did not come before the end."""
    said = False
    while True:
        try:
            return socket.create_connection((to.host, to.port), timeout=_CONNECTS_WITHIN_S)
        except OSError as error:
            if not said:
                log.warning("fleet_driver_not_reached", host=to.host, port=to.port, error=error)
                said = True
        if ended.wait(_EVERY_S):
            return None


def written(report: Report) -> bytes:
    """A report as JSON text."""
    families = [
        (family.name, family.documentation, family.type, [(one.name, one.labels, one.value) for one in family.samples])
        for family in report.families
    ]
    return orjson.dumps((families, report.idle_s, report.running, report.stopping))


def read(text: bytes) -> Report:
    """The report in JSON text."""
    from prometheus_client.core import Metric

    from penstock.worker.exposition import Report

    families = []
    given, idle_s, running, stopping = orjson.loads(text)
    for name, documentation, kind, samples in given:
        family = Metric(name, documentation, kind)
        for sample, labels, value in samples:
            family.add_sample(sample, labels, value)
        families.append(family)
    return Report(families, idle_s, running, stopping)
