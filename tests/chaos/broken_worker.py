"""Sabotages of a worker process, which the chaos tests must detect: each name removes one guarantee from the worker."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID

from penstock.groups.assignors import NAMED, Candidate
from penstock.groups.heartbeat import Heartbeat
from penstock.groups.membership import Membership
from penstock.groups.state import Change, MemberState
from penstock.jobs.models import ClaimedJob
from penstock.jobs.watermarks import Watermarks
from penstock.pools.key_source import KeySource
from penstock.postgres.database import Database
from penstock.schedules import queries as schedules
from penstock.streams.consumer.consumer import Consumer
from penstock.worker.begin_recorder import BeginRecorder
from penstock.worker.children import Children, ProcessDied
from penstock.worker.executor import Executor
from penstock.worker.leader import LeaderService
from penstock.worker.queue_source import QueueSource
from penstock.worker.registration import Registration
from penstock.worker.running import Running


def deaf() -> None:
    """Lost jobs continue: the worker does not stop jobs that belong to other workers now, and reports their results."""
    cancel = Executor.cancel

    def unless_lost(self: Executor, id: UUID, reason: str = "cancelled") -> None:
        if reason != "lost":
            cancel(self, id, reason)

    Executor.cancel = unless_lost  # type: ignore[method-assign]
    Executor.abandon = lambda self, lost: []  # type: ignore[method-assign]


def unfenced_start() -> None:
    """A worker starts the jobs that it had claimed for its queues, however long it was suspended."""
    Registration.may_start = lambda self: True  # type: ignore[method-assign]


def refusals_ignored() -> None:
    """A worker starts what it had claimed, however long it was suspended, also where the database refuses to record the start."""
    unfenced_start()
    made = BeginRecorder.__init__

    def heedless(self: BeginRecorder, database: Database, recorded: Callable[[Running, bool], None]) -> None:
        made(self, database, lambda running, begun: recorded(running, True))

    BeginRecorder.__init__ = heedless  # type: ignore[method-assign]


def heartbeat_of_the_loop() -> None:
    """No heartbeat runs beside the event loop: a worker whose handler blocks the loop sends none. The loop is blocked often."""
    blocking: list[asyncio.TimerHandle] = []

    def block() -> None:
        time.sleep(4)
        wait()

    def wait() -> None:
        blocking[:] = [asyncio.get_running_loop().call_later(random.uniform(3, 6), block)]

    def without(self: Heartbeat, kept: object) -> None:
        if not blocking:
            wait()

    Heartbeat.keep = without  # type: ignore[method-assign]
    Heartbeat.leave = lambda self, kept: None  # type: ignore[method-assign]


def unfenced_member() -> None:
    """A member that has not reached the database for a long time still works on its slots."""

    async def never(self: Any) -> None:
        await asyncio.Event().wait()

    Membership._watch_fence = never  # type: ignore[method-assign]
    Membership.owned = property(lambda self: self._state.owned)  # type: ignore[method-assign, assignment]
    Membership.may_work = lambda self, slot: self._state.holds(slot)  # type: ignore[method-assign]


def revocation_ignored() -> None:
    """A revoked slot is released at once, without draining; its running jobs continue."""

    async def at_once(self: Any, slot: int, epoch: int) -> bool:
        return True

    KeySource.revoke = at_once  # type: ignore[method-assign]
    Consumer.revoke = at_once  # type: ignore[method-assign]


def losses_forgotten() -> None:
    """A member goes on to begin what it had taken from its slots before it lost them."""
    unfenced_member()
    Membership.may_work = lambda self, slot: True  # type: ignore[method-assign]
    KeySource.lost = lambda self, slot, epoch: None  # type: ignore[method-assign]
    Consumer.lost = lambda self, slot, epoch: None  # type: ignore[method-assign]


def hasty_watermarks() -> None:
    """A worker never looks again below the highest number that it has seen, where others may still commit."""

    def claimed(self: Watermarks, jobs: Sequence[ClaimedJob], horizon: int, ceiling: int, now: float) -> None:
        for job in jobs:
            queue = (job.name, job.priority)
            self._watermarks[queue] = max(job.seq, self._watermarks.get(queue, 0))

    def for_claim(self: Watermarks, now: float) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (name, priority), watermark in self._watermarks.items():
            found.setdefault(name, {})[str(priority)] = watermark
        return found

    Watermarks.claimed = claimed  # type: ignore[method-assign]
    Watermarks.for_claim = for_claim  # type: ignore[method-assign]


def slots_dealt_in_turn() -> None:
    """Every rebalance deals all slots to the members in turn, without regard to who has them."""

    def deal(members: Sequence[Candidate], slots: Sequence[int], current: Mapping[int, str]) -> dict[int, str]:
        ids = sorted(member.id for member in members)
        return {slot: ids[place % len(ids)] for place, slot in enumerate(sorted(slots))} if ids else {}

    NAMED["sticky"] = deal


def all_slots_revoked() -> None:
    """A member that has to give up a slot gives up all, and takes those that it is to have again."""
    answered = MemberState.answered

    def all_or_none(self: MemberState, beat: Any, sent_at: float, now: float) -> list[Change]:
        if beat.known and beat.revoked:
            beat = replace(beat, revoked=frozenset(beat.owned))
        return answered(self, beat, sent_at, now)

    MemberState.answered = all_or_none  # type: ignore[method-assign]


def leadership_kept() -> None:
    """A leader that was replaced goes on with its task, under its old leadership."""
    LeaderService.lost = lambda self, slot, epoch: None  # type: ignore[method-assign]


_MOVE = (
    "update penstock.schedules set next_at = $4, last_at = $3, job_id = coalesce($5, penstock.run_id($1, $3))"
    " where name = $1 and next_at = $2 and not penstock.schedule_is_running(schedules) returning true"
)
_DUE = (
    "select exists ("
    "select from penstock.schedules where name = $1 and next_at = $2 and not penstock.schedule_is_running(schedules))"
)
_ENQUEUE = "select penstock.enqueue($1, jsonb_build_object('at', $2::timestamptz), {id})"


def slots_moved_first() -> None:
    """A worker moves a schedule to its next slot, and enqueues the run in a transaction of its own; in between it may die."""
    taken = itertools.count(1)

    async def moved_first(
        database: Database,
        name: str,
        spec: str,
        due_at: datetime,
        run_at: datetime | None,
        next_at: datetime,
        key: str | None = None,
    ) -> UUID | None:
        if not await database.fetchval(_MOVE, name, due_at, run_at, next_at, None):
            return None
        _die_at_every_other(taken)
        id: UUID = await database.fetchval(_ENQUEUE.format(id="penstock.run_id($1, $2)"), name, run_at)
        return id

    schedules.enqueue_run = moved_first


def runs_with_ids_of_their_own() -> None:
    """A worker enqueues a run under a random id, and moves the schedule in a transaction of its own; in between it may die."""
    taken = itertools.count(1)

    async def enqueued_first(
        database: Database,
        name: str,
        spec: str,
        due_at: datetime,
        run_at: datetime | None,
        next_at: datetime,
        key: str | None = None,
    ) -> UUID | None:
        if not await database.fetchval(_DUE, name, due_at):
            return None
        id: UUID = await database.fetchval(_ENQUEUE.format(id="gen_random_uuid()"), name, run_at)
        _die_at_every_other(taken)
        await database.fetchval(_MOVE, name, due_at, run_at, next_at, id)
        return id

    schedules.enqueue_run = enqueued_first


def _die_at_every_other(taken: itertools.count[int]) -> None:
    """Kill this process at its second slot: its first one is complete, so that the others go on from there."""
    if next(taken) % 2 == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def children_that_end_together() -> None:
    """A child process that ends before its handler takes the other children of its worker with it."""
    call = Children.call

    async def with_the_others(self: Children, limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await call(self, limit_s, function, *arguments)
        except ProcessDied:
            for other in list(self._calls):
                other.give_up()
            raise

    Children.call = with_the_others  # type: ignore[method-assign]


def suspects_beside_others() -> None:
    """A worker that is to run a suspect alone does not wait until its other jobs have ended."""
    QueueSource.empty = property(lambda self: True)  # type: ignore[assignment, method-assign]


SABOTAGE = {
    each.__name__: each
    for each in (
        deaf, unfenced_member, revocation_ignored, unfenced_start, refusals_ignored, heartbeat_of_the_loop, losses_forgotten,
        hasty_watermarks, slots_dealt_in_turn, all_slots_revoked, leadership_kept, slots_moved_first, runs_with_ids_of_their_own,
        children_that_end_together, suspects_beside_others,
    )
}  # fmt: skip


def sabotage(name: str) -> None:
    """Remove a guarantee from this process."""
    SABOTAGE[name]()
