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


class OnLoop:
    """What all parts of `SyncPenstock` stand on."""

    def __init__(self, app: Penstock, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        self._app = app
        self._timeout = timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()

    def close(self) -> None:
        """Close the app and end the background thread."""
        with self._starting:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._app.close(), loop).result(self._timeout.total_seconds())
            loop.call_soon_threadsafe(loop.stop)

    def _call(self, call: Coroutine[Any, Any, T], timeout: timedelta | None = None, *, forever: bool = False) -> T:
        if self._process != os.getpid():
            # A fork copies no threads, and maybe a lock that one of them held.
            self._starting, self._loop, self._process = threading.Lock(), None, os.getpid()
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="penstock-sync", daemon=True).start()
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
