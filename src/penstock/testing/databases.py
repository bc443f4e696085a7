"""Temporary databases with the schema of Penstock, for tests."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from penstock.postgres import migrate
from penstock.postgres.database import Database
from penstock.postgres.embedded import EmbeddedServer
from penstock.postgres.translation import DRIVER_ERRORS
from penstock.settings import Settings

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only folders with random names are made there
_MEMORY_FREE_BYTES = 4 * 2**30
# A crash of the machine may lose these data, which no test needs then. A crash of the server alone loses nothing by this.
_NOT_DURABLE = ("alter system set fsync = off", "alter system set full_page_writes = off", "select pg_reload_conf()")


class TemporaryDatabases:
    """Makes databases with the Penstock schema, each in well under a second, as copies of one template.

    Args:
        server_url: URL of a server on which databases may be created; None: an embedded server in a temporary folder.
        bin_dir: Folder of PostgreSQL's programs for the embedded server; None: those of the wheel.
        parent: Parent of the temporary folder, on which the server writes as durably as any other; None: a folder in memory where
            the system has one, which makes databases several times faster, otherwise a folder on disk, and nothing is flushed.

    Attributes:
        server: The embedded server; None: the databases are on a server that was given.
        server_url: URL of the server.
    """

    def __init__(self, server_url: str | None = None, *, bin_dir: Path | None = None, parent: Path | None = None) -> None:
        self._given_url = server_url
        self._durable = parent is not None
        self._parent = parent or memory_folder()
        self._bin_dir = bin_dir
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.server: EmbeddedServer | None = None
        self._template = f"penstock_template_{secrets.token_hex(4)}"
        self.server_url = ""
        # For the connection that is kept, in one thread at a time.
        self._runner = asyncio.Runner()
        self._running = threading.Lock()
        self._connection: asyncpg.Connection[Any] | None = None

    def __enter__(self) -> TemporaryDatabases:
        if self._given_url is None:
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-test-", dir=self._parent, ignore_cleanup_errors=True)
            self.server = EmbeddedServer(Path(self._folder.name), bin_dir=self._bin_dir)
            self.server_url = self.server.start()
            if not self._durable:
                for statement in _NOT_DURABLE:
                    self._run(statement)
        else:
            self.server_url = self._given_url
        asyncio.run(self._make_template())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.server is None:
            self._run(f'drop database if exists "{self._template}" with (force)')
        self._in_thread(self._end)
        if self.server is not None:
            self.server.stop()
            deadline = time.monotonic() + 30
            while (self.server.data_dir / "postgres" / "postmaster.pid").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._folder is not None:
            self._folder.cleanup()

    @contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database; yields its URL and drops it at the end."""
        name = f"penstock_test_{secrets.token_hex(6)}"
        # A file copy needs a checkpoint, which costs little on the embedded server, and far less than the write-ahead log.
        strategy = "strategy file_copy" if self.server is not None else ""
        self._run(f'create database "{name}" template "{self._template}" {strategy}')
        if self.server is None:
            # The same setting as on the embedded server: tables of the application are never created in Penstock's schema,
            # whatever the name of the user.
            self._run(f'alter database "{name}" set search_path = public')
        try:
            yield self._url(name)
        finally:
            self._run(f'drop database if exists "{name}" with (force)')

    def _run(self, statement: str) -> None:
        self._in_thread(lambda: self._runner.run(self._kept(statement)))

    def _in_thread(self, work: Callable[[], None]) -> None:
        # The work has a thread of its own, since the caller may be inside an event loop.
        failure: list[BaseException] = []

        def run() -> None:
            try:
                with self._running:
                    work()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]

    async def _kept(self, statement: str) -> None:
        # One connection serves all statements: to connect for each costs half as much as what they do.
        if self._connection is not None:
            try:
                await self._connection.execute(statement)
                return
            except DRIVER_ERRORS:
                # A test may have stopped the server meanwhile, or ended all of its connections.
                if not self._connection.is_closed():
                    raise
        self._connection = await asyncpg.connect(self.server_url)
        await self._connection.execute(statement)

    def _end(self) -> None:
        if self._connection is not None:
            with suppress(*DRIVER_ERRORS):
                self._runner.run(self._connection.close(timeout=5))
        self._runner.close()

    async def _make_template(self) -> None:
        await self.execute(f'create database "{self._template}"')
        database = Database(self._url(self._template), Settings())
        await migrate.migrate(database)

    async def execute(self, statement: str) -> None:
        """Run a statement on the server, as its owner."""
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.server_url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _url(self, database: str) -> str:
        parts = urlsplit(self.server_url)
        return urlunsplit(parts._replace(path=f"/{database}"))


def memory_folder() -> Path | None:
    """A folder in memory with enough space for databases; None where there is none, as in many containers."""
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) or shutil.disk_usage(_SHARED_MEMORY).free < _MEMORY_FREE_BYTES:
        return None
    return _SHARED_MEMORY
