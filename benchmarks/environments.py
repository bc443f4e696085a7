"""Where the measured systems run: an environment of its own for each, a Redis for each measurement, and the processes themselves.

An environment is `.venv/peers/<peer>`, made from `benchmarks/peers/<peer>.txt` and made again when that file has changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ON_DISK = Path(tempfile.gettempdir())
"""Where the measured PostgreSQL keeps its files: in memory, as in tests, a flush would cost nothing."""

PINS = Path(__file__).parent / "peers"
ENVIRONMENTS = ROOT / ".venv" / "peers"

# The persistence of Debian's redis.conf: snapshots at intervals, no log. The last minutes before a crash are lost.
REDIS_PERSISTENCE = ["--save", "3600 1 300 100 60 10000", "--appendonly", "no"]
REDIS_STARTS_WITHIN_S = 10


class PeerFailed(Exception):
    """A system could not be installed or did not do its work; the message has the end of what it printed."""


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, which is made when it is missing or older than the pins.

    Raises:
        PeerFailed: pip could not install the pins.
    """
    pins = PINS / f"{peer}.txt"
    if not pins.exists():  # Penstock itself
        return Path(sys.executable)
    folder = ENVIRONMENTS / peer
    python = folder / "bin" / "python"
    made_from = folder / "made-from"
    wanted = hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
    if not made_from.exists() or made_from.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _succeed([sys.executable, "-m", "venv", str(folder)])
        _succeed([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", str(pins)])
        made_from.write_text(wanted)
    return python


def run(peer: str, command: str, count: int, url: str, timeout_s: float = 300) -> dict[str, Any]:
    """Run a command of a peer's script to its end and return its result.

    Raises:
        PeerFailed: It failed, or took too long.
    """
    with started(peer, command, count, url) as process:
        return finished(process, timeout_s)


@contextmanager
def started(peer: str, command: str, count: int, url: str) -> Iterator[subprocess.Popen[str]]:
    """A command of a peer's script while it runs; it is killed at the end if it has not ended by itself."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python_of(peer)), "-m", f"benchmarks.peers.{peer}", command, str(count), url],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield process
        except PeerFailed as failure:
            errors.seek(0)
            raise PeerFailed(f"{peer} {command}: {failure}\n{errors.read()[-3000:]}") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


def ready(process: subprocess.Popen[str]) -> None:
    """Wait until a worker's process has started to work."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            return
    raise PeerFailed("ended before it was ready")


def finished(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    """Wait for the end of a command and return its result, the JSON in its last line."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"not finished within {timeout_s:.0f} s") from None
    if process.returncode != 0 or not output.strip():
        raise PeerFailed(f"ended with {process.returncode}")
    try:
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
    except ValueError:
        raise PeerFailed(f"its last line is no result: {output.splitlines()[-1]}") from None
    return result


def redis_server() -> str | None:
    """The program, when this machine has it."""
    return shutil.which("redis-server", path="/usr/bin:/usr/local/bin:/opt/homebrew/bin")


@contextmanager
def redis() -> Iterator[str]:
    """An empty Redis of its own, on a Unix socket, with Debian's persistence; yields its URL."""
    program = redis_server()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = Path(folder) / "redis.sock"
        server = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", str(path), "--dir", folder, *REDIS_PERSISTENCE],
            stdout=subprocess.DEVNULL,
        )
        try:
            _answers(path, server)
            yield f"unix://{path}"
        finally:
            server.kill()
            server.wait()


def redis_version() -> str:
    """As the program says it."""
    program = redis_server()
    assert program is not None
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split("v=")[1].split()[0]


def _answers(path: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + REDIS_STARTS_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            if client.recv(5) == b"+PONG":
                return
        time.sleep(0.02)
    raise PeerFailed(f"redis-server did not answer within {REDIS_STARTS_WITHIN_S} s")


def _succeed(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeerFailed(f"{' '.join(command)}\n{done.stderr[-3000:]}")
