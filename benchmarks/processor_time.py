"""Processor time of measured servers, whose processes start and end during the measurement."""

from __future__ import annotations

import psutil


def of_server(server: psutil.Process) -> float:
    """Seconds that a server and its processes have used so far, user and system; of those that have ended too."""
    while True:
        try:
            # Of processes that have ended it is among the server's own.
            return sum(used(process) for process in (server, *server.children()))
        except psutil.NoSuchProcess:  # one ended in between: count again
            if not server.is_running():
                raise


def of_children(name: str) -> float:
    """Seconds that the children of this process with this name have used so far. Those that end meanwhile are left out."""
    total = 0.0
    for child in psutil.Process().children():
        try:
            if child.name() == name:
                total += used(child)
        except psutil.NoSuchProcess:  # a zombie is one, too
            continue
    return total


def used(process: psutil.Process) -> float:
    """Seconds that a process and its children that have ended have used so far."""
    return float(sum(process.cpu_times()[:4]))
