"""A PostgreSQL of a test's own, with an archive of its write-ahead log, base backups, and restores to a time."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import asyncpg

from tests.stock_server import Kind, StockServer
from tests.waiting import eventually

_SETTINGS = {"fsync": "off", "shared_buffers": "64MB", "wal_level": "replica", "max_wal_senders": "4", "archive_mode": "on"}


class OwnServer(StockServer):
    """A server with an archive.

    Args:
        bin_dir: Programs of PostgreSQL; None: those that the tests run with, or of the wheel.
    """

    def __init__(self, bin_dir: Path | None = None) -> None:
        super().__init__(Kind(("-E", "UTF8", "--no-locale"), _SETTINGS), bin_dir=bin_dir)
        self.archive = self.folder / "archive"
        self.backup = self.folder / "backup"

    async def create(self) -> None:
        """Make the folders, and start."""
        self._run("mkdir", str(self.archive))
        self._configure("archive_command", f"test ! -f {self.archive}/%f && cp %p {self.archive}/%f")
        await super().create()

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
