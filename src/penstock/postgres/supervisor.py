"""The supervisor of an embedded server: runs PostgreSQL while a process uses it. See `penstock.postgres.embedded`.

It is a program of its own, with the data folder and the folder of PostgreSQL's programs as arguments, in an isolated interpreter.
To be small it imports nothing of Penstock but `folders.py`, by its path. Exit codes: 0: the last user process has ended, 3:
another supervisor runs, 1: the server could not be started.

Each start writes the rules of who may connect: only the operating system's user who owns the data folder, as any role. PostgreSQL
refuses to run as root, so for root it runs as another user, who gets two folders: that of the data and that of the socket. Root
changes these only through descriptors of folders that it has created or checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fasteners
import psutil

if TYPE_CHECKING:
    from penstock.core import folders
else:
    _spec = importlib.util.spec_from_file_location("penstock_folders", Path(__file__).parents[1] / "core" / "folders.py")
    folders = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(folders)

USER = "penstock"
SOCKET_RECORD = "socket-folder"
LONGEST_SOCKET_FOLDER = 80
ACCOUNTS = ("postgres", "pgserver", "nobody")
"""The users as whom PostgreSQL runs for root: the first one that exists, unless the data already belong to another user."""
SHARED_ACCOUNTS = ("nobody",)
"""Those of `ACCOUNTS` as whom other programs run too."""
PRIVATE_GROUPS = range(50_000, 60_000)
"""Group ids above those that systems give to people, and within those that an unprivileged container has."""
RULES_HEAD = "# Written by Penstock at each start of the server. What you add here is lost."
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
        self.data = self.folder / "postgres"
        self.bin_dir = bin_dir
        self.socket_dir = self.folder / "socket"
        self.ready = folder / "ready"
        self.account: tuple[int, int] | None = None
        self.identity: dict[str, Any] = {}
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
            self._prepare()
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
        self._leave_socket_folder()
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

    def _open_parent_folders(self) -> None:
        """Let the server's user reach its files. Each start does so, since the parent folders may have been closed meanwhile."""
        for path in (self.data, self.socket_dir, (self.bin_dir / "postgres").resolve()):
            folders.let_through(path, self.account[1] if self.account else None)

    def _start(self) -> psutil.Process:
        if self.account is not None:
            self._open_parent_folders()
        self._remove_remains()
        self._write_access_rules()
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
            process = psutil.Process(int((self.data / "postmaster.pid").read_text().splitlines()[0]))
        except (OSError, ValueError, IndexError, psutil.Error):
            return None
        if not self._works_here(process) or not self._uses_socket_dir():
            return None
        self._write_access_rules()
        process.send_signal(signal.SIGHUP)  # read it
        if self._answers():
            self._create_database()
            self.ready.touch()
        return process

    def _remove_remains(self) -> None:
        """End the backends of a dead server, and remove its lock files.

        A busy backend does not notice that its server has died; it would keep the shared memory and continue to write. The lock
        files name a process id, which another process may have now. They may be removed only when no backend is left.
        """
        orphans = [process for process in psutil.process_iter() if self._works_here(process)]
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for orphan in orphans:
                with contextlib.suppress(psutil.Error):
                    end(orphan)
            _, orphans = psutil.wait_procs(orphans, timeout=2)
        for place in (self.data, self.socket_dir):
            folder = folders.open_checked(place, self._owners(), self._forbidden())
            try:
                for name in os.listdir(folder):  # noqa: PTH208 - a descriptor
                    if name == "postmaster.pid" or name.startswith(".s.PGSQL."):
                        os.unlink(name, dir_fd=folder)
            finally:
                os.close(folder)

    def _works_here(self, process: psutil.Process) -> bool:
        """Whether a process is one of PostgreSQL on this data: all of those have its folder as their current folder."""
        try:
            return process.name().startswith("postgres") and Path(process.cwd()) == self.data
        except psutil.Error:
            return False

    def _uses_socket_dir(self) -> bool:
        """Whether the running server has its socket in our folder; a server of an older version may have it elsewhere."""
        try:
            return Path((self.data / "postmaster.pid").read_text().splitlines()[4]) == self.socket_dir
        except (OSError, IndexError):
            return False

    def _owners(self) -> set[int]:
        return {os.geteuid(), self.account[0]} if self.account else {os.geteuid()} if folders.POSIX else set()

    def _forbidden(self) -> int:
        """The permissions that the server's folders must not grant. The group may have access when only the server has it."""
        return 0o007 if self.account is not None and self._is_private(self.account[1]) else 0o077

    def _prepare(self) -> None:
        self._choose_account()
        self._prepare_socket_folder()
        if self.account is not None:
            self._open_parent_folders()
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
        # Created under another name and renamed, so that an incomplete data folder never looks complete.
        fresh = self.folder / "postgres.new"
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(self.data, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        self._give(fresh)
        subprocess.run(  # noqa: S603
            [
                str(self.bin_dir / "initdb"), "--pgdata", str(fresh), "--username", USER, "--auth", "peer",
                "--auth-host", "reject", "--encoding", "UTF8", "--locale", "C", "--no-instructions",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=fresh,
            **self.identity,
        )  # fmt: skip
        fresh.rename(self.data)

    def _choose_account(self) -> None:
        """Choose the user as whom the server runs, and the group that may enter its folder."""
        if not folders.POSIX or os.geteuid() != 0:
            return
        folder = folders.open_checked(self.folder, {0}, 0o022)
        try:
            uid, gid = self._account()
            found = os.fstat(folder)
            if folders.name_of(uid) in SHARED_ACCOUNTS:
                # Other programs run as this user too. A group that no other program has distinguishes the server from them.
                gid = found.st_gid if self._is_private(found.st_gid) else _unused_group()
                os.fchown(folder, 0, gid)
                os.fchmod(folder, 0o710)
        finally:
            os.close(folder)
        self.account = (uid, gid)
        self.identity = {"user": uid, "group": gid, "extra_groups": []}

    def _account(self) -> tuple[int, int]:
        import pwd

        try:
            uid = self.data.lstat().st_uid
            return uid, pwd.getpwuid(uid).pw_gid
        except (FileNotFoundError, KeyError):
            pass
        for name in ACCOUNTS:
            try:
                entry = pwd.getpwnam(name)
            except KeyError:
                continue
            return entry.pw_uid, entry.pw_gid
        raise SystemExit("PostgreSQL does not run as root and there is no user postgres or nobody: start as an ordinary user")

    def _is_private(self, gid: int) -> bool:
        return gid in PRIVATE_GROUPS and not _known_group(gid)

    def _give(self, path: Path) -> None:
        """Make the server's user the owner of a new folder."""
        if self.account is None:
            return
        folder = folders.open_checked(path, {0})
        try:
            os.fchown(folder, *self.account)
        finally:
            os.close(folder)

    def _prepare_socket_folder(self) -> None:
        """Create or check the folder of the socket: in the data folder, or with a random name that a file there records."""
        if len(os.fsencode(self.socket_dir)) <= LONGEST_SOCKET_FOLDER:
            with contextlib.suppress(FileExistsError):
                self.socket_dir.mkdir(mode=0o700)
                self._own_socket_folder()
            folders.check(self.socket_dir, self._owners(), self._forbidden())
            return
        record = self.folder / SOCKET_RECORD
        try:
            self.socket_dir = Path(record.read_text("utf-8").rstrip("\n"))
            folders.check(self.socket_dir, self._owners(), self._forbidden())
        except (OSError, folders.UnsafeFolder) as error:
            if not isinstance(error, FileNotFoundError):
                print(f"another folder for the socket: {error}", file=sys.stderr)
            self.socket_dir = folders.random_folder("penstock-", LONGEST_SOCKET_FOLDER)
            self._own_socket_folder()
            folder = folders.open_checked(self.folder, {os.geteuid()}, 0o022)
            try:
                folders.replace_file(folder, SOCKET_RECORD, f"{self.socket_dir}\n")
            finally:
                os.close(folder)

    def _own_socket_folder(self) -> None:
        if self.account is None or not self._is_private(self.account[1]):
            self._give(self.socket_dir)
            return
        # The server has access through its group. The folder stays root's, since another program of that user could replace the
        # socket.
        folder = folders.open_checked(self.socket_dir, {0})
        try:
            os.fchown(folder, 0, self.account[1])
            os.fchmod(folder, 0o770)
        finally:
            os.close(folder)

    def _leave_socket_folder(self) -> None:
        """Remove the folder of the socket outside the data folder. (After a crash it remains and is used again.)"""
        if self.socket_dir.parent == self.folder:
            return
        with contextlib.suppress(OSError, folders.UnsafeFolder):
            folders.check(self.socket_dir, self._owners(), self._forbidden())
            self.socket_dir.rmdir()
            (self.folder / SOCKET_RECORD).unlink()

    def _write_access_rules(self) -> None:
        """Write PostgreSQL's access rules: it asks the operating system who connects, and admits only our user, as any role."""
        if not folders.POSIX:
            return
        version = int((self.data / "PG_VERSION").read_text())
        # Before 16 a map cannot name all roles: the others log in with their passwords.
        every = "all" if version >= 16 else USER
        rules = [RULES_HEAD, f"local all {every} peer map=penstock", f"local replication {every} peer map=penstock"]
        if version < 16:
            rules.append("local all all scram-sha-256")
        user = folders.name_of(os.geteuid()).replace('"', '""')
        folder = folders.open_checked(self.data, self._owners(), 0o077)
        try:
            for name, lines in {"pg_hba.conf": rules, "pg_ident.conf": [RULES_HEAD, f'penstock "{user}" {every}']}.items():
                folders.replace_file(folder, name, "\n".join(lines) + "\n", 0o600, self.account)
        finally:
            os.close(folder)

    def _answers(self) -> bool:
        return self._program("pg_isready", "-q", "-t", "2", "-d", "postgres") == 0

    def _create_database(self) -> None:
        if self._program("psql", "-Xqc", "select", "-d", USER) != 0:
            self._program("createdb", "--maintenance-db", "postgres", USER)
        self._program("psql", "-Xqc", PUBLIC_FIRST, "-d", USER)

    def _program(self, name: str, *arguments: str) -> int:
        return subprocess.run(  # noqa: S603
            [str(self.bin_dir / name), "-h", str(self.socket_dir), "-U", USER, *arguments],
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
        ).returncode


def _known_group(gid: int) -> bool:
    import grp

    try:
        grp.getgrgid(gid)
    except KeyError:
        return False
    return True


def _unused_group() -> int:
    while _known_group(gid := secrets.choice(PRIVATE_GROUPS)):
        pass
    return gid


if __name__ == "__main__":
    # A program that a shell starts in the background ignores this signal, and its children inherit that: a server that has not
    # installed its own handler yet would lose the request to stop.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(Supervisor(Path(sys.argv[2]), Path(sys.argv[3])).run())
