"""Jobs that their handlers finish, or of which they keep steps, in transactions of their own.

`Job.finish` archives a job in the handler's transaction, which the worker does not see end. When the handler has ended, the
worker asks the database: the job is finished, or the transaction was rolled back and the job is settled as usual, or it is still
open. No settlement of such a job is written before: it would wait for the transaction, and so would all results of its batch.

A step that is kept through a connection of the handler locks the row of the job in the same way, until its transaction ends. A
thread goes on past its time limit, and may hold the row then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    """What the handler of one job writes of it in transactions of its own: its finish, or steps. From the first call on.

    Args:
        held: The job, whose last lines go with its finish.
    """

    __slots__ = ("_held", "_lines", "_writing", "finishes", "task", "transactions")

    def __init__(self, held: Logging) -> None:
        self._held = held
        self._lines: list[tuple[float, str]] = []
        self._writing: set[object] = set()
        self.finishes = False
        """Whether `finish` was called; False: only steps were written."""
        self.transactions: set[str] = set()
        """Ids of these transactions, which may have ended."""
        self.task: asyncio.Task[None] | None = None
        """Waits for the end of the transaction, when the handler has ended."""

    @property
    def writing(self) -> bool:
        """Whether a step is being written, which may lock the row of the job at any moment."""
        return bool(self._writing)

    @contextmanager
    def write(self) -> Iterator[None]:
        """Around the write of a step, from any thread. Raises `Conflict` when the worker waits for the end of the handler's
        transactions already: either it sees that there is one more, or this sees the worker.
        """
        token = object()
        self._writing.add(token)
        try:
            if self.task is not None:
                raise Conflict("the worker does not wait for this handler any more", hint="Stop: its time was over.")
            yield
        finally:
            self._writing.discard(token)

    async def run(self, connection: Any, job: ClaimedJob, result: str | None) -> None:
        """Finish the job through a connection. See `Job.finish`."""
        self.finishes = True
        self.rolled_back()
        held, now = self._held, time.monotonic()
        self._lines = held.lines.take() if held.lines is not None else []
        lines = [(held.sealed_line(text), now - at) for at, text in self._lines]
        self.transactions.add(await finish_through(connection, job.id, job.attempt, held.lease, result, lines))

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

    async def finished(self, job: ClaimedJob, finishing: Finishing) -> bool:
        """Wait until the transactions of a handler have ended. Returns whether the job is in the queue no more: its finish was
        committed, if it called that.
        """
        pause, began, warned = _FIRST_PAUSE_S, time.monotonic(), False
        while True:
            try:
                state = "open" if finishing.writing else await self._asking.submit("", job.id)
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
        """Refuse to extend the lease of a job whose finish is under way, or done, or of which the handler has a step in an open
        transaction, for whose end the call would wait. Raises `Conflict`.
        """
        if finishing is None:
            return
        if finishing.finishes and await self._asking.submit("", job.id) != "held":
            raise Conflict(f"job {job.id} is being finished", hint="Extend its lease before you call finish().")
        if await self.is_open(finishing):
            raise Conflict(
                f"a step of job {job.id} is in a transaction that is open",
                hint="Extend its lease before the step, or after the commit.",
            )

    async def is_open(self, finishing: Finishing | None) -> bool:
        """Whether a transaction in which the handler of a job wrote of it goes on."""
        if finishing is None or not finishing.transactions:
            return False
        asked = list(finishing.transactions)
        if await claim_queries.is_open(self._database, asked):
            return True
        finishing.transactions.difference_update(asked)
        return False

    async def _ask(self, _: str, ids: list[UUID]) -> list[str]:
        states = await claim_queries.confirm_finished(self._database, ids)
        return [states.get(id, "finished") for id in ids]
