"""A real server process for the pages of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from http_server import Served, serving

from penstock.testing import TemporaryDatabases


@pytest.fixture(scope="module")
def served(databases: TemporaryDatabases) -> Iterator[Served]:
    with databases.database() as url, serving(url) as served:
        yield served
