"""A PostgreSQL of a test's own, with an archive of its write-ahead log, base backups, and restores to a time."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg

from penstock.postgres.embedded import wheel_bin_dir
from tests.http.http_server import free_port
from tests.waiting import eventually

_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = off
shared_buffers = '64MB'
wal_level = replica
max_wal_senders = 4
archive_mode = on
archive_command = 'test ! -f {archive}/%f && cp %p {archive}/%f'
"""


class OwnServer:
    """A server in a folder of its own, which keeps its port through a restore.

    Args:
        bin_dir: Programs of PostgreSQL; None: those that the tests run with, or of the wheel.
    """

    def __init__(self, bin_dir: Path | None = None) -> None:
        chosen = os.environ.get("PENSTOCK_TEST_POSTGRES_BIN")
        self._bin = bin_dir or (Path(chosen) if chosen else wheel_bin_dir())
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-server-"))
        self._identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            # The server does not run as root.
            user = pwd.getpwnam("nobody")
            self._identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
            os.chown(self.folder, user.pw_uid, user.pw_gid)
        self.archive = self.folder / "archive"
        self.backup = self.folder / "backup"
        self._data = self.folder / "data"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of its database."""
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    async def create(self) -> None:
        """Make the folder, and start."""
        self._run("mkdir", str(self.archive))
        self._run(
            self._bin / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale"
        )
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(_SETTINGS.format(archive=self.archive) + f"port = {self._port}\n")
        await self.start()

    async def start(self) -> None:
        """Start, and wait until it can be written."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._bin / "postgres"), "-D", str(self._data)], stdout=log, stderr=log, cwd="/", **self._identity
            )
        await eventually(self._is_there, "the server", 120)

    async def _is_there(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()[-3000:]
        with suppress(OSError, asyncpg.PostgresError):
            connection = await asyncpg.connect(self.url, timeout=5)
            try:
                return not await connection.fetchval("select pg_is_in_recovery()")
            finally:
                await connection.close()
        return False

    def stop(self) -> None:
        """Stop as in a crash."""
        if self._process is not None:
            self._run(self._bin / "pg_ctl", "-D", self._data, "-m", "immediate", "stop")
            self._process.wait(60)
            self._process = None

    async def take_backup(self) -> None:
        """A base backup of the running server."""
        await asyncio.to_thread(
            self._run, self._bin / "pg_basebackup", "-d", self.url, "-D", self.backup, "-c", "fast", "-X", "none", "--no-sync"
        )

    async def archive_everything(self) -> None:
        """Wait until what was written so far is in the archive."""
        connection = await asyncpg.connect(self.url)
        try:
            segment = await connection.fetchval("select pg_walfile_name(pg_switch_wal())")
            await eventually(lambda: (self.archive / segment).exists(), f"{segment} in the archive", 60)
        finally:
            await connection.close()

    async def restore(self, time: datetime) -> None:
        """Replace the data by the backup and the archive up to a time, and start."""
        self.stop()
        self._run("mv", str(self._data), str(self.folder / "lost"))
        self._run("cp", "-a", str(self.backup), str(self._data))
        with (self._data / "postgresql.conf").open("a") as settings:
            settings.write(
                f"restore_command = 'cp {self.archive}/%f %p'\nrecovery_target_time = '{time.isoformat()}'\n"
                "recovery_target_action = 'promote'\n"
            )
        self._run("touch", str(self._data / "recovery.signal"))
        await self.start()

    def remove(self) -> None:
        """Stop, and remove the folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            [str(each) for each in command], capture_output=True, text=True, cwd="/", check=False, timeout=120, **self._identity
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
