"""A process compares the schema with the files that it started with, whatever becomes of the package meanwhile."""

from __future__ import annotations

import pytest

from penstock.postgres import migrate


def test_the_files_of_the_schema_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, functions = migrate._files("tables"), migrate._files("functions")
    checksum = migrate._checksum(functions)
    assert tables and functions

    def replaced() -> object:
        raise AssertionError("the package was read again")

    monkeypatch.setattr(migrate, "_schema", replaced)
    assert migrate._files("tables") is tables
    assert migrate._checksum(migrate._files("functions")) == checksum
