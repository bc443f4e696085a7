"""A claimed job in this process, and what its handler or program asks of the worker through its `Job`.

An executor keeps a subclass of it: `Running` waits for a place and is run, `Pulled` waits for the program and is settled by it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from penstock.core.encryption import Sealer
from penstock.core.serialization import dump_json
from penstock.errors import Conflict
from penstock.jobs import claim_queries
from penstock.jobs.group_record import JobGroupRecord
from penstock.jobs.models import ClaimedJob
from penstock.jobs.steps import StepControl
from penstock.postgres.database import Database
from penstock.worker.finishing import Confirmer, Finishing
from penstock.worker.reports import Lines, Reports, lines_of
from penstock.workflows import queries as workflow_queries


class JobHolder(Protocol):
    """What a claimed job uses of the executor that keeps it."""

    database: Database
    loop: asyncio.AbstractEventLoop
    reports: Reports
    confirmer: Confirmer


class HeldJob:
    """A claimed job in this process. The `JobControl` of its `Job`, and a `Logging`.

    Its subclasses set its attributes themselves, which saves a call for each job.
    """

    __slots__ = ("claimed", "executor", "finishing", "lease", "lines", "may_start", "reason", "suspended")

    executor: JobHolder
    claimed: ClaimedJob
    may_start: Callable[[], bool]
    lease: int
    """The lease under which it is held now."""
    finishing: Finishing | None
    """What its handler or program wrote of it in transactions of its own: its finish, or steps. None: nothing."""
    lines: Lines | None
    """Lines of its log that are not written yet."""
    reason: str | None
    """Why its handler or program was told to stop."""
    suspended: str | None
    """The step with whose wait this run was to end: its handler was raised `Suspended`."""

    @property
    def sealer(self) -> Sealer:
        """Encrypts what belongs to the job."""
        raise NotImplementedError

    @property
    def cancelled(self) -> bool:
        """See `JobControl`."""
        return self.reason is not None

    async def extend(self, duration: timedelta | None) -> None:
        """See `JobControl`."""
        await self.executor.confirmer.refuse_finishing(self.claimed, self.finishing)
        lease = await claim_queries.extend(self.executor.database, self.claimed, self.lease, duration)
        if lease is None:
            raise Conflict(
                f"job {self.claimed.id} no longer belongs to this worker",
                hint="Stop: another worker may be running it.",
            )
        self.lease = lease

    def extend_blocking(self, duration: timedelta | None) -> None:
        """See `JobControl`."""
        asyncio.run_coroutine_threadsafe(self.extend(duration), self.executor.loop).result(timeout=60)

    def progress(self, value: Any) -> None:
        """See `JobControl`."""
        text = self.sealed("progress", dump_json(value, f"the progress of {self.claimed.name}"))
        self.executor.loop.call_soon_threadsafe(self.executor.reports.progress, self.claimed.id, self, text)

    def log(self, line: str) -> None:
        """See `JobControl`."""
        lines_of(self).add(line)
        self.executor.loop.call_soon_threadsafe(self.executor.reports.log, self.claimed.id, self)

    async def finish(self, connection: Any, result: Any) -> None:
        """See `JobControl`."""
        text = None if result is None else self.sealed("result", dump_json(result, f"the result of {self.claimed.name}"))
        if self.finishing is None:
            self.finishing = Finishing(self)
        await self.finishing.run(connection, self.claimed, text)

    def steps(self) -> StepControl:
        """See `JobControl`."""
        raise Conflict(
            f"job {self.claimed.id} can have no durable steps: a program pulled it",
            hint="Steps are for handlers, which run again: @pool.job.",
        )

    async def group(self) -> JobGroupRecord | None:
        """See `JobControl`."""
        return await workflow_queries.group_of(self.executor.database, self.claimed.id)

    def group_blocking(self) -> JobGroupRecord | None:
        """See `JobControl`."""
        return asyncio.run_coroutine_threadsafe(self.group(), self.executor.loop).result(timeout=60)

    def sealed(self, kind: str, text: str) -> str:
        """A document of the job (its result or progress) as it is stored."""
        return self.sealer.seal(kind, text, str(self.claimed.id))

    def sealed_line(self, line: str) -> str:
        """See `Logging`."""
        return self.sealer.seal_line(line, str(self.claimed.id))
