"""The command `penstock` in a process of its own."""

from __future__ import annotations

import atexit
import functools
import json
import os
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
    with tempfile.TemporaryDirectory(prefix="penstock-command-") as folder, socket.socket(socket.AF_UNIX) as server:
        given, out, err = (Path(folder) / name for name in ("in", "out", "err"))
        given.write_text(stdin)
        server.settimeout(TIMEOUT_S)
        server.connect(_server())
        request = {
            "arguments": arguments,
            "environment": {**os.environ, "PENSTOCK_DATABASE_URL": url, "NO_COLOR": "1", "COLUMNS": "200", **environment},
            "cwd": str(cwd or Path.cwd()),
            "files": [str(given), str(out), str(err)],
        }
        server.sendall(json.dumps(request).encode() + b"\n")
        try:
            code = server.recv(16)
        except TimeoutError:
            # It ends the command when the connection ends.
            raise subprocess.TimeoutExpired(arguments, TIMEOUT_S) from None
        return subprocess.CompletedProcess(arguments, int(code), out.read_text(), err.read_text())


@functools.cache
def _server() -> str:
    """Where the server of this process listens; it ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="penstock-commands-")) / "socket"
    command = [sys.executable, "-m", "tests.command_server", str(path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate(timeout=TIMEOUT_S)
        path.unlink()
        path.parent.rmdir()

    atexit.register(end)
    return str(path)
