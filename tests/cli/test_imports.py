"""A command imports what it needs, and not the code of the other commands: most of the time of a short command is imports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer

from penstock.cli import app
from penstock.cli.lazy import COMMANDS, LazyCommand

LOADED = """
import sys
from penstock.cli import main
sys.argv[0] = "penstock"
try:
    main()
except SystemExit:
    pass
print("\\n".join(sys.modules), file=sys.stderr)
"""
# Modules of other commands and surfaces, which no command that only asks the database or a server needs.
OTHERS = [
    "fastapi", "uvicorn", "starlette", "pyspark", "pyarrow", "prometheus_client", "deltalake", "cryptography", "gear",
    "penstock.http", "penstock.spark", "penstock.integrations", "penstock.cli.serving", "penstock.cli.bulk",
    "penstock.cli.http", "penstock.cli.history", "penstock.cli.fleet", "penstock.cli.doctor", "penstock.cli.gearman",
]  # fmt: skip
DATABASE = ["penstock.app", "penstock.postgres.database", "penstock.worker.worker"]
NOT_IMPORTED = {
    "--help": [
        *OTHERS,
        *DATABASE,
        "asyncpg",
        "pydantic",
        "structlog",
        "orjson",
        "httpx",
        "penstock.cli.jobs",
        "penstock.cli.output",
    ],
    "version": [*OTHERS, *DATABASE, "asyncpg", "httpx", "penstock.cli.jobs", "penstock.cli.output"],
    "keys create": [*(name for name in OTHERS if name != "cryptography"), *DATABASE, "asyncpg", "httpx"],
    "jobs list --help": [*OTHERS, *DATABASE, "httpx"],
    "--server SERVER jobs list": [*OTHERS, "penstock.app"],
    "jobs list": [*OTHERS, "httpx"],
    "users list": [*(name for name in OTHERS if name not in ("penstock.http", "penstock.cli.http")), "penstock.http.server"],
}


def modules_of(arguments: str, **environment: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments.split()],
        env={**{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return set(done.stderr.splitlines())


class Refusing(BaseHTTPRequestHandler):
    """Refuses every request."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as refusing:
        thread = threading.Thread(target=refusing.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{refusing.server_port}"
        refusing.shutdown()
        thread.join()


@pytest.mark.parametrize("arguments", NOT_IMPORTED)
def test_a_command_does_not_import_what_it_does_not_need(url: str, server: str, arguments: str) -> None:
    found = modules_of(arguments.replace("SERVER", server), PENSTOCK_DATABASE_URL=url)
    assert "penstock.cli" in found
    assert sorted(found & set(NOT_IMPORTED[arguments])) == []


def test_what_a_command_needs_is_seen_by_this_test(url: str) -> None:
    assert {"penstock.app", "asyncpg", "penstock.cli.jobs"} <= modules_of("jobs list", PENSTOCK_DATABASE_URL=url)


def test_the_lines_of_help_are_those_of_the_commands() -> None:
    group: Any = typer.main.get_command(app)
    lazy = {name: command for name, command in group.commands.items() if isinstance(command, LazyCommand)}
    assert list(lazy) == list(COMMANDS)
    for name, command in lazy.items():
        loaded = command.loaded()
        assert (name, loaded.name, loaded.get_short_help_str(300)) == (name, name, command.get_short_help_str(300))


def test_every_command_of_a_module_is_listed() -> None:
    from importlib import import_module

    for module in {module for module, _ in COMMANDS.values()}:
        found = import_module(f"penstock.cli.{module}")
        if hasattr(found, "add_to"):
            commands = typer.Typer()
            found.add_to(commands)
            named = set(typer.main.get_group(commands).commands)
            assert named == {name for name, (of, _) in COMMANDS.items() if of == module}
