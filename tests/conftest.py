"""What all tests share: a server, and throw-away databases."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import hypothesis
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.stock_server import serving

# No test fails for being slow.
hypothesis.settings.register_profile("penstock", deadline=None, print_blob=True)
hypothesis.settings.load_profile("penstock")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a folder of its own for `tmp_path`.

    Runs of one user otherwise share a folder, which each closes to other users when it starts. For root, the embedded server runs
    as another user, who has to pass through that folder.
    """
    # What is imported and collected stays: there is nothing to free before the first test.
    gc.disable()
    if not hasattr(config, "workerinput"):
        os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.mkdtemp(prefix="penstock-")


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of each garbage collection in the tests, most of whose time it would take."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove that folder, unless a test failed, whose files may say why."""
    if not hasattr(session.config, "workerinput") and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(os.environ["PYTEST_DEBUG_TEMPROOT"], ignore_errors=True)


@pytest.fixture(scope="session")
def databases() -> Iterator[TemporaryDatabases]:
    """Databases on the embedded server, on another PostgreSQL's programs, on a server that is there, or on a stock one."""
    bin_dir = os.environ.get("PENSTOCK_TEST_POSTGRES_BIN")
    if kind := os.environ.get("PENSTOCK_TEST_SERVER"):
        with serving(kind) as server, TemporaryDatabases(server.url) as databases:
            yield databases
        return
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
