"""Processes of an embedded server, seen from outside."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg


def belonging_to(folder: Path) -> dict[psutil.Process, list[str]]:
    """The processes that name the folder, with their command lines: a process may have ended when it is asked again."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if any(str(folder) in part for part in command) and process.pid != os.getpid():
                found[process] = command
    return found


def postmaster(folder: Path) -> int | None:
    try:
        return int((folder / "postgres" / "postmaster.pid").read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None


def execute(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []
