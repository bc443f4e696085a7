"""How the workers of a fleet report to the driver, without Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from penstock.core.meter import Meter
from penstock.errors import InvalidInput
from penstock.settings import Settings
from penstock.spark import fleet_metrics
from penstock.spark.fleet_metrics import ReportsTo, collecting, reporting
from penstock.worker.exposition import report_of
from tests.http.http_server import free_port
from tests.measured_worker import value_of
from tests.waiting import until

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"
SETTLED = 'penstock_jobs_settled_total{outcome="succeeded",type="mail"}'


@contextmanager
def driver(workers: int = 2) -> Iterator[tuple[ReportsTo, str]]:
    port = free_port()
    with collecting(("127.0.0.1", port), NOWHERE, Settings(connect_timeout=1), workers, "127.0.0.1") as to:
        yield to, f"http://127.0.0.1:{port}/metrics"


def meter(jobs: int) -> Meter:
    made = Meter()
    made.settled(["mail"] * jobs, [], 0.1)
    return made


def settled(address: str) -> float:
    return value_of(httpx.get(address, timeout=60).text, SETTLED)


def test_a_report_is_read_as_it_was_written() -> None:
    report = report_of(meter(3), [])
    read = fleet_metrics.read(fleet_metrics.written(report))
    assert (read.idle_s, read.running, read.stopping) == (report.idle_s, report.running, report.stopping)
    assert read.families == report.families


def test_the_counts_of_workers_are_added_and_stay_when_one_ends() -> None:
    with driver() as (to, address):
        with reporting(to, meter(3), list):
            with reporting(to, meter(4), list):
                until(lambda: settled(address) == 7, "both reports")
            until(lambda: settled(address) == 7, "the counts of the one that has ended")
        until(lambda: settled(address) == 7, "the counts of both")


def test_a_connection_without_the_token_is_not_heard() -> None:
    with driver() as (to, address):
        wrong = ReportsTo(to.host, to.port, "0" * len(to.token))
        with reporting(wrong, meter(100), list):
            pass
        with socket.create_connection((to.host, to.port), timeout=60) as strange:
            strange.sendall(b"GET / HTTP/1.1\r\nHost: driver.example.com\r\n\r\n")
            with suppress(ConnectionResetError):  # what it had sent was not read
                assert strange.recv(100) == b""
        with reporting(to, meter(1), list):
            until(lambda: settled(address) == 1, "a report with the token")


def test_a_worker_whose_driver_cannot_be_reached_works_all_the_same() -> None:
    with reporting(ReportsTo("127.0.0.1", free_port(), "token"), meter(1), list):
        pass


def test_an_address_that_is_not_of_this_machine_is_refused_with_what_to_do() -> None:
    with (
        pytest.raises(InvalidInput, match="192.0.2.1") as refused,
        collecting(("127.0.0.1", 0), NOWHERE, Settings(), 1, "192.0.2.1"),
    ):
        pass
    assert "bindAddress" in (refused.value.hint or "")
