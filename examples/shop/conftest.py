"""What the tests of the shop share: a fresh database for each, and the web application on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from httpx import ASGITransport, AsyncClient

from examples.shop.web import lifespan, web
from examples.shop.work import app
from penstock.testing import TemporaryDatabases, on_database


@pytest.fixture(scope="session")
def databases() -> Iterator[TemporaryDatabases]:
    """A PostgreSQL server of the tests' own; it takes about a second."""
    with TemporaryDatabases() as databases:
        yield databases


@pytest.fixture
async def browser(databases: TemporaryDatabases) -> AsyncIterator[AsyncClient]:
    """A client of the shop, which is open on a new database."""
    with databases.database() as url, on_database(app, url):
        async with lifespan(web), AsyncClient(transport=ASGITransport(app=web), base_url="http://shop") as client:
            yield client
