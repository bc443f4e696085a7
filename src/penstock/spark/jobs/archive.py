"""Reads the archive in commit order: the arithmetic of `offsets` and `plan` with a database. Needs no JVM.

Every query is one short transaction. A position is the snapshot of such a transaction; what it sees does not change, since the
archive is insert-only.
"""

from __future__ import annotations

from datetime import datetime

from penstock.errors import InvalidInput
from penstock.history import queries as history
from penstock.postgres.database import Database
from penstock.spark.jobs.offsets import Position, Snapshot, finish, window
from penstock.spark.jobs.plan import Counts, Slice, Split, choose, slices

EARLIEST = Position(Snapshot(0))
_ALL = 2**62


class Archive:
    """The archive of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def now(self) -> Position:
        """The position behind all jobs that are committed now."""
        return Position(Snapshot.parse(await history.snapshot(self._database)))

    async def since(self, moment: datetime) -> Position:
        """A position before all jobs that finished at `moment` or later."""
        return Position(Snapshot.parse(await history.start(self._database, moment)))

    async def starting(self, where: str | datetime | Position | None) -> Position:
        """The position that an option names. A streaming query begins at the latest one by default, as with Kafka."""
        if isinstance(where, Position):
            return where
        if isinstance(where, datetime):
            return await self.since(where)
        return EARLIEST if where == "earliest" else await self.now()

    async def next(self, start: Position, limit: int | None = None, until: Position | None = None) -> Position:
        """The end of the next batch: at most `limit` jobs behind `start`, and nothing behind `until`.

        It is equal to `start` when no transaction has ended since.
        """
        target = (until or await self.now()).seen
        if start.part is None and target == start.seen:
            return start
        if limit is None:
            window(start, Position(target))
            return Position(target)
        if start.part is not None:
            # A transaction of which a part was read is read to its end, alone, before the next one. A position therefore
            # needs to name only one such transaction.
            target = finish(start.seen, start.part)
        found = await self._counts(start, Position(target), limit + 1)
        end = choose(start.seen, target, found, limit)
        if isinstance(end, Split):
            after = start.after if start.part == end.xid else None
            cuts = await history.cuts(self._database, end.xid, after, None, limit)
            return end.at(cuts[0])
        return end

    async def waiting(self, start: Position, until: Position | None = None) -> bool:
        """Whether there is a job behind `start`."""
        target = until or await self.now()
        if start.part is not None:
            return True
        return target.seen != start.seen and bool(await self._counts(start, target, 1))

    async def lag(self, start: Position, most: int) -> int:
        """The number of jobs behind `start`, counted up to about `most`."""
        return sum(jobs for _, jobs in await self._counts(start, await self.now(), most))

    async def slices(self, start: Position, end: Position, size: int) -> list[Slice]:
        """The batch between two positions, cut for tasks of about `size` jobs each."""
        batch = window(start, end)
        found = await self._counts(start, end, _ALL)
        large = {xid: jobs for xid, jobs in found if jobs > 2 * size}
        cuts = {
            xid: await history.cuts(self._database, xid, batch.after if xid == batch.part else None, None, size) for xid in large
        }
        if batch.last is not None:
            cuts[batch.last] = await history.cuts(self._database, batch.last, batch.since, batch.until, size)
        return slices(batch, found, size, cuts)

    async def check_complete(self, start: Position, fail: bool) -> list[str]:
        """Days that were pruned before they were read. Raises `InvalidInput` when there are any and `fail` is set."""
        if start == EARLIEST:
            return []
        lost = [f"{day} ({jobs:,} jobs)" for day, jobs in await history.lost(self._database, str(start.seen))]
        if lost and fail:
            raise InvalidInput(
                f"the archive lost days before they were read: {', '.join(lost[:5])}",
                hint="They were pruned. Set failOnDataLoss to false to continue without them.",
            )
        return lost

    async def _counts(self, start: Position, end: Position, limit: int) -> Counts:
        batch = window(start, end)
        if batch.high - batch.low <= len(batch.without) and not batch.late:
            return []
        return await history.counts(
            self._database, batch.late, batch.low, batch.high, batch.without, batch.part, batch.after, limit
        )
