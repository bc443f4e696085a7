"""A real server process for the pages of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing import TemporaryDatabases
from tests.http.http_server import Served, serving


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url, serving(url) as served:
        yield served
