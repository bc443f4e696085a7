"""The walks of docs/architecture.md name files that exist, in an order that comes back to none of them, and SQL that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src" / "penstock"
SCHEMA = SOURCES / "postgres" / "schema"
TEXT = (ROOT / "docs" / "architecture.md").read_text("utf-8")
FILE = re.compile(r"`((?:[a-z_]+/)*[a-z0-9_]+\.(?:py|sql))`")
WALKS = dict(re.findall(r"^\*\*(An? [^*]+)\*\*[^\n]*:\n\n(.*?)(?=\n\n\*\*|\n\n## )", TEXT, re.MULTILINE | re.DOTALL))


def files_of(walk: str) -> list[str]:
    """The files that a walk names. One without a folder stands beside the one before it."""
    found: list[str] = []
    for name in FILE.findall(WALKS[walk]):
        found.append(name if "/" in name else f"{found[-1].rpartition('/')[0]}/{name}")
    return found


def test_there_are_five_walks() -> None:
    assert list(WALKS) == ["A job", "A keyed job", "An event", "A message", "An HTTP PUT"]


@pytest.mark.parametrize("walk", WALKS)
def test_the_files_of_a_walk_exist_and_none_comes_twice(walk: str) -> None:
    files = files_of(walk)
    assert len(files) >= 5
    missing = [name for name in files if not any((base / name).is_file() for base in (SOURCES, SCHEMA))]
    assert not missing, f"{walk}: these files are gone: {missing}"
    assert sorted(set(files)) == sorted(files), f"{walk} comes back to a file"


@pytest.mark.parametrize("walk", WALKS)
def test_the_functions_that_a_walk_names_in_sql_are_there(walk: str) -> None:
    named = re.findall(r"`(\w+)` in\s+`(functions/[a-z_]+/[a-z_]+\.sql)`", WALKS[walk])
    for function, file in named:
        assert f"function penstock.{function}(" in (SCHEMA / file).read_text("utf-8"), f"{function} is not in {file}"
