"""The pool of the tests of standing jobs."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Penstock
from penstock.pools.pool import Pool


@pytest.fixture
def pool(app: Penstock) -> Pool[Any]:
    return app.pool("tenants", slots=16)
