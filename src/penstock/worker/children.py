"""Child processes in which handlers run (`executor="process"`), each with a pipe of its own.

Children share no queue and no lock, so that one that dies costs the job that it runs, and nothing else: other jobs go on, and the
next one gets a new child. A child says when it begins a job. A job whose child died before that has not started, and runs in
another child. An error or a result that the worker cannot read fails its job alone.

A child ends with its worker, also when that is killed: another worker has its job then.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from penstock.core.logs import hook_in
from penstock.core.user_code import OddFailure, is_final, message_of, verdict_of
from penstock.errors import Fail

_LOOK_S = 0.2
_STARTS = 3
_END_S = 5.0
_BEGUN = b""


class ProcessDied(Exception):
    """The process of a handler ended before the handler did."""


class _NotBegun(Exception):
    """The child ended before it began the call."""


class _Child:
    """One child process, which answers one call at a time. All methods but `kill` belong to the thread of the call."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Not a daemon in the sense of multiprocessing: a handler may start processes of its own.
        self._process = context.Process(target=_serve, args=(theirs,), name="penstock-handler", daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, call: tuple[Callable[..., Any], tuple[Any, ...]], limit_s: float) -> bytes:
        """Let it make a call, and return its answer. Raises `_NotBegun` or `ProcessDied` when it ends meanwhile."""
        until = time.monotonic() + limit_s
        try:
            self._pipe.send(call)
            self._receive(until)
        except (OSError, EOFError) as error:
            raise _NotBegun from error
        try:
            return self._receive(until)
        except TimeoutError:
            self.end()
            raise ProcessDied(f"the handler was not done after {limit_s:.1f} s, and its process was ended") from None
        except (OSError, EOFError):
            self.end()
            code = self._process.exitcode or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ProcessDied(f"the process of the handler {how} before the handler was done") from None

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process without waiting for that."""
        self._process.kill()

    def end(self) -> None:
        """End the process."""
        self.kill()
        self._process.join(_END_S)
        self._pipe.close()

    def _receive(self, until: float) -> bytes:
        while not self._pipe.poll(_LOOK_S):
            if time.monotonic() > until:
                raise TimeoutError
            # The pipe does not show it while another process holds its other end.
            if not self._process.is_alive() and not self._pipe.poll(0):
                raise EOFError
        return self._pipe.recv_bytes()


class _Call:
    """A call that may be given up at any time, also before it has a child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._given_up = False

    def belongs_to(self, child: _Child | None) -> bool:
        """Note which child makes the call, and is ended when that is given up; False: it is given up already."""
        with self._lock:
            self._child = child
            return not self._given_up

    def give_up(self) -> None:
        """End the child that makes the call."""
        with self._lock:
            self._given_up = True
            if self._child is not None:
                self._child.kill()


class Children:
    """Runs functions in child processes.

    Args:
        most: The largest number of calls at once, each of which has a child.
    """

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="penstock-child")
        self._idle: deque[_Child] = deque()
        self._calls: set[_Call] = set()
        self._closed = False

    async def call(self, limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a module in a child, and return what it returns. A cancellation ends the child.

        Args:
            limit_s: Seconds after which the child is ended.
            function: The function.
            arguments: Its arguments.

        Raises:
            ProcessDied: The child ended before the function did, or no child could be started.
            Exception: Whatever the function raised.
        """
        call = _Call()
        self._calls.add(call)
        try:
            # What it raises is a value, since a future cannot hold every exception.
            loop = asyncio.get_running_loop()
            result, raised = await loop.run_in_executor(self._threads, self._make, call, limit_s, function, arguments)
        except asyncio.CancelledError:
            call.give_up()
            raise
        finally:
            self._calls.discard(call)
        if raised is not None:
            raise raised
        return result

    def close(self) -> None:
        """End all children."""
        self._closed = True
        for call in list(self._calls):
            call.give_up()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end_idle()

    def _make(
        self, call: _Call, limit_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> tuple[Any, BaseException | None]:
        """Make a call, in a thread."""
        for _ in range(_STARTS):
            child = self._idle_child() or _Child()
            if not call.belongs_to(child):
                self._keep(child)
                return None, ProcessDied("the call was given up before it began")
            try:
                answer = child.ask((function, arguments), limit_s)
            except _NotBegun:
                child.end()
                continue
            except ProcessDied as error:
                return None, error
            if call.belongs_to(None):
                self._keep(child)
            else:
                child.end()
            return _read(answer)
        return None, ProcessDied(f"{_STARTS} processes in a row ended before they began the handler")

    def _idle_child(self) -> _Child | None:
        with suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_alive():
                    return child
                child.end()
        return None

    def _keep(self, child: _Child) -> None:
        self._idle.append(child)
        if self._closed:
            self._end_idle()

    def _end_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().end()


def _read(answer: bytes) -> tuple[Any, BaseException | None]:
    """What a child has sent: a result, or an error as itself or, when that cannot be read, as its name and message."""
    raised, whole = pickle.loads(answer)  # noqa: S301 - made by `_answer`
    try:
        found = pickle.loads(whole)  # noqa: S301 - made by a handler of this application
    except Exception as error:
        if raised is None:
            return None, OddFailure(f"the result of the handler cannot be read: {message_of(error)}")
        name, message, final = raised
        return None, type(name, (Fail if final else Exception,), {})(message)
    return (found, None) if raised is None else (None, found)


def _serve(pipe: Connection) -> None:
    """Make calls until the worker is gone."""
    # The worker decides when handlers end, also when a terminal or a service manager tells all processes to. These are functions,
    # since programs that a handler starts would inherit that a signal is ignored.
    signal.signal(signal.SIGINT, _leave_to_worker)
    signal.signal(signal.SIGTERM, _leave_to_worker)
    hook_in()
    os.register_at_fork(after_in_child=lambda: _forked(pipe))
    threading.Thread(target=_end_with_worker, name="penstock-parent", daemon=True).start()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send_bytes(_BEGUN)
        pipe.send_bytes(_answer(function, arguments))


def _leave_to_worker(*_: object) -> None:
    """Do nothing."""


def _forked(pipe: Connection) -> None:
    """In a process that a handler has forked: it ends by signals, and does not hold the pipe."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pipe.close()


def _end_with_worker() -> None:
    worker = multiprocessing.parent_process()
    assert worker is not None  # noqa: S101
    worker.join()
    os._exit(1)


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((None, pickle.dumps(function(*arguments))))
    except BaseException as raised:
        error = raised
    try:
        whole = pickle.dumps(error)
    except Exception:
        whole = b""
    # Not every exception can be read again: its constructor may want other arguments than it passed on.
    return pickle.dumps(((type(error).__name__, message_of(error), is_final(verdict_of(error))), whole))
