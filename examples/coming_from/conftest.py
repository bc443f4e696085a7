"""What the four tests share: a fresh database with the tables of the service, and work that is refused at first."""

from __future__ import annotations

import os

import pytest

from examples.coming_from import scenario, shop

# Read when the program for Dramatiq is imported.
os.environ["ORDERS_TESTING"] = "1"


@pytest.fixture(autouse=True)
def database(penstock_database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database of PostgreSQL for each test."""
    monkeypatch.setenv("ORDERS_DATABASE_URL", penstock_database)
    shop.create_tables()
    scenario.refuse_some_work()
