"""The poller: reads for all who look at the dashboard of a process, once, and never more than a small share of the
database's time.

A reading is a function and its arguments, and both are its key. The function is given the database and these arguments and
nothing else, so a value cannot depend on what its key does not have, such as the user who happened to ask first.

A page that wants a reading within its time gets the one that is there, with the time at which it was read; requests that come
while it is read wait for it, and get its failure too. A failure is not kept: who asks after it starts another reading. When a
reading is due again, `pacing.py` says.

One reading at a time is made for a user, and only so many wait for their turn. A reading that waits for the turn of its user
keeps no other user from making it first. All go through a few read-only connections, whose statements end after two seconds,
beside the connections of the server: a dashboard that is slow slows nothing down but itself. Nothing is read while no page is
open.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from types import FunctionType
from typing import Any, Generic, TypeVar, TypeVarTuple, cast
from weakref import WeakValueDictionary

from penstock.app import Penstock
from penstock.core.bounded import seen
from penstock.core.spending import spending
from penstock.errors import DatabaseUnavailable
from penstock.http.dashboard.pacing import LOOK_S, Changes, Marks, Pace
from penstock.http.errors import ApiError
from penstock.postgres.database import Database
from penstock.postgres.read_only import ReadOnlyDatabase

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
KEPT_S = 3.0
# Of the readings under way each has a connection, and the look whether jobs have changed has one more.
_AT_ONCE = 4
MOST_WAITING = 32
_MOST_READINGS = 1_000
MOST_BYTES = 32 << 20
_FORGOTTEN_S = 300.0
# Statements end after two seconds: a reading that takes longer than this waits for a database, or a network, that hangs.
HANGS_S = 10.0


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


@dataclass(slots=True, eq=False)
class _Attempt:
    """A reading that is made or waits for the turn of its user, and how many requests wait for it."""

    task: asyncio.Task[None]
    waiting: int = 0


class Kept:
    """A reading that is kept, with its pace.

    Args:
        call: Reads it.
        arguments: What it is called with, after the database.
        pace: When it is due.
        plain: Whether it goes through the connections of the application.
    """

    def __init__(self, call: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...], pace: Pace, *, plain: bool) -> None:
        self.call = call
        self.arguments = arguments
        self.pace = pace
        self.plain = plain
        self.reading: Reading[Any] | None = None
        self.failure: DatabaseUnavailable | None = None
        self.bytes = 0
        self.used_at = 0.0
        # How many attempts have ended; the one that reads; and by user those that read or wait for their turn.
        self.ended = 0
        self.reads: _Attempt | None = None
        self.attempts: dict[str, _Attempt] = {}


class Poller:
    """The readings of one process.

    Args:
        app: Its database is read.

    Attributes:
        bytes: About how many bytes the readings take that are kept.
        changes: How often jobs have changed, by the last look.
    """

    def __init__(self, app: Penstock) -> None:
        self._app = app
        self._database: ReadOnlyDatabase | None = None
        self._opening = asyncio.Lock()
        self._kept: OrderedDict[Hashable, Kept] = OrderedDict()
        self.bytes = 0
        self._versions = itertools.count(1)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._waiting: Counter[str] = Counter()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._hanging: asyncio.Task[Any] | None = None
        self.changes = Changes()
        self._looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._changed = 0

    async def read(
        self,
        call: Callable[[Database, *Arguments], Awaitable[T]],
        *arguments: *Arguments,
        kept_s: float = KEPT_S,
        follows: bool = False,
        plain: bool = False,
        user: str = "",
    ) -> tuple[Reading[T], Kept]:
        """A reading, and what says when it is due again.

        Args:
            call: Reads it: a function of a module, which is given the database and the arguments.
            arguments: All that the value depends on.
            kept_s: How long it is kept at least.
            follows: Whether it shows jobs: then it is read again as soon as these have changed.
            plain: Whether it has bounds of its own, and goes through the connections of the application.
            user: The user. One reading at a time is made for a user, so that many new ones delay no other user.

        Raises:
            DatabaseUnavailable: It was never read, and the database does not answer, or not in time.
            ApiError: 429: too many readings of the user wait.
        """
        # What a closure, a method or a partial function holds is no part of the key.
        if not isinstance(call, FunctionType) or call.__closure__ or "<" in call.__qualname__:
            raise TypeError(f"{call!r} can depend on what is not in the key of its reading: make it a function of its module")
        key = (call, arguments)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Kept(call, arguments, Pace(kept_s, follows=follows), plain=plain)
        self._kept.move_to_end(key)
        kept.used_at = time.monotonic()
        self._drop_old()
        if await self.is_due([kept]):
            await self._attempted(kept, user)
        if kept.reading is None:
            # The attempt was one of a user who left.
            raise DatabaseUnavailable("the database was not read")
        return cast("Reading[T]", kept.reading), kept

    async def is_due(self, readings: Collection[Kept]) -> bool:
        """Whether one of these readings is due, by a fresh look whether jobs have changed where that decides it."""
        now, follows = time.monotonic(), False
        for kept in readings:
            if kept.reading is None or now >= self._due(kept):
                return True
            follows = follows or kept.pace.follows
        if not follows:
            return False
        await self._look()
        return any(now >= self._due(kept) for kept in readings)

    def due_in_s(self, readings: Collection[Kept]) -> float:
        """In how many seconds one of these readings is due, or it is to be looked whether jobs have changed."""
        now = time.monotonic()
        due = [self._due(kept) - now for kept in readings]
        looks = [LOOK_S for kept in readings if kept.pace.follows]
        return max(min([*due, *looks]), 0.0)

    def __len__(self) -> int:
        """How many readings are kept."""
        return len(self._kept)

    def changed(self) -> None:
        """A user changed something: what the next page shows is read again, also what is being read now."""
        self._changed += 1
        now = time.monotonic()
        for kept in self._kept.values():
            kept.pace.now(now)

    async def close(self) -> None:
        """Close the connections. The next reading opens them again."""
        for task in (self._hanging, self._looking):
            if task is not None:
                task.cancel()
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    # -- one reading

    def _due(self, kept: Kept) -> float:
        return kept.pace.due(self.changes.version)

    async def _attempted(self, kept: Kept, user: str) -> None:
        """Wait for an attempt: the one that reads, that of the user which waits for its turn, or a new one."""
        attempt = kept.reads or kept.attempts.get(user) or self._begun(kept, user)
        attempt.waiting += 1
        try:
            await asyncio.wait({attempt.task})
        finally:
            attempt.waiting -= 1
            if not attempt.waiting and not attempt.task.done():
                # All who asked have left, and no other request is to join it.
                attempt.task.cancel()
                _forget(kept, attempt)
        attempt.task.result()
        if kept.failure is not None and kept.reading is None:
            raise type(kept.failure)(kept.failure.message, hint=kept.failure.hint) from kept.failure

    def _begun(self, kept: Kept, user: str) -> _Attempt:
        """A new attempt. Raises `ApiError` 429."""
        if self._waiting[user] >= MOST_WAITING:
            raise ApiError(
                429, "too_many_requests", f"{MOST_WAITING} readings for your pages wait already",
                detail="Wait until some of your pages are shown, or close some.", in_body=True, headers={"Retry-After": "2"},
            )  # fmt: skip
        task = asyncio.create_task(self._attempt(kept, user), name="penstock-dashboard-reading")
        attempt = kept.attempts[user] = _Attempt(task)
        self._waiting[user] += 1

        def ended(_: asyncio.Task[None]) -> None:
            self._waiting -= Counter([user])
            _forget(kept, attempt)

        task.add_done_callback(ended)
        task.add_done_callback(seen)
        return attempt

    async def _attempt(self, kept: Kept, user: str) -> None:
        """Read it when it is the turn of the user, unless it was read meanwhile."""
        attempt, ended = kept.attempts[user], kept.ended
        async with self._turns.setdefault(user, asyncio.Lock()), self._places:
            # It may be that the attempt of another user reads it.
            while kept.reads is not None:
                await asyncio.wait({kept.reads.task})
            if kept.ended == ended:
                kept.reads = attempt
                await self._made(kept)

    async def _made(self, kept: Kept) -> None:
        """Read it, and keep what was read or, for those who wait now, why that was not possible."""
        began, changed, version = time.monotonic(), self._changed, self.changes.version
        try:
            with spending() as spent:
                value = await self._within_limit(kept)
        except DatabaseUnavailable as error:
            kept.failure = error
            if kept.reading is not None:
                kept.reading = replace(kept.reading, problem=error.message)
            kept.pace.now(time.monotonic())
        else:
            now = time.monotonic()
            kept.failure = None
            same = kept.reading is not None and kept.reading.value == value
            number = kept.reading.version if same and kept.reading is not None else next(self._versions)
            kept.reading = Reading(value, datetime.now(UTC), now - began, version=number)
            kept.pace.done(now, spent.of(now - began), version)
            if self._changed != changed:
                # What a user changed meanwhile may not be in it.
                kept.pace.now(now)
            if not same:
                self._weigh(kept)
        kept.ended += 1

    async def _within_limit(self, kept: Kept) -> Any:
        # What hangs is left to end by itself, since its cancellation waits for the database too; until then all readings fail.
        if self._hanging is not None and not self._hanging.done():
            raise DatabaseUnavailable("the database does not answer")

        async def read() -> Any:
            database = await self._app.database() if kept.plain else await self._opened()
            return await kept.call(database, *kept.arguments)

        reading = asyncio.create_task(read(), name="penstock-dashboard-statements")
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

    async def _look(self) -> None:
        """Look whether jobs have changed, once for all who ask within a second. What cannot be read has not changed."""
        if self._looking is None or self._looking.done():
            if time.monotonic() < self._looked_at + LOOK_S or (self._hanging is not None and not self._hanging.done()):
                return
            self._looking = asyncio.create_task(self._look_at_marks(), name="penstock-dashboard-changes")
            self._looking.add_done_callback(seen)
        await asyncio.wait({self._looking}, timeout=LOOK_S)

    async def _look_at_marks(self) -> None:
        began = time.monotonic()
        try:
            *numbers, snapshot = await (await self._opened()).fetchrow("select * from penstock.job_marks()")
        except DatabaseUnavailable:
            return
        finally:
            self._looked_at = began
        self.changes.note(Marks(tuple(numbers), snapshot))

    # -- what is kept

    def _weigh(self, kept: Kept) -> None:
        """Count how much memory a reading takes, and drop the oldest ones beyond the bound."""
        if self._kept.get((kept.call, kept.arguments)) is not kept or kept.reading is None:
            return
        before, kept.bytes = kept.bytes, size_of((kept.arguments, kept.reading.value))
        self.bytes += kept.bytes - before
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop what no user has looked at for long, and the oldest of too many. A page goes on with what it has got."""
        now = time.monotonic()
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            fits = len(self._kept) <= _MOST_READINGS and self.bytes <= MOST_BYTES
            if fits and (kept.attempts or now < max(self._due(kept), kept.used_at) + _FORGOTTEN_S):
                return
            del self._kept[key]
            self.bytes -= kept.bytes

    async def _opened(self) -> ReadOnlyDatabase:
        async with self._opening:
            if self._database is None:
                of = await self._app.database()
                settings = self._app.settings.model_copy(update={"pool_size": _AT_ONCE + 1})
                database = of.beside(settings, "penstock dashboard", ReadOnlyDatabase)
                await database.open()
                self._database = database
            return self._database


def _forget(kept: Kept, attempt: _Attempt) -> None:
    """Let no request join an attempt any more."""
    if kept.reads is attempt:
        kept.reads = None
    for user in [user for user, one in kept.attempts.items() if one is attempt]:
        del kept.attempts[user]


def size_of(value: Any) -> int:
    """About how many bytes a value takes: of what is in it several times too many."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            left += one
        elif is_dataclass(one) and not isinstance(one, type):
            left += [getattr(one, field.name) for field in fields(one)]
    return total
