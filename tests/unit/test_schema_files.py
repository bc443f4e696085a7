"""A process compares the schema with the files that it started with, whatever becomes of the package meanwhile."""

from __future__ import annotations

import pytest

from penstock.postgres import migrate


def test_the_files_of_the_schema_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, functions = migrate.schema_files("tables"), migrate.schema_files("functions")
    checksum = migrate.checksum_of(functions)
    assert tables and functions

    def replaced() -> object:
        raise AssertionError("the package was read again")

    monkeypatch.setattr(migrate, "_schema", replaced)
    assert migrate.schema_files("tables") is tables
    assert migrate.checksum_of(migrate.schema_files("functions")) == checksum
