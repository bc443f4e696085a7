"""Lanes: the places for the handlers that run in the same way, how job types share them, and the jobs that wait for one.

Three rules keep one type from starving another (they do no input and no output, so that a test can play them through):

* A free place goes to a type that has none before it goes to one that has some, and among equals to the type that was served
  longest ago. So a type that has work has a place before another one gets its last, and when there are more types than places,
  they take turns.
* What to claim follows the same order. A type that may have jobs in the database, has none here and comes before those that wait
  here is *awaited*: its place stays free until its source has looked, which takes a moment.
* Only types whose handlers are known to be short are claimed ahead of the places, as many jobs as end in a tenth of a second.
  While jobs of one type wait here, another one may have a job here that waits too, so that it comes when its turn does.

One type alone has all places: a place is kept for others only while they are known to have work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from penstock.jobs.worked import WorkedType
from penstock.settings import Settings

J = TypeVar("J")
LOOKAHEAD_S = 0.1
_MEASURED_EVERY_S = 0.05
_LONGEST_AHEAD_S = 1.0
"""Jobs of a type whose handlers run longer are not claimed before there is a place for them."""
_FAST = 50
_QUICK_S = 0.05
_CHUNK = 500
"""Where at least `_FAST` jobs end within the lookahead, jobs that take at most `_QUICK_S` are claimed by so many of a type: many
leases with few jobs would cost more than the jobs."""
_AWAITED_S = 1.0
"""How long a place is kept for a type whose source does not look, as when its claims fail."""


class Share(Generic[J]):
    """One job type in a lane. The executor changes its counts directly, as those of the lane.

    Args:
        lane: The lane.
        name: Name of the type.
        awaiting: The shares of the lane with `more`, by name.

    Attributes:
        busy: Number of places that its jobs have.
        waiting: Its claimed jobs that wait for a place, in order.
        served: When it got a place last, by the turns of the lane; 0: never.
        more: Whether the last look left jobs of it in the database.
        duration_s: How long its handler runs, an average of samples; None: none has ended.
        measure: Whether the duration of the next run is wanted.
    """

    __slots__ = (
        "_awaiting",
        "awaited_at",
        "busy",
        "duration_s",
        "lane",
        "looked_at",
        "measure",
        "more",
        "name",
        "served",
        "waiting",
    )

    def __init__(self, lane: Lane[J], name: str, awaiting: dict[str, Share[J]]) -> None:
        self._awaiting = awaiting
        self.lane = lane
        self.name = name
        self.busy = 0
        self.waiting: deque[J] = deque()
        self.served = 0
        self.more = False
        self.duration_s: float | None = None
        self.measure = True
        self.looked_at = float("-inf")
        self.awaited_at: float | None = None

    def ran(self, duration_s: float) -> None:
        """A handler ran for so long."""
        self.measure = False
        self.duration_s = duration_s if self.duration_s is None else 0.5 * (self.duration_s + duration_s)

    def note(self, more: bool) -> bool:
        """A look left jobs of it in the database, or not. Returns whether a place is no longer kept for it."""
        given_up = self.more and not more
        self.more, self.awaited_at = more, None
        if more:
            self._awaiting[self.name] = self
        else:
            self._awaiting.pop(self.name, None)
        return given_up

    @property
    def is_here(self) -> bool:
        """Whether a job of it runs or waits here."""
        return self.busy > 0 or bool(self.waiting)

    @property
    def is_short(self) -> bool:
        """Whether its handler is known to end soon, so that some of its jobs may be claimed before there are places for them."""
        return self.duration_s is not None and self.duration_s <= _LONGEST_AHEAD_S


def _turn(share: Share[Any]) -> tuple[bool, int]:
    return share.busy > 0, share.served


def _claim_turn(share: Share[Any]) -> tuple[bool, int]:
    return share.is_here, share.served


@dataclass(frozen=True, slots=True)
class Plan:
    """What to claim for a lane.

    Attributes:
        names: The job types, in their order.
        most: The most jobs of each.
        limit: The most jobs of all.
        full: Whether some type is not asked for, since no place is free for it.
        room: Whether there is room for more than jobs that wait for the turn of their type.
    """

    names: Sequence[str] = ()
    most: Sequence[int] = ()
    limit: int = 0
    full: bool = True
    room: bool = False


NOTHING = Plan()


class Lane(Generic[J]):
    """The places for handlers of one kind, or for the batches of one type.

    The counts are changed by the executor, directly: a call for each job would cost measurable time.

    Args:
        places: Number of jobs that run at once.
        most_ahead: The largest number of jobs to claim beyond the places that are free.
        clock: Seconds of a monotonic clock.

    Attributes:
        busy: Number of places that are taken.
        done: Number of places that became free since the rate was measured.
        queued: The types that have claimed jobs which wait for a place.
    """

    __slots__ = (
        "_awaiting", "_clock", "_fast", "_measured_at", "_most_ahead", "_rate", "_shares", "_turns",
        "busy", "done", "places", "queued",
    )  # fmt: skip

    def __init__(self, places: int, most_ahead: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self.busy = 0
        self.done = 0
        self.queued: dict[str, Share[J]] = {}
        self._shares: dict[str, Share[J]] = {}
        # Those whose last look left jobs in the database.
        self._awaiting: dict[str, Share[J]] = {}
        self._turns = 0
        # Whether as many jobs as there are places end within the lookahead.
        self._fast = False
        self._most_ahead = most_ahead
        self._rate = 0.0
        self._clock = clock
        self._measured_at = clock()

    def share(self, name: str) -> Share[J]:
        """The share of a type."""
        if (share := self._shares.get(name)) is None:
            share = self._shares[name] = Share(self, name, self._awaiting)
        return share

    # -- places

    def deal(self) -> list[tuple[Share[J], int]]:
        """Which of the waiting types get free places now, and how many: call it again when a type took fewer."""
        free = self.places - self.busy
        queued = self.queued
        if free <= 0 or not queued:
            return []
        awaited = self._awaited(()) if self._awaiting else []
        if not awaited and len(queued) == 1:
            ((_, only),) = queued.items()
            self._serve(only)
            return [(only, free)]
        order: list[Share[J]] = sorted([*queued.values(), *awaited], key=_turn)
        part = max(1, free // len(order))
        dealt = []
        for share in order:
            if free <= 0:
                break
            if share.waiting:
                self._serve(share)
                dealt.append((share, min(part, free)))
                free -= min(part, free)
            else:
                # No type behind it gets the place that it is to have.
                free -= 1
        return dealt

    def _serve(self, share: Share[J]) -> None:
        self._turns += 1
        share.served = self._turns

    def _awaited(self, names: Collection[str]) -> list[Share[J]]:
        """The types, without these, for which a place is kept until their source has looked."""
        now = self._clock()
        awaited = []
        for share in list(self._awaiting.values()):
            if share.is_here or share.name in names or self._alternates(share):
                continue
            if share.awaited_at is None:
                share.awaited_at = now
            if now - share.awaited_at > _AWAITED_S:
                share.note(False)
            else:
                awaited.append(share)
        return awaited

    # -- claims

    def plan(self, names: Sequence[str], limit: int) -> Plan:
        """What to claim for these types, which one source claims, now; at most `limit` jobs."""
        now = self._clock()
        self._measure(now)
        queued = sum([len(share.waiting) for share in self.queued.values()])
        ahead = min(int(self._rate * LOOKAHEAD_S), self._most_ahead)
        have = self.busy + queued
        free = max(0, self.places - have)
        if free and self._awaiting:
            free = self._free_for(names, free)
        room = max(free, self.places + ahead - have)
        # Many small claims cost more than a few large ones: while enough jobs wait here, claim only when half of them are done.
        if have and room * 2 < ahead:
            room = 0
        shares = [self.share(name) for name in names]
        if len(shares) > 1:
            shares.sort(key=_claim_turn)
        self._fast = ahead >= max(self.places, _FAST)
        chunks = max(1, room // _CHUNK)
        asked: list[Share[J]] = []
        most: list[int] = []
        whole = beside = 0
        for share in shares:
            if share.more and self._alternates(share):
                if not chunks or not room:
                    continue
                chunks -= 1
            may = room if share.is_short else min(free, room)
            whole = max(whole, may)
            looks = share.more or now - share.looked_at >= LOOKAHEAD_S
            if not may and not share.is_here and (queued or ahead) and looks:
                # Who has nothing here waits with the others for its turn; with a few jobs when they are short.
                may = max(1, ahead // (2 * len(shares))) if share.is_short else 1
                beside += may
            if may > 0:
                share.looked_at = now
                asked.append(share)
                most.append(may)
            elif not (share.is_here or queued or ahead):
                # Its source looks because it may have jobs by now, or has not looked for a while: the next place is kept until
                # it knows.
                share.note(True)
        if not asked:
            return NOTHING
        return Plan(
            [share.name for share in asked], most, min(whole + beside, limit), full=len(asked) < len(shares), room=whole > 0
        )

    def looked(self, plan: Plan, found: Mapping[str, int]) -> bool:
        """A claim by this plan found so many jobs of each type. Returns whether a place is no longer kept for one of them."""
        cut = sum(found.values()) >= plan.limit
        reached = len(plan.names)
        if cut and plan.limit < reached:
            # What stands behind the last type that was found was not looked at.
            reached = max((number for number, name in enumerate(plan.names, 1) if found.get(name)), default=0)
        given_up = False
        for number, name in enumerate(plan.names[:reached], 1):
            share, jobs = self.share(name), found.get(name, 0)
            more = jobs > 0 and (cut or jobs >= plan.most[number - 1])
            given_up |= share.note(more)
        return given_up

    def _free_for(self, names: Sequence[str], free: int) -> int:
        """How many of the free places a source may fill: one is kept for each awaited type of another source."""
        awaited = self._awaited(set(names))
        if not awaited or free > len(awaited):
            return free - len(awaited)
        first = min([_claim_turn(self.share(name)) for name in names], default=(True, 0))
        return min(1, max(0, free - sum([_claim_turn(share) < first for share in awaited])))

    def _alternates(self, share: Share[J]) -> bool:
        """Whether the type takes turns with others by larger claims: all places become free within a moment anyway."""
        return self._fast and share.duration_s is not None and share.duration_s <= _QUICK_S

    def _measure(self, now: float) -> None:
        passed_s = now - self._measured_at
        if passed_s >= _MEASURED_EVERY_S:
            old = 0.5 ** (passed_s / _MEASURED_EVERY_S)
            self._rate = old * self._rate + (1 - old) * self.done / passed_s
            self._measured_at, self.done = now, 0
            for share in self._shares.values():
                share.measure = True


def lanes_of(types: Mapping[str, WorkedType], settings: Settings) -> dict[str, Lane[Any]]:
    """The lanes of a worker by name: one for each kind of handler, and one for each type with a batch handler."""
    places = {"async": settings.concurrency, "thread": settings.threads, "process": settings.processes_for_handlers}
    for worked in types.values():
        if worked.batch is not None:
            # One batch gathers while another one runs.
            places[worked.lane] = 2 * worked.batch.max_batch_size
    return {name: Lane(number, settings.claim_limit) for name, number in places.items()}
