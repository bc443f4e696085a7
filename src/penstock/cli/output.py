"""What the commands share: options, tables for people and JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.times import shown
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.app import Penstock

# The output of a pipe is not folded.
out = Console(width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def pass_on_json(context: typer.Context, as_json: bool) -> bool:
    """Whether a command below this one was called; it then writes JSON too when `--json` stands before it."""
    if context.invoked_subcommand is None:
        return False
    if as_json:
        context.default_map = {context.invoked_subcommand: {"as_json": True}}
    return True


class holding:  # noqa: N801 - reads as a verb
    """Keeps the embedded server of an app running, when it has one."""

    def __init__(self, penstock: Penstock) -> None:
        from penstock.postgres.embedded import EmbeddedServer

        self._server = None if penstock.settings.database_url is not None else EmbeddedServer(penstock.settings.data_dir)

    def __enter__(self) -> None:
        if self._server is not None:
            self._server.start()

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()


def opened(file: Path) -> IO[bytes]:
    """A file to read; - is standard input. Raises `InvalidInput`."""
    if str(file) == "-":
        return sys.stdin.buffer
    try:
        return file.open("rb")
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from None


def print_json(value: Any) -> None:
    """Print a value as JSON; a list prints one document."""
    try:
        typer.echo(orjson.dumps(value, default=_plain, option=orjson.OPT_INDENT_2).decode())
    except TypeError:
        # PostgreSQL's JSON has whole numbers of any size.
        typer.echo(json.dumps(value, default=_plain, indent=2))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):  # a NamedTuple, such as the receipt of an enqueue
        return value._asdict()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def say(value: Any, text: str, as_json: bool) -> None:
    """Print what a command has done: as JSON for programs, or as a text for people."""
    if as_json:
        print_json(value)
    else:
        out.print(text, highlight=False, markup=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    """Print a table for people, or what to say when it is empty."""
    if not rows:
        out.print(empty, markup=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(Text(column), overflow="fold", no_wrap=place == 0)
    for row in rows:
        # No value is markup: keys and names may have brackets.
        table.add_row(*(Text(cell(value)) for value in row))
    out.print(table)


def cell(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return shown(value)
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if is_dataclass(value) and not isinstance(value, type):  # such as a backoff
        return ", ".join(f"{field.name} {cell(getattr(value, field.name))}" for field in fields(value))
    return str(value)
