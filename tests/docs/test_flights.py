"""The flights on a stream, with few of them: fewer batches than consumers; and the demonstration of the dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.dashboard_browser import Reader, text_of
from tests.http.http_server import TOKEN, serving
from tests.waiting import until

ROOT = Path(__file__).parents[2]
# Of all pages these alone may be empty: no lake is there, and nothing was changed.
PAGES = (
    "", "jobs", "jobs?status=unfinished", "failures", "types", "pools", "pools/checks", "streams", "streams/movements/events",
    "streams/movements/dead", "topics", "topics/long-delays", "workflows", "workers", "schedules", "operations",
)  # fmt: skip


def test_a_thousand_flights_are_followed_on_a_stream(url: str) -> None:
    done = ran("import asyncio; from examples.flights import stream; asyncio.run(stream.main(1000))", url)
    assert "1,000 legs, each once" in done


@pytest.mark.soak
def test_the_demonstration_puts_something_on_each_page_of_the_dashboard(url: str) -> None:
    ran("import asyncio; from examples.flights import demo; asyncio.run(demo.one_round())", url)
    # As `make demo` starts it.
    up = ("up", "examples.flights.demo:app", "--http")
    with serving(url, command=up) as served, Reader(served.base_url + "/") as reading:
        reading.log_in("admin", TOKEN)
        until(lambda: 'class="empty"' not in reading.get("workers").text, "the worker")
        assert [page for page in PAGES if 'class="empty"' in reading.get(page).text] == []
        overview = text_of(reading.get("").text)
        assert "jobs of lost-luggage wait, and no worker works on this type" in overview
        assert "jobs of gate failed in the last hour" in overview or "jobs of import-row failed" in overview
        # Live work goes on.
        before = finished(reading)
        until(lambda: finished(reading) > before, "more departures")


def finished(reading: Reader) -> int:
    """How many departures the page of the stream has."""
    words = text_of(reading.get("streams/movements").text)
    return int(words.split("Events stored ")[1].split()[0].replace(",", ""))


def ran(program: str, url: str) -> str:
    """Run a program in a process of its own. Returns what it printed."""
    environment = {**os.environ, "PENSTOCK_DATABASE_URL": url, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-3000:]
    return done.stdout
