"""Records in the database that jobs are about to start, where a job may start only once or its start must be known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.errors import PenstockError
from penstock.jobs import claim_queries
from penstock.postgres.database import Database
from penstock.worker.running import Running

log = get_logger("penstock.worker")


class BeginRecorder:
    """Records that jobs begin: all that came while the call before was under way, in one call.

    Args:
        database: Database in which jobs are recorded as begun.
        recorded: Receives each job, and whether it was recorded; a job that was not may not start.
    """

    def __init__(self, database: Database, recorded: Callable[[Running, bool], None]) -> None:
        self._database = database
        self._recorded = recorded
        self._beginning: list[Running] = []
        self._writing: asyncio.Task[None] | None = None

    def begin(self, running: Running) -> None:
        """Record a job that has a place."""
        self._beginning.append(running)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="penstock-begin")

    def close(self) -> None:
        """Record no more."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self) -> None:
        while self._beginning:
            batch, self._beginning = self._beginning, []
            begun: set[UUID] = set()
            try:
                ids, leases = [running.claimed.id for running in batch], [running.lease for running in batch]
                begun = await claim_queries.begin(self._database, ids, leases)
            except PenstockError as error:
                log.error("jobs_not_begun", jobs=len(batch), error=error)
            for running in batch:
                self._recorded(running, running.claimed.id in begun)
            # These jobs start before more are marked: when one of them ends the process, only those of one call are marked and
            # have not started.
            await asyncio.sleep(0)
