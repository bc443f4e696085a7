"""The command `penstock` in a process of its own: to its end (`penstock`), or under way (`Command`)."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT_S = 60


def penstock(
    url: str, *arguments: str, stdin: str = "", cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command against a database, without colours and 200 columns wide.

    Most commands take less time than their imports. So each is a fork of a process that has made them (`command_server.py`).

    Args:
        url: The database.
        arguments: What follows `penstock`.
        stdin: What the command reads.
        cwd: The folder to run it in; None: the current one.
        environment: Further variables.

    Raises:
        subprocess.TimeoutExpired: The command was ended, since it took more than a minute.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-command-") as folder:
        given, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        given.write_text(stdin)
        variables = {"PENSTOCK_DATABASE_URL": url, "NO_COLOR": "1", "COLUMNS": "200", **environment}
        with Command(*arguments, files=(given, out, err), cwd=cwd, environment=variables) as command:
            code = command.wait(TIMEOUT_S)
        return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())


class Command:
    """A command `penstock` under way. It is killed when the block ends.

    Args:
        arguments: What follows `penstock`.
        files: Its standard input, output and errors.
        cwd: The folder to run it in; None: the current one.
        environment: Further variables.
        modules: What a process that has imported it can spare the command.

    Attributes:
        pid: Id of its process.
        returncode: Its exit code, as far as `wait` or `poll` knows it; see `subprocess.Popen`.
    """

    def __init__(
        self,
        *arguments: str,
        files: tuple[Path, Path, Path],
        cwd: Path | None,
        environment: dict[str, str],
        modules: tuple[str, ...] = (),
    ) -> None:
        self.arguments = arguments
        self.returncode: int | None = None
        request = {
            "arguments": arguments,
            "environment": {**os.environ, **environment},
            "cwd": str(cwd or Path.cwd()),
            "files": [str(file) for file in files],
        }
        self._connection = socket.socket(socket.AF_UNIX)
        try:
            self._connection.settimeout(TIMEOUT_S)
            self._connection.connect(_server(*modules))
            self._connection.sendall(json.dumps(request).encode() + b"\n")
            self.pid = int(self._line())
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        # What runs it kills it when the connection ends.
        self._connection.close()

    def wait(self, timeout: float) -> int:
        """Wait for its end. Returns its exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended after so many seconds.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._line())
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.arguments, timeout) from None
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait(TIMEOUT_S)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Tell it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            received = self._connection.recv(1)
            assert received, f"the process that runs {self.arguments} has ended"
            line += received
        return line


@functools.cache
def _server(*modules: str) -> str:
    """Where the server of this process with these modules listens; it ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="penstock-commands-")) / "socket"
    command = [sys.executable, "-m", "tests.command_server", str(path), *modules]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate(timeout=TIMEOUT_S)
        path.unlink()
        path.parent.rmdir()

    atexit.register(end)
    return str(path)
