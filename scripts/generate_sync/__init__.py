"""Write the blocking halves from the asynchronous code: `make format` runs this, `make check` asks whether they are up to date.

There are two ways. A class of the application (`Stream`, `Pool`, ...) gets a *mirror*: a class with the same methods, parameters
and docstrings, each of which runs the asynchronous one through a `BackgroundLoop`. The HTTP client is *translated*: the modules
of `penstock.client.aio` without their `async` and `await` are the modules of `penstock.client.sync`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.generate_sync.common import path_of
from scripts.generate_sync.mirrors import MIRRORS, mirrored
from scripts.generate_sync.translation import CLIENT, translated

ROOT = Path(__file__).parents[2]
RUFF = Path(sys.executable).with_name("ruff")


def generated() -> Iterator[tuple[Path, str]]:
    """Each generated file, and what it has to contain."""
    for name, mirrors in MIRRORS.items():
        yield path_of(name), formatted(mirrored(name, mirrors), path_of(name))
    for path in sorted(path_of(CLIENT).with_suffix("").glob("*.py")):
        written = path.parents[1] / "sync" / path.name
        yield written, formatted(translated(path), written)


def formatted(text: str, path: Path) -> str:
    """The text as `make format` leaves it."""
    for command in (["check", "--quiet", "--fix", "--exit-zero"], ["format", "--quiet"]):
        arguments = [str(RUFF), *command, "--stdin-filename", str(path), "-"]
        text = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text
