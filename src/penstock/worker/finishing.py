"""Jobs that their handlers finish in transactions of their own.

`Job.finish` archives a job in the handler's transaction, which the worker does not see end. When the handler has ended, the
worker asks the database: the job is finished, or the transaction was rolled back and the job is settled as usual, or it is still
open. No settlement of such a job is written before: it would wait for the transaction, and so would all results of its batch.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import UUID

from penstock.core.coalescing import GroupCommit
from penstock.core.logs import get_logger
from penstock.errors import Conflict, DatabaseUnavailable
from penstock.jobs import claim_queries
from penstock.jobs.models import ClaimedJob
from penstock.jobs.transactional import finish_through
from penstock.postgres.database import Database
from penstock.worker.reports import Logging, lines_of

log = get_logger("penstock.worker")
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 1.0
_WARN_AFTER_S = 10.0


class Finishing:
    """The finish of one job, from its first call on.

    Args:
        held: The job, whose last lines go with it.
    """

    __slots__ = ("_held", "_lines", "task")

    def __init__(self, held: Logging) -> None:
        self._held = held
        self._lines: list[tuple[float, str]] = []
        self.task: asyncio.Task[None] | None = None
        """Waits for the end of the transaction, when the handler has ended."""

    async def run(self, connection: Any, job: ClaimedJob, result: str | None) -> None:
        """Finish the job through a connection. See `Job.finish`."""
        self.rolled_back()
        held, now = self._held, time.monotonic()
        self._lines = held.lines.take() if held.lines is not None else []
        lines = [(held.sealed_line(text), now - at) for at, text in self._lines]
        await finish_through(connection, job.id, job.attempt, held.lease, result, lines)

    def rolled_back(self) -> None:
        """Keep the lines of the job that were rolled back."""
        if self._lines:
            lines_of(self._held).give_back(self._lines)
            self._lines = []


class Confirmer:
    """Asks what became of the jobs that handlers finished: for all that ended while it asked before, in one call.

    Args:
        database: Database to ask.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asking: GroupCommit[str, UUID, str] = GroupCommit(self._ask)

    async def finished(self, job: ClaimedJob) -> bool:
        """Wait until the transaction of a finish has ended. Returns whether it was committed."""
        pause, began, warned = _FIRST_PAUSE_S, time.monotonic(), False
        while True:
            try:
                state = await self._asking.submit("", job.id)
            except DatabaseUnavailable:
                state = "open"
            if state != "open":
                return state == "finished"
            if not warned and time.monotonic() - began > _WARN_AFTER_S:
                warned = True
                log.warning(
                    "finish_still_open", job_id=str(job.id), job_type=job.name, hint="End the transaction in the handler."
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def refuse_finishing(self, job: ClaimedJob, finishing: Finishing | None) -> None:
        """Refuse to extend the lease of a job whose finish is under way, or done. Raises `Conflict`."""
        if finishing is not None and await self._asking.submit("", job.id) != "held":
            raise Conflict(f"job {job.id} is being finished", hint="Extend its lease before you call finish().")

    async def _ask(self, _: str, ids: list[UUID]) -> list[str]:
        states = await claim_queries.confirm_finished(self._database, ids)
        return [states.get(id, "finished") for id in ids]
