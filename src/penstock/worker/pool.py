"""One pool in one worker process: its membership, its claims, and the words it hears, put together."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import socket
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from penstock.errors import PenstockError
from penstock.handler import Group
from penstock.job import ClaimedJob, Settlement
from penstock.logs import get_logger
from penstock.ownership.member import Member, SlotUser
from penstock.postgres import jobs, pools
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.keyed import KeyedClaimer, Runs
from penstock.worker.runner import Runner
from penstock.worker.standing import StandingRunner, two_sides
from penstock.worker.types import WorkedPool

log = get_logger("penstock.worker")
_FORGET_EVERY_S = 300.0


def new_member_id() -> str:
    """An id that no other member has."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return f"{host[:24]}.{os.getpid()}.{secrets.token_hex(3)}"


class RunnerOfPool:
    """The worker's runner as a pool uses it. A `Runs`."""

    def __init__(self, runner: Runner, group: Group) -> None:
        self._runner = runner
        self._group = group

    def room(self) -> int:
        """See `Runs`."""
        return self._runner.room(self._group)

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """See `Runs`."""
        self._runner.start(job, claimed_at, may_start, ahead)

    def cancel(self, id: UUID, reason: str) -> None:
        """See `Runs`."""
        self._runner.cancel(id, reason)

    def give_back(self, ids: Iterable[UUID]) -> None:
        """See `Runs`."""
        self._runner.give_back(ids)

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """See `Runs`."""
        return self._runner.abandon(lost)

    def leases(self) -> Iterable[int]:
        """See `Runs`."""
        return self._runner.leases


class PoolPart:
    """A pool in a worker: takes part in its group and works on the slots that it gets. A `SlotUser`.

    Args:
        database: Where.
        pool: What to work on.
        settings: Intervals and grace periods.
        runs: Runs the jobs; None: this process runs none of them.
        settle: Takes results.
        unsettled: Leases of results that are not known to be written.
        id: Its id in the group; None: a new one.
    """

    def __init__(
        self,
        database: Database,
        pool: WorkedPool,
        settings: Settings,
        runs: Runs | None,
        settle: Callable[[Settlement], None],
        unsettled: Callable[[], set[int]],
        id: str | None = None,
    ) -> None:
        self.name = pool.name
        self._stopping = False
        self._database = database
        self._pool = pool
        self._settings = settings
        self.claimer: KeyedClaimer | None = None
        if runs is not None:
            self.claimer = KeyedClaimer(
                database,
                pool.name,
                settings,
                runs,
                settle,
                unsettled,
                key_concurrency=pool.options.key_concurrency,
                blocking=pool.options.on_retry == "block",
                run_ahead=pool.options.run_ahead,
            )
        keep_s = pool.declared.visibility_timeout.total_seconds()
        self.member = Member(database, pool.name, id or new_member_id(), self, settings, pool.assign, pool.metadata, keep_s)
        if self.claimer is not None:
            self.claimer.belongs_to(self.member)
        self.standing: StandingRunner | None = None
        if pool.standing is not None and pool.standing_codec is not None:
            self.standing = StandingRunner(
                database, pool.name, self.member, two_sides(pool.standing), pool.standing_codec, settings
            )

    async def declare(self) -> None:
        """Declare the pool, and promise to mark what is begun; waits while the database is away."""
        await declare(self._database, self._pool, retry=True)
        await jobs.promise_to_begin(self._database, self.member.id, "worker", retry=True)

    async def run(self) -> None:
        """Take part until `stop`. Raises `Conflict` when a live member has this id."""
        async with asyncio.TaskGroup() as group:
            helpers = []
            if self.claimer is not None:
                helpers.append(group.create_task(self.claimer.run(), name="penstock-keyed-claimer"))
                helpers.append(group.create_task(self.claimer.watch_cancellations(), name="penstock-cancellations"))
            if self.standing is not None:
                helpers.append(group.create_task(self.standing.run(), name="penstock-standing"))
            if self._pool.assign is not None:
                helpers.append(group.create_task(self._forget_keys(), name="penstock-forget-keys"))
            await self.member.run()
            for task in helpers:
                task.cancel()

    async def _forget_keys(self) -> None:
        """With a rule of its own the pool has a slot for each key: remove those long unused."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S * max(1, self.member.members) * random.uniform(0.7, 1.3))
            try:
                await pools.forget_keys(self._database, self.name)
            except PenstockError as error:
                log.warning("forget_keys_failed", pool=self.name, error=error)

    def stop(self, grace_s: float) -> None:
        """Drain, hand over and leave; `run` ends then. Handlers get so many seconds to finish."""
        self._stopping = True
        if self.claimer is not None:
            self.claimer.stop(grace_s)
            self.claimer.lines.release_waiting()
        if self.standing is not None:
            self.standing.grace_s = grace_s
        self.member.stop()

    def heard(self, word: str) -> None:
        """Something was said on the member's channel about this pool, or listening began (anew)."""
        if word in ("slots", "connected"):
            self.member.wake()
        if word in ("keys", "place", "connected") and self.claimer is not None:
            self.claimer.wake()
        if word in ("cancel", "connected") and self.claimer is not None:
            self.claimer.cancellations.set()
        if word in ("standing", "connected") and self.standing is not None:
            self.standing.wake()

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for user in self._users():
            user.gained(slot, epoch)

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`. Standing jobs stop last, since the slot may be kept for the sake of jobs that run."""
        if self._stopping:
            return all(await asyncio.gather(*[user.revoke(slot, epoch) for user in self._users()]))
        for user in self._users():
            if not await user.revoke(slot, epoch):
                return False
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for user in self._users():
            user.lost(slot, epoch)

    def ending(self, slot: int) -> bool:
        """See `SlotUser`."""
        return any(user.ending(slot) for user in self._users())

    def _users(self) -> list[SlotUser]:
        return [user for user in (self.claimer, self.standing) if user is not None]


async def declare(database: Database, pool: WorkedPool, *, retry: bool = False) -> None:
    """Declare a pool and learn what the database has of its type."""
    await pools.declare_pool(database, pool.name, pool.options.as_json(), pool.declared.as_json(), retry=retry)
    if pool.type is not None:
        pool.type.refresh(await jobs.declare_job_type(database, pool.name, pool.declared.as_json(), retry=retry))
