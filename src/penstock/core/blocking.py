"""Blocking calls of asynchronous code, for threads without an event loop: the base of the generated `sync` modules.

A call runs on an event loop in a background thread; each application has one. A call that writes through a connection of the
caller runs in the caller's thread instead, because a connection belongs to the thread that opened it. With a driver that blocks,
the same coroutine completes without ever waiting for a loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Generic, TypeVar

from penstock.errors import DatabaseUnavailable, InvalidInput

T = TypeVar("T")
R = TypeVar("R")
_TASKS_END_WITHIN_S = 1.0
_ENDS_WITHIN_S = 5.0
_END: Any = object()
_without_loop: ContextVar[bool] = ContextVar("penstock_without_loop", default=False)


class BackgroundLoop:
    """An event loop in a background thread. It starts with the first call, and again after `close` and after a fork.

    Safe to use from many threads.

    Args:
        timeout: Longest time for one call, in addition to the time that the call itself waits.
    """

    def __init__(self, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        self.timeout = timeout
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process = os.getpid()

    def run(
        self, call: Coroutine[Any, Any, T], *, connection: Any = None, wait: timedelta | None = None, unlimited: bool = False
    ) -> T:
        """Run a coroutine to its end.

        Args:
            call: The coroutine.
            connection: Connection of the caller, through which the coroutine writes; None: it uses connections of the loop.
            wait: Longest time that the call itself waits, which is added to the timeout.
            unlimited: Whether the call has no time limit.

        Raises:
            DatabaseUnavailable: The call did not end in time.
            InvalidInput: The connection is asynchronous, or this is the thread of the loop.
        """
        if connection is not None:
            return run_without_loop(call)
        if self._is_here():
            call.close()
            raise InvalidInput(
                "a blocking call was made by what another blocking call runs, for which it would wait for ever",
                hint="Such as a function of key=, or a dependency: let it not use `sync`.",
            )
        future = asyncio.run_coroutine_threadsafe(call, self._started())
        # The call itself checks that `wait` is a timedelta.
        longer = wait if isinstance(wait, timedelta) else timedelta(0)
        limit = None if unlimited else (self.timeout + longer).total_seconds()
        try:
            return future.result(limit)
        except TimeoutError:
            if future.done():
                raise
            raise DatabaseUnavailable(
                "the call did not end in time", hint="The call may have taken effect; retry it with the same id."
            ) from None
        finally:
            # The coroutine must not go on when the caller was interrupted while it waited.
            future.cancel()

    def call(self, function: Callable[[], T]) -> T:
        """Call a plain function on the loop's thread."""
        if self._is_here():
            return function()

        async def run() -> T:
            return function()

        return self.run(run())

    def each(self, items: AsyncIterator[T], made: Callable[[T], R]) -> Items[T, R]:
        """The items of an asynchronous iterator, each as `made` makes it."""
        return Items(self, items, made)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, and end the thread. Does nothing when no call has been made."""
        loop = None
        if self._process == os.getpid():
            with self._starting:
                loop, self.loop = self.loop, None
        if loop is None:
            last.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(last, loop).result(self.timeout.total_seconds())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            if self.thread is not None:
                self.thread.join(_ENDS_WITHIN_S)

    def _is_here(self) -> bool:
        """Whether this code runs on the loop's thread, as what reads a blocking object in a call does."""
        return self.loop is not None and threading.current_thread() is self.thread

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._process != os.getpid():
            # A fork copies no threads, but may copy a lock that one of them held.
            self._starting, self.loop, self._process = threading.Lock(), None, os.getpid()
        with self._starting:
            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                self.thread = threading.Thread(target=_run, args=[self.loop], name="penstock-sync", daemon=True)
                self.thread.start()
            return self.loop


class Items(Generic[T, R]):
    """The items of an asynchronous iterator, for threads without an event loop.

    After a request that was interrupted, as by the exception of a signal's handler, the next one goes on: an item that the loop
    has got for it meanwhile is not lost.

    Args:
        loop: Loop on which the iterator runs.
        items: The iterator.
        made: Makes of an item what the program gets.
    """

    def __init__(self, loop: BackgroundLoop, items: AsyncIterator[T], made: Callable[[T], R]) -> None:
        self._loop = loop
        self._items = items
        self._made = made
        self._got: deque[T] = deque()

    def __iter__(self) -> Items[T, R]:
        return self

    def __next__(self) -> R:
        while True:
            try:
                item = self._got.popleft()
            except IndexError:
                self._loop.run(self._get(), unlimited=True)
                continue
            if item is _END:
                raise StopIteration
            return self._made(item)

    async def _get(self) -> None:
        # An item that was got for an interrupted request comes first: the request for another one would mark it as done.
        if not self._got:
            self._got.append(await anext(self._items, _END))


def run_without_loop(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that makes only blocking calls to its end in this thread, without an event loop.

    Raises:
        InvalidInput: The coroutine waits for something asynchronous, such as an asynchronous connection.
    """
    before = _without_loop.set(True)
    try:
        # `asyncio.sleep(0)` yields None, to let other tasks run; there are none here.
        while call.send(None) is None:
            pass
        raise asynchronous()
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        call.close()
        _without_loop.reset(before)


def without_loop() -> bool:
    """Whether this code runs in a blocking call's own thread, where only the caller's connection can be used."""
    return _without_loop.get()


def asynchronous() -> InvalidInput:
    """The error for an asynchronous connection in a blocking call."""
    return InvalidInput(
        "this connection is async", hint="Await the call, with connection=..., on the object itself, not on its `sync`."
    )


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, and end the tasks left in it: the driver cancels a statement in a task of its own."""
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
