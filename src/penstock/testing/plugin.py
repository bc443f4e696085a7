"""The pytest plugin: a database for each test, and the application of one's own module on it.

`penstock_app = shop.jobs:app` in pytest's settings names the application. `PENSTOCK_TEST_DATABASE_URL` names a server on which
databases may be created; without it a temporary server starts with the first test that needs one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

# What is imported here is imported by every pytest run in an environment with this package.
if TYPE_CHECKING:
    from penstock.app import Penstock
    from penstock.testing.databases import TemporaryDatabases


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the setting that names the application."""
    parser.addini("penstock_app", "MODULE:APP of the application that penstock_app gives to tests")


@pytest.fixture(scope="session")
def penstock_databases() -> Iterator[TemporaryDatabases]:
    """A server on which each test gets a database of its own."""
    from penstock.testing.databases import TemporaryDatabases

    with TemporaryDatabases(os.environ.get("PENSTOCK_TEST_DATABASE_URL")) as databases:
        yield databases


@pytest.fixture
def penstock_database(penstock_databases: TemporaryDatabases) -> Iterator[str]:
    """URL of a fresh database with the schema of Penstock, which is dropped after the test."""
    with penstock_databases.database() as url:
        yield url


@pytest.fixture
def penstock_app(pytestconfig: pytest.Config, penstock_database: str) -> Iterator[Penstock]:
    """The application that `penstock_app` in pytest's settings names, on a fresh database.

    It is not open: an async test opens it with `async with penstock_app:`, a plain one calls `penstock_app.sync`.
    """
    from penstock.app import load
    from penstock.testing.running import on_database

    target = str(pytestconfig.getini("penstock_app"))
    if not target:
        pytest.fail("name the application in pytest's settings: penstock_app = shop.jobs:app", pytrace=False)
    with on_database(load(target), penstock_database) as app:
        yield app
