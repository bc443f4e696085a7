"""What a program sees of a pool in the database, and changes there: its workers and slots, its keys, and their jobs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from penstock.core.checks import check_number, check_text
from penstock.groups import queries as ownership
from penstock.groups import rebalance as balance
from penstock.groups.assignors import KeyAssign
from penstock.jobs import type_queries
from penstock.jobs.options import PoolOptions
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.members import workers_of
from penstock.pools.models import KeyedJob, KeyState, PausedKey, PoolDetails, PoolMember, QuarantinedKey
from penstock.postgres.context import Context


class PoolControl:
    """The part of `Pool` that needs no declaration: whether the application has a handler for its jobs does not matter."""

    def __init__(self, context: Context, name: str, options: PoolOptions, assign: KeyAssign | None) -> None:
        self.name = name
        self.options = options
        self._context = context
        self._assign = assign

    async def details(self) -> PoolDetails:
        """The options of the pool in the database, its slots, and the number of waiting jobs. Raises `NotFound`."""
        database = await self._context.database()
        record = await pool_views.require(database, self.name)
        return record.with_counts(next((one for one in await type_queries.counts(database) if one.name == self.name), None))

    async def workers(self) -> list[PoolMember]:
        """The workers, oldest first, with their slots; the last one, without an id, stands for slots that no worker owns."""
        return await workers_of(await self._context.database(), self.name)

    async def slots(self) -> list[ownership.Slot]:
        """The slots with their owners and targets."""
        return await ownership.slots(await self._context.database(), self.name)

    async def resize(self, slots: int) -> None:
        """Give the live pool more slots; only keys that go to new slots move. Set `slots` in the declaration too.

        Args:
            slots: Number of slots that the pool gets.

        Raises:
            Conflict: The pool has more slots already, or has an `assign` of its own.
            DatabaseUnavailable: A transaction that enqueues has been open for seconds; try again.
        """
        check_number("slots", slots, 1, 65_536)
        database = await self._context.database()
        await pools.resize(database, self.name, slots)
        self.options = replace(self.options, slots=slots)
        await balance.rebalance(database, self.name, self._assign)

    async def drain(self, worker: str) -> PoolMember:
        """Drain a worker: it stays in the pool, without slots. Raises `NotFound`.

        Args:
            worker: Id of the worker in the pool.
        """
        check_text("worker", worker)
        return await self._drain(worker, drain=True)

    async def undrain(self, worker: str) -> PoolMember:
        """Let a drained worker take part again. Raises `NotFound`.

        Args:
            worker: Id of the worker in the pool.
        """
        check_text("worker", worker)
        return await self._drain(worker, drain=False)

    async def _drain(self, worker: str, *, drain: bool) -> PoolMember:
        database = await self._context.database()
        await balance.drain(database, self.name, worker, self._assign, drain=drain)
        return next(member for member in await workers_of(database, self.name) if member.id == worker)

    async def state(self, key: str) -> KeyState:
        """What is known of a key: its owner, what runs, what waits and for what, since when it is paused or quarantined.

        Raises `NotFound`.

        Args:
            key: The key.
        """
        check_text("key", key)
        return await pool_views.key_state(await self._context.database(), self.name, key)

    async def pause_key(self, key: str) -> datetime:
        """Pause a key: its jobs wait, and those of other keys go on. Returns since when it is paused.

        Running jobs finish, and its standing job goes on. Jobs that its worker claimed ahead and has not started go back to their
        places. The pause lasts until `resume_key`, whatever restarts. A second call changes nothing.

        Args:
            key: The key.

        Raises:
            NotFound: The pool does not exist.
            InvalidInput: This cannot be a key.
        """
        check_text("key", key)
        return await pools.pause_key(await self._context.database(), self.name, key)

    async def resume_key(self, key: str) -> bool:
        """End the pause of a key. Returns False when it was not paused. Raises `NotFound`.

        Args:
            key: The key.
        """
        check_text("key", key)
        return await pools.resume_key(await self._context.database(), self.name, key)

    async def paused_keys(self, *, after: str | None = None, limit: int = 100) -> list[PausedKey]:
        """The paused keys, since when each is paused, and how many jobs it has. At most `limit`, behind the key `after`.

        Args:
            after: Last key of the page before; None: the first page.
            limit: Largest number of keys.
        """
        _check_page(after, limit)
        return await pool_views.paused_keys(await self._context.database(), self.name, after=after, limit=limit)

    async def quarantined_keys(self, *, after: str | None = None, limit: int = 100) -> list[QuarantinedKey]:
        """Keys for which the pool's `assign` fails, with the errors; their jobs wait. At most `limit`, behind the key `after`.

        Args:
            after: Last key of the page before; None: the first page.
            limit: Largest number of keys.
        """
        _check_page(after, limit)
        return await pool_views.quarantined_keys(await self._context.database(), self.name, after=after, limit=limit)

    async def release_key(self, key: str) -> None:
        """Have `assign` called again for a quarantined key, now. Raises `NotFound` when the key is not quarantined.

        Args:
            key: The key.
        """
        check_text("key", key)
        await ownership.release_keys(await self._context.database(), self.name, key)

    async def set_weight(self, key: str, weight: int) -> None:
        """Set the weight of a key: the number of its jobs that start in a turn, 1 to 1,000. Raises `InvalidInput`.

        Args:
            key: The key.
            weight: Number of jobs in a turn.
        """
        check_text("key", key)
        check_number(f"the weight of {key!r}", weight, 1, 1_000)
        await pools.set_weight(await self._context.database(), self.name, key, weight)

    async def weights(self) -> dict[str, int]:
        """The weights that were set, by key, at most 10,000. Raises `NotFound`."""
        return await pool_views.weights(await self._context.database(), self.name)

    # The last method, since behind it the word no longer means the class in this body.
    async def list(self, *, key: str | None = None, after: str | None = None, limit: int = 100) -> list[KeyedJob]:
        """The jobs that wait or run: those in the queues of their keys, by key and in order, then those that are deferred.

        Args:
            key: Only jobs of this key.
            after: Cursor of the last job of the page before.
            limit: Maximum number of jobs, at most 1,000.

        Raises:
            NotFound: The pool does not exist.
        """
        if key is not None:
            check_text("key", key)
        _check_page(after, limit)
        return await pool_views.pool_jobs(await self._context.database(), self.name, key=key, after=after, limit=limit)


def _check_page(after: str | None, limit: int) -> None:
    if after is not None:
        check_text("after", after)
    check_number("limit", limit, 1, 1_000)
