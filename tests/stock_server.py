"""A PostgreSQL exactly as `initdb` makes it, and hostile ones, whose defaults exist in the world and change what statements do.

`PENSTOCK_TEST_SERVER` gives the tests of a run such a server in place of the embedded one: `stock`, or the name of a hostile one.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from penstock.postgres.embedded import wheel_bin_dir
from penstock.testing.databases import memory_folder
from tests.http.http_server import free_port
from tests.waiting import eventually

# Where the server can be reached says nothing about how it works.
_REACHED = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
port = {port}
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a server is made: arguments of `initdb`, and lines of its configuration."""

    initdb: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


# Everything that combines. With these every statement of the tests themselves works too.
TEXTS = {
    "row_security": "off",
    "search_path": "elsewhere, public, pg_catalog",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "bytea_output": "escape",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "extra_float_digits": "-10",
    "escape_string_warning": "off",
}
LIMITS = {
    "statement_timeout": "5s",
    "lock_timeout": "2s",
    "idle_in_transaction_session_timeout": "5s",
    "idle_session_timeout": "10s",
    "max_connections": "20",
}
COMPILED = {"jit": "on", "jit_above_cost": "0", "jit_inline_above_cost": "0", "jit_optimize_above_cost": "0"}
TURKISH = ("--encoding=UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=tr-TR")
_WITHOUT_ICU = "ICU is not supported in this build"
KINDS = {
    "stock": Kind(),
    "hostile": Kind(
        TURKISH, {**TEXTS, **LIMITS, **COMPILED, "quote_all_identifiers": "on", "default_transaction_isolation": "serializable"}
    ),
    "repeatable": Kind(("--locale=C", "--encoding=UTF8"), {**TEXTS, "default_transaction_isolation": "repeatable read"}),
    # For tests whose own statements cannot work with another level, or with as few connections.
    "texts": Kind(TURKISH, TEXTS),
}


class StockServer:
    """A server in a folder of its own, which keeps its port. What is not given is as `initdb` makes it.

    Args:
        kind: How it is made.
        bin_dir: Programs of PostgreSQL; None: those that the tests run with, or of the wheel.
        parent: Parent of its folder.
    """

    def __init__(self, kind: Kind = KINDS["stock"], *, bin_dir: Path | None = None, parent: Path | None = None) -> None:
        chosen = os.environ.get("PENSTOCK_TEST_POSTGRES_BIN")
        self._bin = bin_dir or (Path(chosen) if chosen else wheel_bin_dir())
        self._initdb = kind.initdb
        self._settings = dict(kind.settings)
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-server-", dir=parent))
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            # The server does not run as root.
            user = pwd.getpwnam("nobody")
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self._data = self.folder / "data"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of its database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    @property
    def log(self) -> Path:
        """What it logs."""
        return self.folder / "log"

    @property
    def pid(self) -> int:
        """Its first process."""
        assert self._process is not None
        return self._process.pid

    async def create(self) -> None:
        """Make the folder, and start."""
        make = (self._bin / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "--no-sync")
        try:
            self._run(*make, *self._initdb)
        except AssertionError as error:
            if _WITHOUT_ICU not in str(error):
                raise
            # The server of the wheel: with all the rest.
            self._run(*make, *(each for each in self._initdb if "icu" not in each))
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(_REACHED.format(port=self._port))
            settings.writelines(f"{name} = '{value}'\n" for name, value in self._settings.items())
        await self.start()

    async def start(self) -> None:
        """Start, and wait until it can be written."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._data)], stdout=log, stderr=log, cwd="/", **self._identity
            )
        await eventually(self._is_there, "the server", 120)

    async def _is_there(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()[-3000:]
        with suppress(OSError, asyncpg.PostgresError):
            connection = await asyncpg.connect(self.url, timeout=5)
            try:
                return not await connection.fetchval("select pg_is_in_recovery()")
            finally:
                await connection.close()
        return False

    def _configure(self, name: str, value: str) -> None:
        """Give it another setting, before it is created."""
        self._settings[name] = value

    def stop(self) -> None:
        """Stop as in a crash."""
        if self._process is not None:
            self._run(self._bin / "pg_ctl", "-D", self._data, "-m", "immediate", "stop")
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        """Stop, and remove the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            [str(each) for each in command], capture_output=True, text=True, cwd="/", check=False, timeout=120, **self._identity
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@contextmanager
def serving(kind: str | Kind, bin_dir: Path | None = None) -> Iterator[StockServer]:
    """A server of a kind, for the duration of a block. Its folder is in memory where the system has one."""
    server = StockServer(KINDS[kind] if isinstance(kind, str) else kind, bin_dir=bin_dir, parent=memory_folder())
    try:
        asyncio.run(server.create())
        yield server
    finally:
        server.remove()
