"""Connections that a Python process of Spark keeps from one task to the next.

Spark uses its Python processes for task after task, so a micro-batch need not connect. A connection is lent to one user at a
time, is checked before it is lent again, and is closed when it has been idle for a while or when enough others exist. A forked
process leaves the connections of its parent alone, because anything that it sends on them, even a close, would act on the
sessions of the parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
APPLICATION = "penstock-spark"
"""Name of Spark's connections in `pg_stat_activity`."""
MOST = 4
# Spark takes its Python processes in turn, so one may get no task for several batches that come once a minute. It ends all of
# them, with their connections, when none has had a task for a minute.
IDLE_S = 600.0


@dataclass(slots=True)
class _Idle(Generic[C]):
    url: str
    connection: C
    since: float


class Connections(Generic[C]):
    """Connections of one kind, by database.

    Args:
        connect: Opens a connection to the database of a URL.
        usable: Says whether a connection that was kept still works.
        close: Closes a connection.
        most: Largest number of idle connections, for all databases together.
        idle_s: How long an idle connection is kept, in seconds.
    """

    def __init__(
        self,
        connect: Callable[[str], C],
        usable: Callable[[C], bool],
        close: Callable[[C], None],
        most: int = MOST,
        idle_s: float = IDLE_S,
    ) -> None:
        self._connect = connect
        self._usable = usable
        self._close = close
        self._most = most
        self._idle_s = idle_s
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # The references stay, because a connection that the garbage collector finds sends a close.
        self._inherited: list[object] = [getattr(self, "_idle", None), getattr(self, "_inherited", None)]
        self._idle: list[_Idle[C]] = []
        self._lock = threading.Lock()
        self._close_idleing = False

    def __len__(self) -> int:
        return len(self._idle)

    @contextmanager
    def lent(self, url: str) -> Iterator[C]:
        """A connection to a database. It is kept for later users, unless an error ends its use."""
        process = os.getpid()
        connection = self._kept(url)
        if connection is None:
            connection = self._connect(url)
        try:
            yield connection
        except BaseException:
            if process == os.getpid():
                self._end(connection)
            raise
        if process == os.getpid():
            self._keep(url, connection)

    def _kept(self, url: str) -> C | None:
        while True:
            with self._lock:
                place = next((at for at in reversed(range(len(self._idle))) if self._idle[at].url == url), None)
                found = None if place is None else self._idle.pop(place)
            if found is None:
                return None
            if self._usable(found.connection):
                return found.connection
            self._end(found.connection)

    def _keep(self, url: str, connection: C) -> None:
        with self._lock:
            self._idle.append(_Idle(url, connection, time.monotonic()))
            surplus = [self._idle.pop(0)] if len(self._idle) > self._most else []
            if not self._close_idleing:
                self._close_idleing = True
                threading.Thread(target=self._close_idle, name="penstock-connections", daemon=True).start()
        for one in surplus:
            self._end(one.connection)

    def _close_idle(self) -> None:
        """Close connections that have been idle for too long, until none is left."""
        while True:
            with self._lock:
                old = time.monotonic() - self._idle_s
                ended = [one for one in self._idle if one.since <= old]
                self._idle = [one for one in self._idle if one.since > old]
                self._close_idleing = bool(self._idle)
                wait = min((one.since for one in self._idle), default=0.0) - old
                again = self._close_idleing
            for one in ended:
                self._end(one.connection)
            if not again:
                return
            time.sleep(max(0.01, wait))

    def _end(self, connection: C) -> None:
        with suppress(Exception):
            self._close(connection)
