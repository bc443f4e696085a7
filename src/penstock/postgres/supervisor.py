"""The supervisor of an embedded server: runs PostgreSQL while a process uses it. See `penstock.postgres.embedded`.

It is a program of its own, with the data folder and the folder of PostgreSQL's programs as arguments, in an isolated interpreter.
To be small it imports nothing of Penstock but `server_files.py` and `core/folders.py`. Exit codes: 0: the last user process has
ended, 3: another supervisor runs, 1: the server could not be started.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import fasteners
import psutil

# An isolated interpreter may not find Penstock. The packages stand for their folders here, without what they import themselves.
for _name, _folder in (("penstock", ".."), ("penstock.core", "../core"), ("penstock.postgres", ".")):
    _package = ModuleType(_name)
    _package.__path__ = [str((Path(__file__).parent / _folder).resolve())]
    sys.modules.setdefault(_name, _package)

from penstock.core import folders  # noqa: E402
from penstock.postgres.server_files import USER, ServerFiles  # noqa: E402

# By default PostgreSQL first searches the schema that has the name of the user, which is Penstock's: an application's own tables
# would be created there, or hidden by Penstock's. A search path that a user has set stays.
PUBLIC_FIRST = f"""
do $$ begin
    if not exists (
        select from pg_db_role_setting, unnest(setconfig) as setting
        where setrole in (0, to_regrole('{USER}')) and setting like 'search\\_path=%'
    ) then
        alter role {USER} set search_path = public;
    end if;
end $$"""
SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "wal_compression": "on",
    "jit": "off",
    "autovacuum_naptime": "10s",
    "log_checkpoints": "off",
    # Errors of statements quote payloads and reach their caller anyway; only messages about the server itself are logged.
    "log_min_messages": "log",
    "log_min_error_statement": "panic",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Supervisor:
    """Runs one server, from its first user process to its last.

    Args:
        folder: Data folder.
        bin_dir: Folder of PostgreSQL's programs.
    """

    def __init__(self, folder: Path, bin_dir: Path) -> None:
        self.folder = folder.resolve()
        self.bin_dir = bin_dir
        self.files = ServerFiles(self.folder, bin_dir)
        self.ready = folder / "ready"
        self.stopping = threading.Event()
        self.server: psutil.Process | None = None
        # Held until this process ends: a user process that starts in the meantime waits for it, and starts a new supervisor.
        self.users = fasteners.InterProcessReaderWriterLock(str(self.folder / "users.lock"))

    def run(self) -> int:
        """Run the server until the last user process has ended. Returns the exit code."""
        lock = fasteners.InterProcessLock(str(self.folder / "supervisor.lock"))
        if not lock.acquire(blocking=False):
            return 3
        self.ready.unlink(missing_ok=True)
        try:
            self.files.prepare()
        except folders.UnsafeFolder as error:
            raise SystemExit(f"not started: {error}") from None
        self.server = self._running() or self._start()
        threading.Thread(target=self._await_last_user, daemon=True).start()
        failures = 0
        started = time.monotonic()
        while True:
            code = self._wait()
            if self.stopping.is_set():
                return self._leave()
            # The server has crashed. Its children may hold the shared memory for a moment longer.
            failures = 0 if time.monotonic() - started > 60 else failures + 1
            if failures > 20:
                print(f"the server ended with {code} again and again", file=sys.stderr)
                return 1
            if self.stopping.wait(min(0.1 * 2**failures, 5.0)):
                return self._leave()
            started = time.monotonic()
            self.server = self._start()
            if self.stopping.is_set():
                # The last user process may have ended before this server was known.
                self._stop_server()

    def _leave(self) -> int:
        self.ready.unlink(missing_ok=True)
        self.files.leave_socket_folder()
        return 0

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
        self.users.acquire_write_lock(blocking=True, delay=0.05, max_delay=0.25)
        self.stopping.set()
        self._stop_server()

    def _stop_server(self) -> None:
        if self.server is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.server.send_signal(signal.SIGINT)

    def _start(self) -> psutil.Process:
        self.files.open_parent_folders()
        self._end_orphans()
        self.files.remove_lock_files()
        self.files.write_access_rules()
        log_file = self.folder / "postgres.log"
        if log_file.exists() and log_file.stat().st_size > 10_000_000:
            log_file.unlink()
        arguments = [str(self.bin_dir / "postgres"), "-D", str(self.files.data), "-k", str(self.files.socket_dir)]
        for name, value in SETTINGS.items():
            arguments += ["-c", f"{name}={value}"]
        with log_file.open("ab") as output:
            process = psutil.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.files.data, **self.files.identity
            )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and process.poll() is None and not self.stopping.is_set():
            if self._answers():
                self._create_database()
                self.ready.touch()
                break
            time.sleep(0.02)
        return process

    def _running(self) -> psutil.Process | None:
        """The running server of an earlier supervisor, if there is one."""
        try:
            process = psutil.Process(int((self.files.data / "postmaster.pid").read_text().splitlines()[0]))
        except (OSError, ValueError, IndexError, psutil.Error):
            return None
        if not self._works_here(process) or not self.files.uses_socket_dir():
            return None
        self.files.write_access_rules()
        process.send_signal(signal.SIGHUP)  # read it
        if self._answers():
            self._create_database()
            self.ready.touch()
        return process

    def _end_orphans(self) -> None:
        """End the backends of a dead server.

        A busy backend does not notice that its server has died; it would keep the shared memory and continue to write. The lock
        files name a process id, which another process may have now. They may be removed only when no backend is left.
        """
        orphans = [process for process in psutil.process_iter() if self._works_here(process)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for orphan in orphans:
                with contextlib.suppress(psutil.Error):
                    end(orphan)
            _, orphans = psutil.wait_procs(orphans, timeout=2)

    def _works_here(self, process: psutil.Process) -> bool:
        """Whether a process is one of PostgreSQL on this data: all of those have its folder as their current folder."""
        try:
            return process.name().startswith("postgres") and Path(process.cwd()) == self.files.data
        except psutil.Error:
            return False

    def _answers(self) -> bool:
        return self._program("pg_isready", "-q", "-t", "2", "-d", "postgres") == 0

    def _create_database(self) -> None:
        if self._program("psql", "-Xqc", "select", "-d", USER) != 0:
            self._program("createdb", "--maintenance-db", "postgres", USER)
        self._program("psql", "-Xqc", PUBLIC_FIRST, "-d", USER)

    def _program(self, name: str, *arguments: str) -> int:
        return subprocess.run(  # noqa: S603
            [str(self.bin_dir / name), "-h", str(self.files.socket_dir), "-U", USER, *arguments],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        ).returncode


if __name__ == "__main__":
    # A program that a shell starts in the background ignores this signal, and its children inherit that: a server that has not
    # installed its own handler yet would lose the request to stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(Supervisor(Path(sys.argv[2]), Path(sys.argv[3])).run())
