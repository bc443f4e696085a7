"""Runs commands of `penstock` in forks of itself, which spares each command its imports.

    python -m tests.command_server SOCKET [MODULE...]

A connection sends one command as a line of JSON (`arguments`, `environment`, `cwd`, and the `files` that it reads from and writes
to), and receives a line with its process id and one with its exit code. A command whose connection ends is killed. The server
ends when its standard input ends. The modules are imported beside those that most commands need.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

# Not the commands themselves: they look at the environment when they are imported.
IMPORTED = (
    "asyncpg", "pydantic_settings", "structlog", "typer", "typer.rich_utils", "rich.table", "rich.progress", "rich._emoji_codes",
    "penstock.app", "uvloop",
)  # fmt: skip


def serve(path: str, *modules: str) -> list[str]:
    """Serve until standard input ends. Returns in the processes of commands, with the arguments of the command."""
    # What is imported stays. No garbage collection of a fork needs to look at it, or to copy the memory in which it is.
    gc.disable()
    for name in (*IMPORTED, *modules):
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    # The processes that serve connections are not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [])[0]):
        assert ready
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with connection, connection.makefile() as lines:
                request = json.loads(lines.readline())
                if (command := os.fork()) != 0:
                    connection.sendall(f"{command}\n".encode())
                    connection.sendall(f"{_exit_code(command, connection)}\n".encode())
                    os._exit(0)
            return _become(request)
        connection.close()
    sys.exit()


def _exit_code(command: int, connection: socket.socket) -> int:
    """Wait for a command; kill it when the connection ends before."""

    def watch() -> None:
        connection.recv(1)
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(command, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])


def _become(request: dict[str, Any]) -> list[str]:
    """Take over what a process of its own would have from its start."""
    # Where the tests were started in the background of a shell it is ignored, and the same in what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(request["files"]):
        opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    arguments: list[str] = request["arguments"]
    return arguments


if __name__ == "__main__":
    sys.argv[1:] = serve(*sys.argv[1:])
    runpy.run_module("penstock", run_name="__main__", alter_sys=True)
