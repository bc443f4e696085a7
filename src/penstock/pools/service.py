"""One pool in one worker process. It makes the membership, the fetcher and the executor of standing jobs, and connects them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.core.polling import ANNOUNCE_EVERY_S, Polling
from penstock.errors import PenstockError
from penstock.groups.membership import Membership, SlotUser
from penstock.jobs import claim_queries, type_queries
from penstock.jobs.fetcher import Fetcher
from penstock.jobs.models import Settlement
from penstock.pools import queries as pools
from penstock.pools.key_queues import KeyQueues
from penstock.pools.key_source import QUIET_S, KeySource, PoolExecutor
from penstock.pools.sealed_standing import SealedStanding
from penstock.pools.standing import two_sides
from penstock.pools.standing_executor import StandingExecutor
from penstock.pools.standing_refusal import StandingRefusal
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notifications
from penstock.settings import Settings

log = get_logger("penstock.worker")
_FORGET_EVERY_S = 300.0
_LOOK_FOR_KEY_S = 1.0


def new_member_id() -> str:
    """A new id for a member."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return f"{host[:24]}.{os.getpid()}.{secrets.token_hex(3)}"


class PoolService:
    """A pool in a worker: it takes part in the group of the pool, and works on the slots that it owns. A `SlotUser`.

    Args:
        database: Database of the pool.
        pool: The pool to work on.
        settings: Intervals and grace periods.
        executor: Runs the jobs; None: this process runs only standing jobs.
        settle: Receives results.
        unsettled_leases: Leases of results that are not known to be written.
        id: Id of the member in the group.
        keyring: Keys of encrypted payloads.
    """

    def __init__(
        self,
        database: Database,
        pool: WorkedPool,
        settings: Settings,
        executor: PoolExecutor | None,
        settle: Callable[[Settlement], None],
        unsettled_leases: Callable[[], Iterable[int]],
        id: str,
        keyring: Keyring,
    ) -> None:
        self.name = pool.name
        self._stopping = False
        self._joined = False
        self._grace_s = settings.handover_grace.total_seconds()
        self._stop_requested = asyncio.Event()
        self._database = database
        self._pool = pool
        keep_s = pool.declared.visibility_timeout.total_seconds()
        self.member = Membership(database, pool.name, id, self, settings, pool.assign, pool.metadata, keep_s, keyring.ids)
        self.key_queues: KeyQueues | None = None
        self.fetcher: Fetcher[KeySource] | None = None
        if executor is not None:
            options = pool.options
            poll_s = settings.poll_interval.total_seconds()
            polling, paused = Polling(poll_s, quiet_s=QUIET_S, announce_every_s=ANNOUNCE_EVERY_S), asyncio.Lock()
            self.key_queues = KeyQueues(
                options.key_concurrency, options.on_retry == "block", executor.start, settle, self.member.may_work, polling.wake
            )
            keys = KeySource(
                database, pool.name, settings, self.member, executor, self.key_queues, unsettled_leases, polling.wake,
                paused, options.prefetch_per_key, keyring,
            )  # fmt: skip
            self.fetcher = Fetcher(keys, polling, paused)
        self.standing: StandingExecutor | StandingRefusal = StandingRefusal(database, pool.name, self.member)
        if pool.standing is not None and pool.standing_codec is not None:
            self.standing = StandingExecutor(
                database,
                pool.name,
                self.member,
                two_sides(pool.standing),
                pool.standing_codec,
                settings,
                SealedStanding(pool.name, pool.sealer),
            )
        self._slot_users: list[SlotUser] = [] if self.fetcher is None else [self.fetcher.source]
        self._slot_users.append(self.standing)

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the notifications about this pool on the member's channel."""
        notifications.wake(self.member.wake, Kind.SLOTS, Kind.CONNECTED, subject=self.name)
        if self.fetcher is not None:
            notifications.wake(self.fetcher.wake, Kind.KEYS, Kind.PLACE, subject=self.name)
            notifications.wake(self.fetcher.announce_again, Kind.CONNECTED, subject=self.name)
            notifications.subscribe(self.fetcher.source.cancelled, Kind.CANCEL, Kind.CONNECTED)
            notifications.wake(self.fetcher.source.key_paused, Kind.PAUSED, subject=self.name)
        notifications.wake(self.standing.wake, Kind.STANDING, Kind.CONNECTED, subject=self.name)

    async def join(self) -> None:
        """Declare the pool, promise to record which jobs have begun, and join; waits while the database is unavailable.

        Without a key of an encrypted pool the process does not join, so that its slots go to workers that have one.

        Raises:
            Conflict: A live worker of the pool has this id.
        """
        await declare(self._database, self._pool, retry=True)
        if self._pool.sealer.locked:
            return
        self._joined = True
        await claim_queries.promise_to_begin(self._database, self.member.id, "worker", retry=True)
        await self.member.join()

    async def run(self) -> None:
        """Take part until `stop`. Raises `Conflict` when another member has this id now."""
        if self._joined:
            await self._take_part()
        # Without a key there is nothing to do, but the worker has other work.
        await self._stop_requested.wait()

    async def _take_part(self) -> None:
        loops: dict[str, Coroutine[Any, Any, None]] = {"standing": self.standing.run(), "key-watch": self._leave_without_key()}
        if self.fetcher is not None:
            loops["key-fetcher"] = self.fetcher.run()
            loops["recalls"] = self.fetcher.source.watch_recalls()
        if self._pool.assign is not None:
            loops["forget-keys"] = self._forget_keys()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop, name=f"penstock-{name}") for name, loop in loops.items()]
                await self.member.run()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as failed:
            # The first failure has ended the other loops; callers catch it by its own type.
            raise failed.exceptions[0] from None

    async def _leave_without_key(self) -> None:
        """Leave the pool when it has become encrypted and this application has no key."""
        while not self._pool.sealer.locked:
            await asyncio.sleep(_LOOK_FOR_KEY_S)
        self._leave(self._grace_s)

    async def _forget_keys(self) -> None:
        """A pool with its own `assign` has a slot for each key: remove those that were not used for long."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S * max(1, self.member.members) * random.uniform(0.7, 1.3))
            try:
                await pools.forget_keys(self._database, self.name)
            except PenstockError as error:
                log.warning("forget_keys_failed", pool=self.name, error=error)

    def stop(self, grace_s: float) -> None:
        """Drain and release all slots and leave; `run` ends then. Handlers get this many seconds to finish."""
        self._stop_requested.set()
        self._leave(grace_s)

    def _leave(self, grace_s: float) -> None:
        self._stopping = True
        if self.fetcher is not None:
            self.fetcher.source.stop(grace_s)
        self.standing.stop(grace_s)
        self.member.stop()

    # -- see `SlotUser`

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for user in self._slot_users:
            user.gained(slot, epoch)

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`. Standing jobs stop last, since the slot stays when running jobs take too long."""
        if self._stopping:
            return all(await asyncio.gather(*[user.revoke(slot, epoch) for user in self._slot_users]))
        for user in self._slot_users:
            if not await user.revoke(slot, epoch):
                return False
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        for user in self._slot_users:
            user.lost(slot, epoch)

    def draining(self, slot: int) -> bool:
        """See `SlotUser`."""
        return any(user.draining(slot) for user in self._slot_users)


async def declare(database: Database, pool: WorkedPool, *, again: bool = True, retry: bool = False) -> None:
    """Declare a pool, and read the options of its job type from the database. `again`: also one that was dropped."""
    options, of_jobs = pool.options.as_json(), pool.declared.as_json()
    await pools.declare_pool(database, pool.name, options, of_jobs, again=again, retry=retry)
    pool.refresh(await type_queries.declare_job_type(database, pool.name, pool.declared.as_json(), retry=retry))
