"""Real server processes for the tests of a module, or for all of the dashboard, and clients that speak to them over a socket."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator

import httpx
import pytest

from penstock.testing import TemporaryDatabases
from tests.http.dashboard_browser import Reader
from tests.http.dashboard_server import prepare, reader
from tests.http.http_server import Served, serving


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url, serving(url) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def echo(client: httpx.Client) -> str:
    """A job type of its own for each test."""
    name = f"echo-{secrets.token_hex(4)}"
    body = {"name": name, "delivery_strategy": "at_least_once", "attempts": 3, "concurrency": 5}
    assert client.post("/v1/jobs", json=body).status_code == 201
    return name


@pytest.fixture(scope="session")
def dashboard(databases: TemporaryDatabases) -> Iterator[Served]:
    """A server with a user of each role, one of some types, and something of others in every place."""
    with databases.database() as url:
        asyncio.run(prepare(url))
        masked = {"PENSTOCK_HTTP_DASHBOARD_MASKED": "iban,secret:*"}
        with serving(url, PENSTOCK_HTTP_LONGEST_WAIT="0.2", **masked) as served:
            yield served


@pytest.fixture
def admin(dashboard: Served) -> Iterator[Reader]:
    with reader(dashboard, "admin") as reading:
        yield reading
