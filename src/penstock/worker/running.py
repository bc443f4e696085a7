"""A claimed job in this process, and the `Job` that its handler receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from penstock.core.serialization import dump_json
from penstock.core.user_code import message_of
from penstock.errors import Conflict, KeyMissing, Unreadable
from penstock.jobs import claim_queries
from penstock.jobs.handler import Job
from penstock.jobs.models import ClaimedJob
from penstock.jobs.worked import NotStarted, WorkedType
from penstock.postgres.database import Database
from penstock.worker.finishing import Confirmer, Finishing
from penstock.worker.lanes import Lane
from penstock.worker.process import UnreadablePayload
from penstock.worker.reports import Lines, Reports, lines_of


class JobHolder(Protocol):
    """What a claimed job uses of the executor that runs it."""

    database: Database
    loop: asyncio.AbstractEventLoop
    reports: Reports
    confirmer: Confirmer


class Running:
    """A claimed job in this process, which waits for a place or runs. The `JobControl` of its `Job`."""

    __slots__ = (
        "_executor",
        "claimed",
        "deadline",
        "entered",
        "finishing",
        "lane",
        "latest",
        "lease",
        "limit",
        "lines",
        "may_start",
        "reason",
        "since",
        "started",
        "task",
        "worked",
    )

    def __init__(
        self,
        executor: JobHolder,
        claimed: ClaimedJob,
        worked: WorkedType,
        lane: Lane[Running],
        limit: float,
        deadline: float,
        may_start: Callable[[], bool],
    ) -> None:
        self._executor = executor
        self.claimed = claimed
        self.worked = worked
        self.lane = lane  # whose place it waits for or has
        self.lease = claimed.lease
        self.limit = limit  # seconds that its handler may run
        self.latest = deadline  # when its lease is about to end, by the monotonic clock
        self.deadline = deadline  # the latest start while it waits, then the latest end of its handler
        self.started = False  # it has a place
        self.since = 0.0  # when it got its place, by the monotonic clock
        self.entered = False  # its task has taken its first step
        self.may_start = may_start
        self.task: asyncio.Task[None] | None = None
        self.finishing: Finishing | None = None  # its handler has called finish
        self.lines: Lines | None = None  # of its log, which are not written yet
        self.reason: str | None = None  # why its handler was told to stop

    @property
    def cancelled(self) -> bool:
        """See `JobControl`."""
        return self.reason is not None

    async def extend(self, duration: timedelta | None) -> None:
        """See `JobControl`."""
        await self._executor.confirmer.refuse_finishing(self.claimed, self.finishing)
        lease = await claim_queries.extend(self._executor.database, self.claimed, self.lease, duration)
        if lease is None:
            raise Conflict(
                f"job {self.claimed.id} no longer belongs to this worker",
                hint="Stop: another worker may be running it.",
            )
        self.lease = lease
        left = self.claimed.lease_s if duration is None else duration.total_seconds()
        self.deadline = max(self.deadline, time.monotonic() + left * 0.9)

    def extend_blocking(self, duration: timedelta | None) -> None:
        """See `JobControl`."""
        asyncio.run_coroutine_threadsafe(self.extend(duration), self._executor.loop).result(timeout=60)

    def progress(self, value: Any) -> None:
        """See `JobControl`."""
        self._executor.loop.call_soon_threadsafe(
            self._executor.reports.progress,
            self.claimed.id,
            self,
            self.worked.sealed("progress", self.claimed.id, dump_json(value, f"the progress of {self.claimed.name}")),
        )

    def log(self, line: str) -> None:
        """See `JobControl`."""
        lines_of(self).add(line)
        self._executor.loop.call_soon_threadsafe(self._executor.reports.log, self.claimed.id, self)

    async def finish(self, connection: Any, result: Any) -> None:
        """See `JobControl`."""
        claimed = self.claimed
        text = None
        if result is not None:
            text = self.worked.sealed("result", claimed.id, dump_json(result, f"the result of {claimed.name}"))
        if self.finishing is None:
            self.finishing = Finishing(self)
        await self.finishing.run(connection, claimed, text)

    def sealed_line(self, line: str) -> str:
        """See `Logging`."""
        return self.worked.sealer.seal_line(line, str(self.claimed.id))


def job_of(running: Running) -> Job[Any]:
    """The job as its handler receives it. Raises `UnreadablePayload`."""
    claimed = running.claimed
    try:
        data = running.worked.codec.load(claimed.data)
    except KeyMissing:
        raise NotStarted from None
    except Exception as error:
        raise UnreadablePayload(message_of(error)) from error
    return Job(
        claimed.id,
        claimed.name,
        claimed.key,
        claimed.attempt,
        claimed.max_attempts,
        data,
        claimed.created_at,
        running,
        claimed.snoozes,
    )


def plain_text_of(running: Running) -> str:
    """The payload of a job as JSON text, decrypted. Raises `UnreadablePayload`."""
    try:
        return running.worked.plain_text(running.claimed.data)
    except KeyMissing:
        raise NotStarted from None
    except Unreadable as error:
        raise UnreadablePayload(error.message) from error
