"""One process that keeps several worker processes running, as many as are wanted, and is the only one that is told to stop.

A terminal sends Ctrl-C, and systemd SIGTERM, to all processes of a group. If the supervisor passed its signal on as one, each
worker would get two for one, and the second means "at once". So its word goes over a pipe, and only that is counted.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.connection
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from penstock.core import logs
from penstock.worker import Worker

_RETIRE = b"retire"


class Told:
    """A worker process's end of the pipe."""

    def __init__(self, pipe: Connection, reports: Connection | None = None) -> None:
        self._pipe = pipe
        self.reports = reports
        """Where to send reports; None: this worker has no metrics."""

    def obey(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        """Stop `worker` when the supervisor asks for it, once more when it asks again, and when the supervisor is gone."""
        stopping = False

        def stop_once() -> None:
            nonlocal stopping
            if not stopping:
                stopping = True
                worker.stop()

        def asked() -> None:
            nonlocal stopping
            try:
                words = self._pipe.recv_bytes()
            except (EOFError, OSError):
                loop.remove_reader(self._pipe.fileno())
                stop_once()
                return
            if words == _RETIRE:
                worker.retire()
                return
            for _ in range(int(words) - (1 if stopping else 0)):
                stopping = True
                worker.stop()

        # Signals sent to this process, or to its group, do not count up.
        loop.add_signal_handler(signal.SIGTERM, stop_once)
        loop.add_signal_handler(signal.SIGINT, lambda: None)
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        loop.add_reader(self._pipe.fileno(), asked)


class _Child:
    """A worker process: runs `target(*arguments, told)`."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], reports: Callable[[], Connection] | None) -> None:
        spawn = multiprocessing.get_context("spawn")
        theirs, self._pipe = spawn.Pipe(duplex=False)
        self._told = 0
        self.retired = False
        self.started = time.monotonic()
        reporting = None if reports is None else reports()
        told = Told(theirs, reporting)
        self.process = spawn.Process(target=logs.guarded, args=(target, *arguments, told), name="penstock-worker")
        with _without_interrupts():
            self.process.start()
        theirs.close()
        if reporting is not None:
            reporting.close()

    def retire(self) -> None:
        """Let it finish what it has, for as long as that takes, and end."""
        self.retired = True
        with suppress(OSError):  # it is gone
            self._pipe.send_bytes(_RETIRE)

    def tell(self, words: int) -> None:
        """Pass on how often the supervisor was told to stop."""
        if words > self._told:
            self._told = words
            with suppress(OSError):  # it is gone
                self._pipe.send_bytes(str(words).encode())


def supervise(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int,
    wanted: Callable[[int], int] | None = None,
    reports: Callable[[], Connection] | None = None,
) -> None:
    """Keep worker processes running until SIGTERM or SIGINT; one that dies is started again, at most once a second each.

    Args:
        target: What a worker process runs.
        arguments: Its arguments; an end of a pipe comes after them.
        processes: How many.
        wanted: From how many there are to how many there should be; asked about once a second. None: always so many.
        reports: Makes a pipe over which a process reports; None: they do not.
    """
    words = 0

    def signalled(_number: int, _frame: Any) -> None:
        nonlocal words
        words += 1

    waker, wake = socket.socketpair()
    waker.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, signalled)
    signal.signal(signal.SIGINT, signalled)
    children = [_Child(target, arguments, reports) for _ in range(processes)]
    while not words or any(child.process.is_alive() for child in children):
        for child in children:
            child.tell(words)
        alive = [child.process.sentinel for child in children if child.process.is_alive()]
        multiprocessing.connection.wait([waker, *alive], timeout=1.0)
        with suppress(BlockingIOError):
            waker.recv(4096)
        if words:
            continue
        children = [child for child in children if not child.retired or child.process.is_alive()]
        for place, child in enumerate(children):
            if not child.process.is_alive() and time.monotonic() - child.started > 1.0:
                children[place] = _Child(target, arguments, reports)
        if wanted is not None:
            working = [child for child in children if not child.retired]
            number = wanted(len(working))
            children += [_Child(target, arguments, reports) for _ in range(number - len(working))]
            for child in working[number:]:
                child.retire()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started here ignores SIGINT until it is ready for it."""
    if sys.platform == "win32":
        yield
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
