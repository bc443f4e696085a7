"""What a consumer tells the database of its partitions: how far they are done, what is put aside, and where they stand still.

Everything is fenced by the epoch under which the member owns a partition, and by its revision, which grows when somebody moves
the group. What is refused for that is not this member's to say any more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from penstock.consuming.part import Part
from penstock.errors import Conflict, DatabaseUnavailable, PenstockError
from penstock.logs import get_logger
from penstock.ownership.member import Member
from penstock.postgres import streams
from penstock.postgres.database import Database
from penstock.postgres.streams import Commit
from penstock.waiting import happens

log = get_logger("penstock.consumer")
T = TypeVar("T")
_COMMIT_EVERY_S = 0.05
_FLUSH_S = 5.0


class Outcomes(Generic[T]):
    """Writes outcomes for one member of a group.

    Args:
        database: Where.
        stream: Name of the stream.
        group: Name of the group.
        member: Whose partitions these are.
        parts: The partitions that it owns at each moment.
        look: Called when the database has another view of a partition than this process.
    """

    def __init__(
        self, database: Database, stream: str, group: str, member: Member, parts: Mapping[int, Part[T]], look: Callable[[], None]
    ) -> None:
        self._database = database
        self._stream = stream
        self._group = group
        self._member = member
        self._parts = parts
        self._look = look
        self._dirty = asyncio.Event()
        self._flush = asyncio.Event()

    def done(self) -> None:
        """Something is done that is not committed; it is soon."""
        self._dirty.set()

    async def flushed(self, part: Part[T]) -> None:
        """Wait, for a while, until everything done of a partition is committed."""
        if part.commit is None:
            return
        self._flush.set()
        self._dirty.set()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await part.flushed()
        except TimeoutError:
            log.warning("commit_did_not_finish", stream=self._stream, group=self._group, partition=part.partition)

    async def run(self) -> None:
        """Commit what is done until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            self._flush.clear()
            commits = [commit for part in self._parts.values() if (commit := part.commit) is not None]
            if not commits:
                continue
            try:
                outcomes = await streams.commit_offsets(self._database, self._stream, self._group, self._member.id, commits)
            except DatabaseUnavailable as error:
                log.warning("commit_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
                self._dirty.set()
                continue
            except PenstockError as error:
                log.error("commit_refused", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(1.0)
                continue
            for commit in commits:
                part = self._parts.get(commit.partition)
                if part is None or (part.epoch, part.revision) != (commit.epoch, commit.revision):
                    continue
                if outcomes[commit.partition].done:
                    part.was_committed(commit.next_offset)
                    if outcomes[commit.partition].paused != part.paused:
                        self._look()
                else:
                    log.warning("commit_stale", stream=self._stream, group=self._group, partition=commit.partition)
                    part.committed = part.done
                    part.was_committed(part.done)
                    self._look()
                    self._member.wake()
            # Each commit leaves a dead row; a few in a second are enough, unless somebody waits for one.
            await happens(self._flush, _COMMIT_EVERY_S)

    async def has_committed(self, part: Part[T], next_offset: int) -> bool:
        """Whether the database has everything of a partition before an offset as done."""
        while True:
            try:
                found = (
                    await streams.begin_partitions(
                        self._database, self._stream, self._group, self._member.id, {part.partition: part.epoch}
                    )
                ).get(part.partition)
            except DatabaseUnavailable as error:
                log.warning("look_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
            else:
                return found is not None and found.revision == part.revision and found.next_offset >= next_offset

    async def quarantine(self, part: Part[T], reason: str) -> None:
        """Pause a partition before what comes next."""
        part.paused = True
        log.error("partition_quarantined", stream=self._stream, group=self._group, partition=part.partition, reason=reason)
        await self._settle(part, lambda commit: streams.quarantine_partition(
            self._database, self._stream, self._group, self._member.id, commit, reason
        ))  # fmt: skip

    async def dead_letter(self, part: Part[T], first_offset: int, next_offset: int, error: str) -> None:
        """Put events aside, and go on behind them."""
        await self._settle(part, lambda commit: streams.dead_letter(
            self._database, self._stream, self._group, self._member.id, commit, first_offset, error
        ), next_offset)  # fmt: skip
        part.finished(next_offset)
        part.was_committed(next_offset)

    async def note(self, part: Part[T], offset: int, reason: str) -> None:
        """Note that a handler fails at an event, for those who wonder why the group stands still. Raises nothing."""
        if not part.to_note(time.monotonic()):
            return
        commit = Commit(part.partition, part.epoch, part.revision, offset)
        try:
            await streams.note_failure(self._database, self._stream, self._group, self._member.id, commit, part.attempts, reason)
        except PenstockError as error:
            log.debug("note_failed", stream=self._stream, group=self._group, partition=part.partition, error=error)

    async def halt(self, part: Part[T], reason: str) -> None:
        """Note at a partition why its consumer stops."""
        await self._settle(part, lambda commit: streams.halt_partition(
            self._database, self._stream, self._group, self._member.id, commit, reason
        ))  # fmt: skip

    async def _settle(self, part: Part[T], call: Callable[[Commit], Awaitable[Any]], next_offset: int | None = None) -> None:
        commit = Commit(part.partition, part.epoch, part.revision, next_offset if next_offset is not None else part.done)
        while True:
            try:
                await call(commit)
                return
            except DatabaseUnavailable as error:
                log.warning("settle_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
            except Conflict:
                # Another's by now, or moved: the next look tells.
                self._look()
                raise
