"""The keeper of an embedded server: runs PostgreSQL while somebody uses it. See `penstock.postgres.embedded`.

Run by its path with (data folder, socket folder, folder of PostgreSQL's programs). It imports nothing of Penstock, to be small.
Exit codes: 0 the last user left, 3 another keeper is there, 1 the server could not be started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fasteners
import psutil

USER = "penstock"
SETTINGS = {
    "listen_addresses": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "wal_compression": "on",
    "jit": "off",
    "autovacuum_naptime": "10s",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Keeper:
    """One server, from its first user to its last."""

    def __init__(self, folder: Path, socket_dir: Path, bin_dir: Path) -> None:
        self.folder = folder
        self.data = folder.resolve() / "postgres"
        self.socket_dir = socket_dir
        self.bin_dir = bin_dir
        self.ready = folder / "ready"
        self.account = _account() if hasattr(os, "geteuid") and os.geteuid() == 0 else None
        self.identity: dict[str, Any] = (
            {"user": self.account[0], "group": self.account[1], "extra_groups": []} if self.account else {}
        )
        self.stopping = threading.Event()
        self.server: psutil.Process | None = None

    def run(self) -> int:
        """Keep the server; returns the exit code."""
        lock = fasteners.InterProcessLock(str(self.folder / "keeper.lock"))
        if not lock.acquire(blocking=False):
            return 3
        self.ready.unlink(missing_ok=True)
        self._prepare()
        self.server = self._running() or self._start()
        threading.Thread(target=self._await_last_user, daemon=True).start()
        failures = 0
        started = time.monotonic()
        while True:
            code = self._wait()
            if self.stopping.is_set():
                self.ready.unlink(missing_ok=True)
                return 0
            # A crash. What it left behind (shared memory held by its children) can be in the way for a moment.
            failures = 0 if time.monotonic() - started > 60 else failures + 1
            if failures > 20:
                print(f"the server ended with {code} again and again", file=sys.stderr)
                return 1
            time.sleep(min(0.1 * 2**failures, 5.0))
            started = time.monotonic()
            self.server = self._start()

    def _wait(self) -> int | None:
        assert self.server is not None  # noqa: S101
        server = self.server
        while True:
            try:
                return server.wait(timeout=0.5)
            except psutil.TimeoutExpired:
                if not self.ready.exists() and self._answers():
                    self._create_database()
                    self.ready.touch()
            except psutil.NoSuchProcess:
                return None

    def _await_last_user(self) -> None:
        users = fasteners.InterProcessReaderWriterLock(str(self.folder / "users.lock"))
        users.acquire_write_lock(blocking=True, delay=0.05, max_delay=0.25)
        # Held until the end of this process: whoever comes now waits for it and starts a new keeper.
        self.stopping.set()
        if self.server is not None:
            try:
                self.server.send_signal(signal.SIGINT)
            except psutil.NoSuchProcess:
                return

    def _open_the_way(self) -> None:
        """Let the server's user reach its files. Before each start: somebody may have closed the folders above since the last."""
        for path in (self.data, self.socket_dir, self.bin_dir / "postgres"):
            _let_through(path)

    def _start(self) -> psutil.Process:
        if self.account is not None:
            self._open_the_way()
        self._clear_away()
        log_file = self.folder / "postgres.log"
        if log_file.exists() and log_file.stat().st_size > 10_000_000:
            log_file.unlink()
        arguments = [str(self.bin_dir / "postgres"), "-D", str(self.data), "-k", str(self.socket_dir)]
        for name, value in SETTINGS.items():
            arguments += ["-c", f"{name}={value}"]
        with log_file.open("ab") as output:
            process = psutil.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.data, **self.identity
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None:
            if self._answers():
                self._create_database()
                self.ready.touch()
                break
            time.sleep(0.02)
        return process

    def _running(self) -> psutil.Process | None:
        """The server that an earlier keeper left, when there is one."""
        try:
            process = psutil.Process(int((self.data / "postmaster.pid").read_text().splitlines()[0]))
        except (OSError, ValueError, IndexError, psutil.Error):
            return None
        if not self._works_here(process):
            return None
        if self._answers():
            self._create_database()
            self.ready.touch()
        return process

    def _clear_away(self) -> None:
        """End what a dead server left, and remove its lock files.

        A backend that computes does not see that its server died; it would keep the shared memory, and go on writing. The lock
        files name a process id, which may belong to any other process by now. They may go only when no backend is left.
        """
        orphans = [process for process in psutil.process_iter() if self._works_here(process)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for orphan in orphans:
                with contextlib.suppress(psutil.Error):
                    end(orphan)
            _, orphans = psutil.wait_procs(orphans, timeout=2)
        for lock_file in (self.data / "postmaster.pid", *self.socket_dir.glob(".s.PGSQL.*")):
            lock_file.unlink(missing_ok=True)

    def _works_here(self, process: psutil.Process) -> bool:
        """Whether this is a process of PostgreSQL on our data: all of them work in its folder."""
        try:
            return process.name().startswith("postgres") and Path(process.cwd()) == self.data
        except psutil.Error:
            return False

    def _prepare(self) -> None:
        self.socket_dir.mkdir(mode=0o700, exist_ok=True)
        if self.account is not None:
            shutil.chown(self.socket_dir, *self.account)
            self._open_the_way()
        version = self.data / "PG_VERSION"
        if version.exists():
            ours = (
                subprocess.run(  # noqa: S603
                    [self.bin_dir / "postgres", "--version"], check=True, capture_output=True, text=True
                )
                .stdout.split()[2]
                .split(".")[0]
            )
            if version.read_text().strip() != ours:
                raise SystemExit(
                    f"the data in {self.data} is of PostgreSQL {version.read_text().strip()}, this is {ours}: "
                    "move it with pg_dump, or choose another folder with PENSTOCK_DATA_DIR"
                )
            return
        # Made beside and renamed, so that a half-made one is never taken for a whole one.
        fresh = self.folder / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self.account is not None:
            shutil.chown(fresh, *self.account)
        subprocess.run(  # noqa: S603
            [
                str(self.bin_dir / "initdb"), "--pgdata", str(fresh), "--username", USER, "--auth", "trust",
                "--encoding", "UTF8", "--locale", "C", "--no-instructions",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=fresh,
            **self.identity,
        )  # fmt: skip
        fresh.rename(self.data)

    def _answers(self) -> bool:
        return self._program("pg_isready", "-q", "-t", "2", "-d", "postgres") == 0

    def _create_database(self) -> None:
        if self._program("psql", "-Xqc", "select", "-d", USER) != 0:
            self._program("createdb", "--maintenance-db", "postgres", USER)

    def _program(self, name: str, *arguments: str) -> int:
        return subprocess.run(  # noqa: S603
            [str(self.bin_dir / name), "-h", str(self.socket_dir), "-U", USER, *arguments],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        ).returncode


def _account() -> tuple[int, int]:
    """Whom to run PostgreSQL as, since it refuses to run as root."""
    import pwd

    for name in ("postgres", "pgserver", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    raise SystemExit("PostgreSQL does not run as root and there is no user postgres or nobody: start as an ordinary user")


def _let_through(path: Path) -> None:
    """Let the server's user pass through the folders above `path`: the right to enter, not to list."""
    for parent in path.parents:
        mode = parent.stat().st_mode
        if not mode & 0o001:
            parent.chmod(mode | 0o001)


if __name__ == "__main__":
    sys.exit(Keeper(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])).run())
