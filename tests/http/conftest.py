"""A real server process for the tests of a module, and clients that speak to it over a socket."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import httpx
import pytest

from penstock.testing import TemporaryDatabases
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
