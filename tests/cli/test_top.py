"""The live screen of `penstock top`, in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

from penstock import Penstock
from penstock.testing import TemporaryDatabases
from tests.command_line import Command
from tests.waiting import until

# The longest time for which a screen stays as it is, when its reading took long, and some more.
_LONGEST_S = 330.0
_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A terminal of so many lines and columns, and what was written to it."""

    def __init__(self, lines: int, columns: int) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.path = Path(os.ttyname(self._slave))
        self._written = b""

    def close(self) -> None:
        os.close(self._slave)
        os.close(self._master)

    @property
    def written(self) -> str:
        """All that was written, with its codes."""
        while select.select([self._master], [], [], 0)[0]:
            self._written += os.read(self._master, 65_536)
        return self._written.decode(errors="replace")

    @property
    def screen(self) -> list[str]:
        """The lines of the last screen that was written, without codes."""
        return [line.rstrip() for line in _CODES.sub("", self.written.rpartition("\x1b[H")[2]).split("\n")]

    def shows(self, words: str) -> bool:
        """Whether the last screen has these words, also when they were wrapped."""
        return words in " ".join(" ".join(self.screen).split())


@contextmanager
def top(url: str, folder: Path, *, lines: int = 40, columns: int = 120) -> Iterator[tuple[Command, Terminal]]:
    """`penstock top` in a terminal. What stands in its errors is said when it ends early."""
    terminal, errors = Terminal(lines, columns), folder / "errors"
    environment = {"PENSTOCK_DATABASE_URL": url, "TERM": "xterm-256color", "COLUMNS": "", "LINES": "", "NO_COLOR": ""}
    try:
        with Command("top", files=(terminal.path, terminal.path, errors), cwd=None, environment=environment) as command:
            until(lambda: terminal.shows("running") or command.poll() is not None, "the first screen")
            assert command.poll() is None, errors.read_text()
            yield command, terminal
            command.send_signal(signal.SIGINT)
            assert command.wait(60) == 0
    finally:
        terminal.close()


async def enqueue(url: str, name: str, jobs: int) -> None:
    async with Penstock(url) as app:
        await app.create_job_type(name)
        await app.enqueue_many(name, range(jobs))


def test_the_screen_follows_the_database_until_ctrl_c_and_leaves_the_terminal_as_it_was(url: str, tmp_path: Path) -> None:
    with top(url, tmp_path) as (command, terminal):
        assert terminal.shows("0 ready, 0 running, 0 deferred")
        asyncio.run(enqueue(url, "mail", 3))
        until(lambda: terminal.shows("3 ready, 0 running, 0 deferred"), "the jobs on the screen", _LONGEST_S)
        # A terminal takes a screen in pieces.
        row = until(lambda: [line.split() for line in terminal.screen if line.startswith("mail")], "the row of the type")[0]
        assert row[:4] == ["mail", "3", "0", "0"]
        assert "\x1b[?1049h" in terminal.written, "it has a screen of its own"
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 0
        assert terminal.written.rindex("\x1b[?1049l") > terminal.written.rindex("\x1b[?1049h")
        assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l"), "the cursor is there again"
        assert "Traceback" not in terminal.written + (tmp_path / "errors").read_text()


def test_while_the_database_is_away_the_screen_stays_and_says_that_it_is_old(
    databases: TemporaryDatabases, tmp_path: Path
) -> None:
    with databases.database() as url:
        asyncio.run(enqueue(url, "mail", 3))
        name = asyncio.run(name_of(url))
        with top(url, tmp_path) as (_, terminal):
            asyncio.run(databases.execute(f'alter database "{name}" allow_connections false'))
            asyncio.run(databases.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"))
            until(lambda: terminal.shows("The database does not answer; what is shown is old"), "that it is old", _LONGEST_S)
            assert terminal.shows("3 ready, 0 running"), "what was read last"
            asyncio.run(databases.execute(f'alter database "{name}" allow_connections true'))
            asyncio.run(enqueue(url, "bill", 1))
            until(lambda: terminal.shows("4 ready, 0 running"), "what is read again", _LONGEST_S)
            assert not terminal.shows("what is shown is old")


@pytest.mark.parametrize(("lines", "types"), [(24, None), (70, 12)])
def test_a_screen_is_no_longer_than_the_terminal(url: str, tmp_path: Path, lines: int, types: int | None) -> None:
    async def enqueue_all() -> None:
        for number in range(12):
            await enqueue(url, f"type-{number}", 1)

    asyncio.run(enqueue_all())
    with top(url, tmp_path, lines=lines) as (_, terminal):
        assert terminal.shows("12 ready, 0 running, 0 deferred")

        def whole() -> list[str] | None:
            screen = terminal.screen
            return screen if len(screen) >= lines else None

        screen = until(whole, "all lines of the screen")
        assert len(screen) == lines
        assert types is None or len([line for line in screen if line.startswith("type-")]) == types


async def name_of(url: str) -> str:
    connection = await asyncpg.connect(url)
    try:
        return str(await connection.fetchval("select current_database()"))
    finally:
        await connection.close()
