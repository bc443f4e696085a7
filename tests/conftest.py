"""What all tests share: a server, and throw-away databases."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import hypothesis
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases

# No test fails for being slow.
hypothesis.settings.register_profile("penstock", deadline=None, print_blob=True)
hypothesis.settings.load_profile("penstock")


@pytest.fixture(scope="session")
def databases() -> Iterator[TemporaryDatabases]:
    """Databases on the embedded server, on another PostgreSQL's programs, or on a server that is there already."""
    bin_dir = os.environ.get("PENSTOCK_TEST_POSTGRES_BIN")
    with TemporaryDatabases(
        os.environ.get("PENSTOCK_TEST_DATABASE_URL"), bin_dir=Path(bin_dir) if bin_dir else None
    ) as databases:
        if bin_dir:
            _let_roles_in(databases)
        yield databases


def _let_roles_in(databases: TemporaryDatabases) -> None:
    """Before PostgreSQL 16 the embedded server asks roles for passwords, which those of tests do not have."""
    assert databases.server is not None
    rules = databases.server.data_dir / "postgres" / "pg_hba.conf"
    rules.write_text(rules.read_text().replace("scram-sha-256", "trust"))
    asyncio.run(databases.execute("select pg_reload_conf()"))


@pytest.fixture
def url(databases: TemporaryDatabases) -> Iterator[str]:
    with databases.database() as url:
        yield url


@pytest.fixture
async def app(url: str) -> AsyncIterator[Penstock]:
    async with Penstock(url) as app:
        yield app


@pytest.fixture
async def sql(url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(url)
    yield connection
    connection.terminate()
