"""Suspect partitions: near their offset members were lost, so that one of their events may end the process that handles it.

`tables/0032c_crashes_of_partitions.sql` says how one becomes a suspect. Its events are on trial, few at a time, committed before
the next ones, and at such a moment no other suspect of this process begins anything: then the database knows where it was.
"""

from __future__ import annotations

from typing import Any

from penstock.consuming.part import Part
from penstock.logs import get_logger
from penstock.ownership.trials import Trials
from penstock.postgres import streams
from penstock.postgres.database import Database

log = get_logger("penstock.consumer")
_ASK_AGAIN_S = 0.1
_MOST_ON_TRIAL = 128


class Caution:
    """Lets the suspect partitions of a consumer handle their events with no other suspect beside them.

    Args:
        database: Where.
        stream: Name of the stream.
        group: Name of the group.
    """

    def __init__(self, database: Database, stream: str, group: str) -> None:
        self._database = database
        self._stream = stream
        self._group = group
        self._trials = Trials.of(database)

    async def begin(self, part: Part[Any], events: int) -> bool:
        """Wait until a partition may handle so many events, alone. False: it is to be drained, or another member's."""
        while not self._trials.begin(part):
            await part.nap(_ASK_AGAIN_S)
            if part.draining:
                return False
        part.alone = True
        try:
            known = await streams.try_partition(
                self._database, self._stream, self._group, part.partition, part.epoch, tried=events
            )
        except BaseException:
            self.release(part)
            raise
        if not known:
            self.release(part)
        return known

    async def end(self, part: Part[Any], *, failed: bool = False) -> None:
        """The events are done and committed, or their handler failed: while it waits, others have their turn."""
        if not part.alone:
            return
        acquitted = part.suspect_until is not None and part.committed >= part.suspect_until
        if part.trials_grow and not failed:
            part.trial_size = min(part.trial_size * 2, _MOST_ON_TRIAL)
        try:
            await streams.try_partition(
                self._database, self._stream, self._group, part.partition, part.epoch, tried=0, acquitted=acquitted
            )
        finally:
            self.release(part)
        if acquitted:
            part.suspect_until = None
            log.info("partition_acquitted", stream=self._stream, group=self._group, partition=part.partition)

    def release(self, part: Part[Any]) -> None:
        """Let others have their turn, whatever became of the events."""
        part.alone = False
        self._trials.end(part, survived=False)
