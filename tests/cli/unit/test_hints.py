"""Commands that errors and hints name exist."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from penstock.cli import app
from penstock.cli.lazy import LazyCommand

# As hints name them: behind a colon, a comma, "or", "and" or "with", or in backticks.
NAMED = re.compile(r"(?:: |, |\bor |\band |\bwith |`)penstock ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)(?=[ .;,`'\"%)])([^;`\n]*)")


def test_every_command_that_a_hint_names_exists() -> None:
    commands: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    loaded = {name: each.loaded() if isinstance(each, LazyCommand) else each for name, each in commands.items()}
    unknown, seen = [], 0
    for path in sorted(Path(str(files("penstock"))).rglob("*")):
        if path.suffix not in (".py", ".sql"):
            continue
        for words, rest in NAMED.findall(path.read_text()):
            first, _, second = words.partition(" ")
            command = loaded.get(first)
            if second and hasattr(command, "commands"):
                command = command.commands.get(second)
            seen += 1
            if command is None:
                unknown.append(f"{path.name}: penstock {words}")
                continue
            options = {name for parameter in command.params for name in parameter.opts}
            unknown += [
                f"{path.name}: penstock {words} {option}"
                for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)
                if option not in options
            ]
    assert seen > 40
    assert unknown == []
