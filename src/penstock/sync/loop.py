"""The loop in a background thread on which the calls of an app run."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from penstock.app import Penstock
from penstock.errors import DatabaseUnavailable

T = TypeVar("T")
_TASKS_END_WITHIN_S = 1.0
_ENDS_WITHIN_S = 5.0


class OnLoop:
    """What all parts of `SyncPenstock` stand on."""

    def __init__(self, app: Penstock, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._app = app
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()

    def close(self) -> None:
        """Close the app and end the background thread."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            try:
                asyncio.run_coroutine_threadsafe(self._app.close(), loop).result(self._timeout.total_seconds())
            finally:
                loop.call_soon_threadsafe(loop.stop)
                if self._thread is not None:
                    self._thread.join(_ENDS_WITHIN_S)

    def _call(self, call: Coroutine[Any, Any, T], timeout: timedelta | None = None, *, forever: bool = False) -> T:
        if self._process != os.getpid():
            # A fork copies no threads, and maybe a lock that one of them held.
            self._starting, self._loop, self._process = threading.Lock(), None, os.getpid()
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=[self._loop], name="penstock-sync", daemon=True)
                self._thread.start()
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(None if forever else (timeout or self._timeout).total_seconds())
        except TimeoutError:
            if future.done():
                raise
            raise DatabaseUnavailable(
                "the call did not end in time", hint="It may or may not have taken effect; retry it with the same id."
            ) from None
        finally:
            # Of use when the caller was interrupted while it waited.
            future.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and end what is left in it: the driver cancels a statement in a task of its own."""
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        if left:
            _, left = loop.run_until_complete(asyncio.wait(left, timeout=_TASKS_END_WITHIN_S))
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_TASKS_END_WITHIN_S))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
