"""Suspect partitions: members crashed near their offset, so one of their next events may crash the process that handles it.

`tables/0006_streams.sql` says how a partition becomes a suspect. Its events are on trial, few at a time, and each trial is
committed before the next one begins. No other suspect of this process begins anything during a trial, so that the database knows
where a crash happened.
"""

from __future__ import annotations

from typing import Any

from penstock.core.logs import get_logger
from penstock.groups.trials import Trials
from penstock.postgres.database import Database
from penstock.streams import group_queries
from penstock.streams.consumer.partition_state import PartitionState

log = get_logger("penstock.consumer")
_ASK_AGAIN_S = 0.1
_MOST_ON_TRIAL = 128


class Suspects:
    """Trials of the suspect partitions of a consumer, one at a time.

    Args:
        database: Database of the stream.
        stream: Name of the stream.
        group: Name of the group.
    """

    def __init__(self, database: Database, stream: str, group: str) -> None:
        self._database = database
        self._stream = stream
        self._group = group
        self._trials = Trials.of(database)

    async def begin(self, state: PartitionState[Any], events: int) -> bool:
        """Wait until a trial of this many events may begin. Returns False when the partition is draining or has another owner."""
        while not self._trials.begin(state):
            await state.sleep(_ASK_AGAIN_S)
            if state.draining:
                return False
        state.on_trial = True
        try:
            known = await group_queries.try_partition(
                self._database, self._stream, self._group, state.partition, state.epoch, tried=events
            )
        except BaseException:
            self.release(state)
            raise
        if not known:
            self.release(state)
        return known

    async def end(self, state: PartitionState[Any], *, failed: bool = False) -> None:
        """End a trial whose events are committed, or whose handler failed: other suspects run while it waits for its retry."""
        if not state.on_trial:
            return
        acquitted = state.suspect_until is not None and state.committed >= state.suspect_until
        if state.trials_grow and not failed:
            state.trial_size = min(state.trial_size * 2, _MOST_ON_TRIAL)
        try:
            await group_queries.try_partition(
                self._database, self._stream, self._group, state.partition, state.epoch, tried=0, acquitted=acquitted
            )
        finally:
            self.release(state)
        if acquitted:
            state.suspect_until = None
            log.info("partition_acquitted", stream=self._stream, group=self._group, partition=state.partition)

    def release(self, state: PartitionState[Any]) -> None:
        """Let other suspects begin a trial, whatever the result of this one."""
        state.on_trial = False
        self._trials.end(state, survived=False)
