"""The heartbeat of a process: it keeps alive what the process owns, independently of the event loop.

There are two signals of life. The first is this heartbeat, from a thread with a loop and a connection of its own: as long as the
database answers it, the process keeps the leases of its worker, the slots of its pools and the partitions of its consumers,
whatever its handlers do to the main loop. The second is the progress of the main loop. When the main loop makes no progress, the
heartbeat reports it in the worker's row and in the log, with the job that blocks the loop and the stack of the loop's thread
(never its local variables).

A handler that blocks the loop permanently does not keep everything for ever. The heartbeat keeps a worker or membership alive
only until the loop has made no progress for as long as the visibility timeout of the work there. Then other members take over,
and the database refuses what the blocked process settles late.

A thread needs the interpreter. C code that holds it for seconds (a long call of an extension that does not release the GIL) stops
this heartbeat too; declare such handlers with `executor="process"`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakKeyDictionary

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.groups import queries as ownership
from penstock.postgres.database import Database
from penstock.settings import Settings

log = get_logger("penstock.heartbeat")
_TICK_S = 0.25
_LOOK_S = 0.25
_BLOCKED_S = 2.0
_AGAIN_S = 0.3
_MOST_FRAMES = 12


class Kept(Protocol):
    """A worker or membership that the heartbeat keeps alive. The heartbeat's thread makes all calls."""

    @property
    def keep_s(self) -> float:
        """Seconds for which the heartbeat keeps it alive while the event loop makes no progress."""

    def pulse(self) -> tuple[str, str, UUID] | None:
        """Group, member and session. A worker has no group and any session. None: there is nothing to keep alive now."""

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """The database answered a heartbeat sent at this time: no other process takes over within `dead_after_s` of it."""

    def unknown(self) -> None:
        """The database no longer knows it."""


class Heartbeat:
    """The heartbeat of one process on one database; see `of`.

    Args:
        database: Database of the process; the heartbeat opens its own connection to it.
        settings: Settings, of which the heartbeat uses the interval.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self.working_on: Callable[[], str | None] = lambda: None  # what the loop is running at this moment
        self._of = database
        self._settings = settings.model_copy(update={"pool_size": 1, "command_timeout": settings.dead_after / 2})
        self._interval = settings.heartbeat_interval.total_seconds()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._kept: list[Kept] = []
        self._ticked_at = time.monotonic()
        self._ticking: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._blocked = False

    @property
    def idle_s(self) -> float:
        """Seconds since the event loop last made progress. May be read from any thread."""
        return time.monotonic() - self._ticked_at if self._ticking is not None else 0.0

    def keep(self, kept: Kept) -> None:
        """Keep a worker or membership alive from now on."""
        self._kept = [*self._kept, kept]
        if self._ticking is None:
            self._ticked_at = time.monotonic()
            self._ticking = asyncio.create_task(self._tick(), name="penstock-progress-of-loop")
            self._stopped = threading.Event()
            self._thread = threading.Thread(target=self._run, args=[self._stopped], name="penstock-heartbeat", daemon=True)
            self._thread.start()

    def leave(self, kept: Kept) -> None:
        """Stop keeping a worker or membership alive. The thread ends with the last one."""
        self._kept = [other for other in self._kept if other is not kept]
        if not self._kept and self._ticking is not None:
            self._stopped.set()
            self._ticking.cancel()
            self._ticking = None

    async def _tick(self) -> None:
        first = True
        while True:
            now = time.monotonic()
            if measuring.meter is not None and not first:
                measuring.meter.lagged(max(now - self._ticked_at - _TICK_S, 0.0))
            self._ticked_at, first = now, False
            await asyncio.sleep(_TICK_S)

    # -- the thread

    def _run(self, stopped: threading.Event) -> None:
        try:
            asyncio.run(self._beat_until(stopped))
        except Exception as error:
            # The main loop continues to send its own heartbeats.
            log.error("heartbeat_ended", error=f"{type(error).__name__}: {error}")

    async def _beat_until(self, stopped: threading.Event) -> None:
        database = self._of.beside(self._settings, "penstock heartbeat", Database)
        await database.open()
        try:
            beat_at = time.monotonic() + self._interval * random.uniform(0.3, 0.7)
            looked_at = time.monotonic()
            while not stopped.is_set():
                await asyncio.sleep(_LOOK_S)
                now = time.monotonic()
                # A process that was suspended for a while sends a heartbeat at once.
                if self._look(now) or now >= beat_at or now - looked_at > self._interval:
                    try:
                        await self._beat(database)
                        beat_at = time.monotonic() + self._interval * random.uniform(0.9, 1.0)
                    except (PenstockError, OSError) as error:
                        log.warning("heartbeat_failed", error=error)
                        beat_at = time.monotonic() + _AGAIN_S
                looked_at = now
        finally:
            await database.close()

    def _look(self, now: float) -> bool:
        """Check whether the loop makes progress. Returns whether that has changed."""
        blocked_s = now - self._ticked_at
        blocked = blocked_s > _BLOCKED_S
        if blocked == self._blocked:
            return False
        self._blocked = blocked
        if blocked:
            log.error("loop_blocked", for_s=round(blocked_s, 1), by=self.working_on(), at=_stack_of(self._loop_thread))
        else:
            log.warning("loop_unblocked")
        return True

    async def _beat(self, database: Database) -> None:
        blocked_s = time.monotonic() - self._ticked_at
        keeping = [(kept, pulse) for kept in self._kept if blocked_s < kept.keep_s and (pulse := kept.pulse()) is not None]
        workers = [(kept, pulse) for kept, pulse in keeping if not pulse[0]]
        members = [(kept, pulse) for kept, pulse in keeping if pulse[0]]
        if not keeping:
            return
        blocked = (blocked_s, self.working_on()) if self._blocked else (None, None)
        sent_at = _monotonic()
        # One statement for the worker and all memberships of the process; a further one for each further worker in it.
        ids = [id for _, (_, id, _) in workers]
        known, dead_after = await ownership.keep_alive(
            database, ids[0] if ids else None, [pulse for _, pulse in members], *blocked
        )
        alive = [known, *[(await ownership.keep_alive(database, id, [], *blocked))[0] for id in ids[1:]]]
        for (kept, pulse), worker_known in zip(workers, alive, strict=bool(workers)):
            if kept.pulse() == pulse:
                if worker_known:
                    kept.kept(sent_at, self._settings.dead_after.total_seconds())
                else:
                    kept.unknown()
        for (kept, pulse), silence_s in zip(members, dead_after, strict=True):
            # Null also stands for a member that is locked at this moment; the member's own heartbeat tells which it is.
            if silence_s is not None and kept.pulse() == pulse:
                kept.kept(sent_at, silence_s)


def _stack_of(thread: int) -> list[str]:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    return [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack(frame)[-_MOST_FRAMES:]]


def _monotonic() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_heartbeats: WeakKeyDictionary[Database, Any] = WeakKeyDictionary()


def of(database: Database, settings: Settings) -> Heartbeat:
    """The heartbeat of this process on a database."""
    found = _heartbeats.get(database)
    if found is None or found._loop is not asyncio.get_running_loop():
        found = _heartbeats[database] = Heartbeat(database, settings)
    heartbeat: Heartbeat = found
    return heartbeat
