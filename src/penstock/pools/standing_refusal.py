"""Standing jobs in the slots of a worker that has no handler for them."""

from __future__ import annotations

import asyncio

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.groups.membership import Membership
from penstock.pools import queries as pools
from penstock.postgres.database import Database

log = get_logger("penstock.standing")
_AGAIN_S = 1.0


class StandingRefusal:
    """Takes the place of the executor in a worker without a handler for standing jobs. A `SlotUser`.

    Nothing runs the standing jobs in the slots of such a worker. It notes the reason as their error, which `Pool.standing_jobs`
    and `Pool.start` show.

    Args:
        database: Database of the pool.
        name: Name of the pool.
        member: Membership that owns the slots.
    """

    def __init__(self, database: Database, name: str, member: Membership) -> None:
        self._database = database
        self._name = name
        self._member = member
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """Look at the standing jobs now, since there may be new ones."""
        self._awake.set()

    def gained(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""
        self.wake()

    async def revoke(self, slot: int, epoch: int) -> bool:
        """See `SlotUser`."""
        return True

    def lost(self, slot: int, epoch: int) -> None:
        """See `SlotUser`."""

    def draining(self, slot: int) -> bool:
        """See `SlotUser`."""
        return False

    def stop(self, grace_s: float) -> None:
        """See `StandingExecutor`."""

    async def run(self) -> None:
        """Note the reason for each standing job in the slots, until cancelled."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            try:
                refused = await pools.refuse_standing(self._database, self._name, self._member.id, self._member.owned)
            except PenstockError as error:
                log.warning("standing_jobs_unknown", pool=self._name, error=error)
                await asyncio.sleep(_AGAIN_S)
                self.wake()
            else:
                if refused:
                    log.warning("standing_jobs_without_handler", pool=self._name, jobs=refused)
