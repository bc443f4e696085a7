"""Every command and every route that the documents, hints and messages name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.cli import app
from penstock.cli.lazy import LazyCommand
from penstock.http.server import http_routes

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r"(?<![\w./-])penstock ([a-z][a-z-]*(?: [a-z][a-z-]*)*)")
# Behind a command a text goes on with words of its own ("penstock workers shows them"), except where the command is set off.
SET_OFF = re.compile(r"(?:[`'\"]|: |    |\$ )$")
NAMES_OF_OTHERS = {"penstock workers for"}  # of an application on Spark
ROUTE = re.compile(r"\b((?:GET|POST|PUT|PATCH|DELETE)(?:, (?:GET|POST|PUT|PATCH|DELETE))*) (/v[12]/[\w{}/-]+)")


def texts() -> Iterator[tuple[str, str]]:
    files = [ROOT / "README.md"]
    for folder, kinds in {
        "docs": ["md"],
        "src": ["py", "sql", "html"],
        "deploy": ["yaml", "json", "service"],
        "examples": ["py", "md"],
    }.items():
        files += [file for kind in kinds for file in (ROOT / folder).rglob(f"*.{kind}")]
    assert len(files) > 500
    for file in sorted(files):
        yield str(file.relative_to(ROOT)), file.read_text("utf-8")


@pytest.fixture(scope="module")
def groups() -> dict[str, set[str]]:
    """The commands below each command that has some; none for the others."""
    commands: Any = typer.main.get_command(app)
    loaded = {
        name: command.loaded() if isinstance(command, LazyCommand) else command for name, command in commands.commands.items()
    }
    return {name: set(getattr(command, "commands", ())) for name, command in loaded.items()}


def test_each_command_below_another_that_a_text_names_exists(groups: dict[str, set[str]]) -> None:
    named, unknown = 0, []
    for name, text in texts():
        for found in NAMED.finditer(text):
            first, *rest = found[1].split()
            below = groups.get(first, set())
            if not below or not rest:
                continue
            named += 1
            if rest[0] not in below and SET_OFF.search(text[: found.start()][-4:]) and found[0] not in NAMES_OF_OTHERS:
                unknown.append(f"{name}: {found[0]}")
    assert named > 200, named
    assert not unknown, unknown


def test_each_route_that_a_document_names_exists() -> None:
    routes = {
        (method, re.compile(re.sub(r"\\\{\w+(?:\\?:\w+)?\\\}", "[^/]+", re.escape(route.path)) + "$"))
        for route in http_routes(None).routes
        for method in getattr(route, "methods", None) or ()
    }
    assert len(routes) > 100
    named, unknown = 0, []
    for name, text in texts():
        if not name.endswith(".md"):
            continue
        for methods, path in ROUTE.findall(text):
            named += 1
            for method in methods.split(", "):
                if not any(method == of and pattern.match(path.rstrip("/")) for of, pattern in routes):
                    unknown.append(f"{name}: {method} {path}")
    assert named > 100
    assert not unknown, unknown
