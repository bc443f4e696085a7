"""The files of the schema: a process reads them once, and a long function states why it is long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.postgres import migrate

MOST_LINES = 89
MOST_LINES_OF_A_FILE = 400
FUNCTION = re.compile(r"^create or replace function penstock\.(\w+)\(.*?^\$\$;$", re.MULTILINE | re.DOTALL)


def test_the_files_of_the_schema_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, functions = migrate.schema_files("tables"), migrate.schema_files("functions")
    checksum = migrate.checksum_of(functions)
    assert tables and functions

    def replaced(package: str) -> object:
        raise AssertionError("the package was read again")

    monkeypatch.setattr(migrate.resources, "files", replaced)
    assert migrate.schema_files("tables") is tables
    assert migrate.checksum_of(migrate.schema_files("functions")) == checksum


def test_a_long_function_states_why_at_its_head() -> None:
    unexplained = []
    for text in (file.text for file in migrate.schema_files("functions")):
        for function in FUNCTION.finditer(text):
            comment = text[: function.start()].rpartition("\n\n")[2]
            if function[0].count("\n") >= MOST_LINES and not comment.startswith("-- Long"):
                unexplained.append(function[1])
    assert unexplained == [], (
        f"split these functions of more than {MOST_LINES} lines, or state why they are long: -- Long, since ..."
    )


def test_a_file_of_functions_does_one_thing() -> None:
    """One that has grown past this usually does two: split it by thing."""
    lines = {file.name: file.text.count("\n") for file in migrate.schema_files("functions")}
    assert [name for name, count in lines.items() if count > MOST_LINES_OF_A_FILE] == []


def test_the_files_that_comments_name_are_there() -> None:
    folder = Path(migrate.__file__).with_name("schema")
    named = {
        (str(file.relative_to(folder)), name)
        for file in folder.rglob("*.sql")
        for name in re.findall(r"\b(?:tables|functions/\w+)/\w+\.sql", file.read_text())
    }
    assert named
    assert [(file, name) for file, name in sorted(named) if not (folder / name).exists()] == []
