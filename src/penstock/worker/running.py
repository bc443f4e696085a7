"""A claimed job of the executor that runs handlers, and the `Job` that its handler receives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from penstock.core.encryption import Sealer
from penstock.core.tracing import trace_id_of
from penstock.core.user_code import message_of
from penstock.errors import Conflict, KeyMissing, Unreadable
from penstock.jobs.handler import Job
from penstock.jobs.models import ClaimedJob
from penstock.jobs.worked import NotStarted, WorkedType
from penstock.worker.finishing import Finishing
from penstock.worker.held import HeldJob, JobHolder
from penstock.worker.lanes import Share
from penstock.worker.process import UnreadablePayload
from penstock.worker.reports import Lines
from penstock.worker.steps import StepRecorder, Steps


class StepHolder(JobHolder, Protocol):
    """What the job of a handler uses of the executor that keeps it."""

    steps: StepRecorder


class Running(HeldJob):
    """A claimed job that waits for a place, or whose handler runs."""

    __slots__ = ("_steps", "deadline", "entered", "latest", "limit", "share", "since", "started", "task", "traceparent", "worked")

    executor: StepHolder
    _steps: Steps

    def __init__(
        self,
        executor: StepHolder,
        claimed: ClaimedJob,
        worked: WorkedType,
        share: Share[Running],
        limit: float,
        deadline: float,
        may_start: Callable[[], bool],
    ) -> None:
        self.executor = executor
        self.claimed = claimed
        self.worked = worked
        self.share = share  # of its type in the lane whose place it waits for or has
        self.lease = claimed.lease
        self.limit = limit  # seconds that its handler may run
        self.latest = deadline  # when its lease is about to end, by the monotonic clock
        self.deadline = deadline  # the latest start while it waits, then the latest end of its handler
        self.started = False  # it has a place
        self.since = 0.0  # when it got its place, by the monotonic clock
        self.entered = False  # its task has taken its first step
        self.may_start = may_start
        self.task: asyncio.Task[Any] | None = None
        self.finishing: Finishing | None = None  # its handler wrote of it in its own transaction
        self.lines: Lines | None = None  # of its log, which are not written yet
        self.reason: str | None = None  # why its handler was told to stop
        self.suspended: str | None = None  # the step with whose wait this run was to end
        self.traceparent = claimed.traceparent  # of its producer, then of the span of its handler

    def steps(self) -> Steps:
        """See `JobControl`. They are made with the first one, since few jobs have any."""
        if (found := getattr(self, "_steps", None)) is None:
            if self.worked.batch is not None:
                raise Conflict(
                    f"job {self.claimed.id} can have no durable steps: the handler of {self.claimed.name} takes batches",
                    hint="A call is for many jobs, each of which would wait for the others. Leave max_batch_size out.",
                )
            found = self._steps = Steps(self, self.executor.steps)
        return found

    @property
    def trace_id(self) -> str | None:
        """Id of its trace, for the log."""
        return trace_id_of(self.traceparent)

    @property
    def sealer(self) -> Sealer:
        """See `HeldJob`."""
        return self.worked.sealer

    async def extend(self, duration: timedelta | None) -> None:
        """See `JobControl`."""
        await super().extend(duration)
        left = self.claimed.lease_s if duration is None else duration.total_seconds()
        self.deadline = max(self.deadline, time.monotonic() + left * 0.9)


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
        running.traceparent,
        claimed.lease,
    )


def plain_text_of(running: Running) -> str:
    """The payload of a job as JSON text, decrypted. Raises `UnreadablePayload`."""
    try:
        return running.worked.plain_text(running.claimed.data)
    except KeyMissing:
        raise NotStarted from None
    except Unreadable as error:
        raise UnreadablePayload(error.message) from error
