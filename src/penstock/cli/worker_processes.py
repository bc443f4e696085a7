"""One process that keeps several worker processes running, as many as are wanted, and is the only one that is told to stop.

A terminal sends Ctrl-C, and systemd SIGTERM, to all processes of a group. If the supervisor passed its signal on as one, each
worker would get two for one, and the second means "at once". So its word goes over a pipe, and only that is counted.

A worker process that asks to be replaced, or whose code has changed, goes on until its successor works.
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
_WORKING = b"working"
_REPLACE = b"replace"


class Told:
    """A worker process's end of the pipe."""

    def __init__(self, pipe: Connection, supervisor: str, reports: Connection | None = None) -> None:
        self._pipe = pipe
        self.supervisor = supervisor
        """Id of the supervisor."""
        self.reports = reports
        """Where to send reports; None: this worker has no metrics."""

    def obey(self, worker: Worker, loop: asyncio.AbstractEventLoop) -> None:
        """Stop `worker` when the supervisor asks for it, once more when it asks again, and when the supervisor is gone.

        The supervisor learns when the worker works.
        """
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

        async def started() -> None:
            await worker.started()
            self._say(_WORKING)

        self._starting = loop.create_task(started(), name="penstock-started")

    def replace(self) -> None:
        """Ask the supervisor for a successor, and to be retired when that works."""
        self._say(_REPLACE)

    def _say(self, words: bytes) -> None:
        with suppress(OSError):  # the supervisor is gone
            self._pipe.send_bytes(words)


class _Child:
    """A worker process: runs `target(*arguments, told)`."""

    def __init__(
        self,
        target: Callable[..., None],
        arguments: tuple[Any, ...],
        reports: Callable[[], Connection] | None,
        supervisor: str,
        replaces: _Child | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        theirs, self.pipe = spawn.Pipe()
        self._told = 0
        self.retired = False
        self.working = False
        self.wants_successor = False
        self.open = True
        self.end_told = False
        self.replaces = replaces
        self.started = time.monotonic()
        reporting = None if reports is None else reports()
        told = Told(theirs, supervisor, reporting)
        self.process = spawn.Process(target=logs.guarded, args=(target, *arguments, told), name="penstock-worker")
        with _without_interrupts():
            self.process.start()
        theirs.close()
        if reporting is not None:
            reporting.close()

    def hear(self) -> None:
        """Take what it has said."""
        try:
            while self.open and self.pipe.poll():
                words = self.pipe.recv_bytes()
                self.working |= words == _WORKING
                self.wants_successor |= words == _REPLACE
        except (EOFError, OSError):
            self.open = False

    def retire(self) -> None:
        """Let it finish what it has, for as long as that takes, and end."""
        self.retired = True
        with suppress(OSError):  # it is gone
            self.pipe.send_bytes(_RETIRE)

    def tell(self, words: int) -> None:
        """Pass on how often the supervisor was told to stop."""
        if words > self._told:
            self._told = words
            with suppress(OSError):  # it is gone
                self.pipe.send_bytes(str(words).encode())


class _Crew:
    """The worker processes of one supervisor."""

    def __init__(self, start: Callable[[_Child | None], _Child], number: int, ended: Callable[[int, int], None] | None) -> None:
        self._start = start
        self._ended = ended
        self.children = [start(None) for _ in range(number)]

    def events(self) -> list[Any]:
        """What to wait for: their ends, and what they say."""
        alive = [child for child in self.children if child.process.is_alive()]
        return [child.process.sentinel for child in alive] + [child.pipe for child in alive if child.open]

    def replace_all(self) -> None:
        """Replace all of them."""
        for child in self.children:
            child.wants_successor = True

    def keep(self) -> None:
        """Start those that died again, and successors of those that want one; retire those whose successors work."""
        now = time.monotonic()
        for child in list(self.children):
            child.hear()
            old = child.replaces
            if old is not None and child.working:
                old.retire()
                child.replaces = old = None
            if child.process.is_alive():
                continue
            if self._ended is not None and not child.end_told and child.process.pid is not None:
                child.end_told = True
                self._ended(child.process.pid, child.process.exitcode or 0)
            successor = self._successor(child)
            if child.retired or old is not None:
                # A successor that does not start leaves its predecessor at work, which may ask again.
                self.children.remove(child)
            elif successor is not None:
                self.children.remove(child)
                successor.replaces = None
            elif now - child.started > 1.0:
                self.children[self.children.index(child)] = self._start(None)
        for child in list(self.children):
            if child.wants_successor and not child.retired and child.replaces is None and self._successor(child) is None:
                child.wants_successor = False
                self.children.append(self._start(child))

    def scale(self, wanted: Callable[[int], int]) -> None:
        """Bring their number to what is wanted. A process with a successor counts once, with it."""
        working = [child for child in self.children if not child.retired and child.replaces is None]
        number = wanted(len(working))
        self.children += [self._start(None) for _ in range(number - len(working))]
        for child in working[number:]:
            for leaving in filter(None, (child, self._successor(child))):
                leaving.retire()

    def _successor(self, child: _Child) -> _Child | None:
        return next((one for one in self.children if one.replaces is child), None)


def supervise(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int,
    wanted: Callable[[int], int] | None = None,
    reports: Callable[[], Connection] | None = None,
    changed: Callable[[], bool] | None = None,
    *,
    supervisor: str,
    ended: Callable[[int, int], None] | None = None,
) -> None:
    """Keep worker processes running until SIGTERM or SIGINT; one that dies is started again, at most once a second each.

    Args:
        target: What a worker process runs.
        arguments: Its arguments; an end of a pipe comes after them.
        processes: How many.
        wanted: From how many there are to how many there should be; asked about once a second. None: always so many.
        reports: Makes a pipe over which a process reports; None: they do not.
        changed: Whether all are to be replaced, asked about once a second; None: never.
        supervisor: Id of this supervisor, which its workers register with.
        ended: Called with the number and the exit code of a process that has ended; None: no one is told.
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
    crew = _Crew(lambda replaces: _Child(target, arguments, reports, supervisor, replaces), processes, ended)
    while not words or any(child.process.is_alive() for child in crew.children):
        for child in crew.children:
            child.tell(words)
        multiprocessing.connection.wait([waker, *crew.events()], timeout=1.0)
        with suppress(BlockingIOError):
            waker.recv(4096)
        if words:
            for child in crew.children:
                child.hear()
            continue
        if changed is not None and changed():
            crew.replace_all()
        crew.keep()
        if wanted is not None:
            crew.scale(wanted)


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
