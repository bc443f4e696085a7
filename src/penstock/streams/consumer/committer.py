"""The committer writes the results of a consumer: committed offsets, dead letters, failures and quarantined partitions.

Every write is fenced by the epoch under which the member owns a partition, and by the partition's revision, which grows when the
group is moved to other offsets. The database refuses a write whose fence is out of date.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import Conflict, DatabaseUnavailable, PenstockError
from penstock.postgres.database import Database
from penstock.streams import group_queries
from penstock.streams.consumer.partition_state import PartitionState
from penstock.streams.group_queries import Commit

log = get_logger("penstock.consumer")
T = TypeVar("T")
_COMMIT_EVERY_S = 0.05
_FLUSH_S = 5.0


class Committer(Generic[T]):
    """Writes the results of one member of a group.

    Args:
        database: Database of the stream.
        stream: Name of the stream.
        group: Name of the group.
        member: Id of the member.
        partitions: Partitions that the member owns at each moment.
        outdated: Called when the database has another state of a partition than this process.
        stale: Called when the database has refused a commit, since the member may no longer own the partition.
    """

    def __init__(
        self,
        database: Database,
        stream: str,
        group: str,
        member: str,
        partitions: Mapping[int, PartitionState[T]],
        outdated: Callable[[], None],
        stale: Callable[[], None],
    ) -> None:
        self._database = database
        self._stream = stream
        self._group = group
        self._member = member
        self._partitions = partitions
        self._outdated = outdated
        self._stale = stale
        self._requested = asyncio.Event()
        self._flush = asyncio.Event()

    def request(self) -> None:
        """Request a commit of what is done, which happens soon."""
        self._requested.set()

    async def flush(self, state: PartitionState[T]) -> None:
        """Wait, with a limit, until everything done of a partition is committed."""
        if state.commit is None:
            return
        self._flush.set()
        self._requested.set()
        try:
            async with asyncio.timeout(_FLUSH_S):
                await state.wait_until_committed()
        except TimeoutError:
            log.warning("commit_did_not_finish", stream=self._stream, group=self._group, partition=state.partition)

    async def run(self) -> None:
        """Commit what is done until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            self._flush.clear()
            commits = [commit for state in self._partitions.values() if (commit := state.commit) is not None]
            if not commits:
                continue
            try:
                outcomes = await group_queries.commit_offsets(self._database, self._stream, self._group, self._member, commits)
            except DatabaseUnavailable as error:
                log.warning("commit_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
                self._requested.set()
                continue
            except PenstockError as error:
                log.error("commit_refused", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(1.0)
                continue
            for commit in commits:
                state = self._partitions.get(commit.partition)
                if state is None or (state.epoch, state.revision) != (commit.epoch, commit.revision):
                    continue
                if outcomes[commit.partition].done:
                    if measuring.meter is not None:
                        measuring.meter.handled(self._stream, self._group, commit.next_offset - state.committed)
                    state.was_committed(commit.next_offset)
                    if outcomes[commit.partition].paused != state.paused:
                        self._outdated()
                else:
                    log.warning("commit_stale", stream=self._stream, group=self._group, partition=commit.partition)
                    state.committed = state.done
                    state.was_committed(state.done)
                    self._stale()
            # Each commit leaves a dead row; a few commits a second are enough, unless a caller waits for one.
            await wait_for_event(self._flush, _COMMIT_EVERY_S)

    async def has_committed(self, state: PartitionState[T], next_offset: int) -> bool:
        """Whether the database has committed a partition up to an offset."""
        owned = {state.partition: state.epoch}
        while True:
            try:
                begun = await group_queries.begin_partitions(self._database, self._stream, self._group, self._member, owned)
            except DatabaseUnavailable as error:
                log.warning("look_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
            else:
                found = begun.get(state.partition)
                return found is not None and found.revision == state.revision and found.next_offset >= next_offset

    async def quarantine(self, state: PartitionState[T], reason: str) -> None:
        """Pause a partition before its next event."""
        state.paused = True
        log.error("partition_quarantined", stream=self._stream, group=self._group, partition=state.partition, reason=reason)
        await self._settle(state, lambda commit: group_queries.quarantine_partition(
            self._database, self._stream, self._group, self._member, commit, reason
        ))  # fmt: skip

    async def dead_letter(self, state: PartitionState[T], first_offset: int, next_offset: int, error: str) -> None:
        """Move events to the dead letters, and continue behind them."""
        await self._settle(state, lambda commit: group_queries.dead_letter(
            self._database, self._stream, self._group, self._member, commit, first_offset, error
        ), next_offset)  # fmt: skip
        state.finished(next_offset)
        state.was_committed(next_offset)

    async def record_failure(self, state: PartitionState[T], offset: int, reason: str) -> None:
        """Record that a handler fails at an event, so that operators see why the group does not advance. Raises nothing."""
        if not state.should_record_failure(time.monotonic()):
            return
        commit = Commit(state.partition, state.epoch, state.revision, offset)
        try:
            await group_queries.note_failure(
                self._database, self._stream, self._group, self._member, commit, state.attempts, reason
            )
        except PenstockError as error:
            log.debug("note_failed", stream=self._stream, group=self._group, partition=state.partition, error=error)

    async def halt(self, state: PartitionState[T], reason: str) -> None:
        """Record at a partition why its consumer halts."""
        await self._settle(state, lambda commit: group_queries.halt_partition(
            self._database, self._stream, self._group, self._member, commit, reason
        ))  # fmt: skip

    async def _settle(
        self, state: PartitionState[T], call: Callable[[Commit], Awaitable[Any]], next_offset: int | None = None
    ) -> None:
        commit = Commit(state.partition, state.epoch, state.revision, next_offset if next_offset is not None else state.done)
        while True:
            try:
                await call(commit)
                return
            except DatabaseUnavailable as error:
                log.warning("settle_failed", stream=self._stream, group=self._group, error=error)
                await asyncio.sleep(random.uniform(0.2, 0.6))
            except Conflict:
                # The partition has another owner, or was moved to another offset; its state in the database shows which.
                self._outdated()
                raise
