"""The poller: reads for all who look at the dashboard of a process, once, and never more than a small share of the
database's time.

Each reading has a key. A page that wants it within its time gets the one that is there, with the time at which it was read;
requests that come while it is read wait for it. A reading is kept for some seconds, and for as many times as long as it took
that all of its repetitions take a four-hundredth of a core. So a page that counts for 50 ms is counted every twenty seconds,
however many look at it.

Everything goes through one read-only connection whose statements end after two seconds, beside the connections of the
server: a dashboard that is slow slows nothing down but itself. Nothing is read while no page is open.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar, cast
from weakref import WeakValueDictionary

from penstock.app import Penstock
from penstock.core.bounded import seen
from penstock.errors import DatabaseUnavailable
from penstock.postgres.database import Database
from penstock.postgres.read_only import ReadOnlyDatabase

T = TypeVar("T")
KEPT_S = 3.0
# What takes a second is kept for four hundred.
_SHARE = 400.0
_LONGEST_KEPT_S = 300.0
_LOOK_AGAIN_S = 1.0
_MOST_READINGS = 1_000
_FORGOTTEN_S = 300.0
# Statements end after two seconds: a reading that takes longer than this waits for a database, or a network, that hangs.
HANGS_S = 10.0
# A statement was cancelled, here because it took too long.
_TOO_LONG = "57014"


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What was read.

    Attributes:
        value: The value.
        at: When it was read.
        took_s: How long that took.
        problem: Why it could not be read again when that was due; None: it is as young as it should be.
        version: Changes when the value does, and not when the same was read again.
    """

    value: T
    at: datetime
    took_s: float
    problem: str | None = None
    version: int = 0


class _Kept:
    def __init__(self) -> None:
        self.reading: Reading[Any] | None = None
        self.failure: DatabaseUnavailable | None = None
        self.due = 0.0
        self.lock = asyncio.Lock()


class Poller:
    """The readings of one process.

    Args:
        app: Its database is read.
    """

    def __init__(self, app: Penstock) -> None:
        self._app = app
        self._database: ReadOnlyDatabase | None = None
        self._opening = asyncio.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._versions = itertools.count(1)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._hanging: asyncio.Task[Any] | None = None
        self._changes = 0

    async def read(
        self, key: Hashable, call: Callable[[Database], Awaitable[T]], *, kept_s: float = KEPT_S, user: str = ""
    ) -> tuple[Reading[T], float]:
        """A reading, and the time by the monotonic clock at which it is due again.

        Args:
            key: What is read: all that the value depends on.
            call: Reads it.
            kept_s: How long it is kept at least.
            user: The user. One reading at a time is made for a user, so that many new ones delay no other user.

        Raises:
            DatabaseUnavailable: It was never read, and the database does not answer, or not in time.
        """
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept()
        self._kept.move_to_end(key)
        self._drop_old()
        async with kept.lock:
            now = time.monotonic()
            if now >= kept.due:
                try:
                    async with self._turns.setdefault(user, asyncio.Lock()):
                        now, changes = time.monotonic(), self._changes
                        value = await self._within_limit(call)
                except DatabaseUnavailable as error:
                    kept.failure = error
                    kept.due = time.monotonic() + _pause_after(error, time.monotonic() - now)
                    if kept.reading is not None:
                        kept.reading = replace(kept.reading, problem=error.message)
                else:
                    took = time.monotonic() - now
                    kept.failure = None
                    same = kept.reading is not None and kept.reading.value == value
                    version = kept.reading.version if same and kept.reading is not None else next(self._versions)
                    kept.reading = Reading(value, datetime.now(UTC), took, version=version)
                    kept.due = now + took + min(max(kept_s, _SHARE * took), max(kept_s, _LONGEST_KEPT_S))
                    if self._changes != changes:
                        # What a user changed meanwhile may not be in it.
                        kept.due = now
            if kept.reading is None and kept.failure is not None:
                raise DatabaseUnavailable(kept.failure.message, hint=kept.failure.hint) from kept.failure
            return cast("Reading[T]", kept.reading), kept.due

    def __len__(self) -> int:
        """How many readings are kept."""
        return len(self._kept)

    def changed(self) -> None:
        """A user changed something: what the next page shows is read again, also what is being read now."""
        self._changes += 1
        now = time.monotonic()
        for kept in self._kept.values():
            kept.due = min(kept.due, now)

    async def close(self) -> None:
        """Close the connection. The next reading opens it again."""
        if self._hanging is not None:
            self._hanging.cancel()
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    async def _within_limit(self, call: Callable[[Database], Awaitable[T]]) -> T:
        # What hangs is left to end by itself, since its cancellation waits for the database too; until then all readings fail.
        if self._hanging is not None and not self._hanging.done():
            raise DatabaseUnavailable("the database does not answer")

        async def read() -> T:
            return await call(await self._opened())

        reading = asyncio.create_task(read(), name="penstock-dashboard-reading")
        reading.add_done_callback(seen)
        try:
            await asyncio.wait({reading}, timeout=HANGS_S)
        except asyncio.CancelledError:
            reading.cancel()
            raise
        if not reading.done():
            self._hanging = reading
            reading.cancel()
            raise DatabaseUnavailable(f"the database has not answered for {HANGS_S:g} s")
        return reading.result()

    def _drop_old(self) -> None:
        """Drop what no user has looked at for long, and the oldest of too many."""
        now = time.monotonic()
        while len(self._kept) > 1:
            kept = next(iter(self._kept.values()))
            if len(self._kept) <= _MOST_READINGS and (kept.lock.locked() or now < kept.due + _FORGOTTEN_S):
                return
            self._kept.popitem(last=False)

    async def _opened(self) -> ReadOnlyDatabase:
        async with self._opening:
            if self._database is None:
                of = await self._app.database()
                settings = self._app.settings.model_copy(update={"pool_size": 1})
                database = of.beside(settings, "penstock dashboard", ReadOnlyDatabase)
                await database.open()
                self._database = database
            return self._database


def _pause_after(error: DatabaseUnavailable, took_s: float) -> float:
    """How long not to read again what could not be read: what took too long would again, and has its share of time too."""
    took_too_long = getattr(error.__cause__, "sqlstate", None) == _TOO_LONG
    return max(_LOOK_AGAIN_S, min(_SHARE * took_s, _LONGEST_KEPT_S)) if took_too_long else _LOOK_AGAIN_S
