"""Lending: how the handlers of a process share its connections, so that no kind of work starves another one of them.

The process's own work (claims, settlements, heartbeats, commits) takes any connection of the pool. For handlers three rules hold:

* All of them together leave one connection to the process's own work.
* A connection that becomes free goes to the kind of work, such as a job type, that has fewest, and among equals to the one that
  got one longest ago. So a kind of work waits for one statement of another one, however many handlers of that wait.
* Transactions that stay open while a handler's own code runs, as a load does, leave one more connection, since their end is not
  known in advance: to other kinds of work, and to the calls that this code makes.

A pool of two connections has none to leave to the process's own work, and a pool of one has nothing to share.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_kind: ContextVar[str | None] = ContextVar("penstock_kind_of_work", default=None)
_PROCESS = ""
job_here: Callable[[], str | None] = lambda: None  # noqa: E731
"""The type of the job whose handler runs here, if one does; `penstock.jobs.handler` provides it."""


def borrower() -> str | None:
    """The kind of work for which a call is made here; None: the process's own."""
    kind = _kind.get()
    return job_here() if kind is None else kind or None


@contextmanager
def borrowing(kind: str) -> Iterator[None]:
    """Run the handler of something that is no job, such as a stream."""
    token = _kind.set(kind)
    try:
        yield
    finally:
        _kind.reset(token)


def work_for_process() -> None:
    """From here on this task works for the whole process, whichever handler started it."""
    _kind.set(_PROCESS)


class Lending:
    """Which handlers may have a connection of a pool.

    Args:
        size: Number of connections of the pool.
    """

    def __init__(self, size: int) -> None:
        self._most = max(min(size, 2), size - 1)
        self._most_held = max(1, self._most - 1)
        self._lent: Counter[str] = Counter()
        self._held = 0
        self._turns = 0
        self._served: dict[str, int] = {}
        # By kind of work, and whether they hold: calls in their order, each with the future that tells that it may.
        self._waiting: dict[tuple[str, bool], deque[asyncio.Future[None]]] = {}

    async def enter(self, kind: str, *, holds: bool, timeout_s: float) -> None:
        """Wait until a handler of this kind of work may have a connection.

        Args:
            kind: The kind of work.
            holds: Whether it keeps a transaction open while its own code runs.
            timeout_s: Seconds after which it raises `TimeoutError`.
        """
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((kind, holds), deque()).append(granted)
        self._grant()
        if granted.done():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException:
            # One that is cancelled is passed over when its turn comes.
            if not granted.cancel() and not granted.cancelled():
                self.leave(kind, holds=holds)
            raise

    def leave(self, kind: str, *, holds: bool) -> None:
        """A handler has given its connection back."""
        self._held -= holds
        self._lent[kind] -= 1
        if not self._lent[kind]:
            del self._lent[kind]
        self._grant()

    def _grant(self) -> None:
        while self._lent.total() < self._most:
            may = [key for key in self._waiting if not key[1] or self._held < self._most_held]
            if not may:
                return
            kind, holds = key = min(may, key=lambda one: (self._lent[one[0]], self._served.get(one[0], 0)))
            waiting = self._waiting[key]
            granted = waiting.popleft()
            if not waiting:
                del self._waiting[key]
            if granted.done():
                continue
            self._turns += 1
            self._served[kind] = self._turns
            self._lent[kind] += 1
            self._held += holds
            granted.set_result(None)
