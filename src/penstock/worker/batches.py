"""Batch handlers: jobs of one type that run at the same time go to one call of their handler.

Each job of a batch is a job of its own: it has its own place, time limit, cancellation and settlement. Only the call is shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.errors import InvalidInput
from penstock.jobs.handler import Job, Jobs
from penstock.jobs.worked import BatchOptions, WorkedType

Call = Callable[[WorkedType, Jobs[Any], Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error of a job, with the traceback that it had before it was raised for each job."""

    error: BaseException
    traceback: TracebackType | None


@dataclass(slots=True)
class _Gathering:
    """Jobs that wait for the call of their batch."""

    jobs: list[tuple[Job[Any], asyncio.Future[Any]]] = field(default_factory=list)
    timer: asyncio.Handle | None = None


class Batcher:
    """Gathers the jobs of one type, and calls its handler for each batch.

    Args:
        worked: The job type.
        options: Size of a batch, and how long the first job of a batch waits for others.
        call: Calls the handler with a batch and its dependencies, on the loop or in a thread.
    """

    def __init__(self, worked: WorkedType, options: BatchOptions, call: Call) -> None:
        self._worked = worked
        self._options = options
        self._call = call
        self._gathering: dict[str | None, _Gathering] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self, job: Job[Any]) -> Any:
        """Run a job in the next batch. Returns its result, or raises its error."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        key = job.key if self._options.by_key else None
        gathering = self._gathering.setdefault(key, _Gathering())
        gathering.jobs.append((job, future))
        if len(gathering.jobs) >= self._options.max_batch_size:
            self._begin(key)
        elif gathering.timer is None:
            linger_s = self._options.linger.total_seconds()
            # Without a linger, the jobs that start in this iteration of the event loop go together.
            gathering.timer = loop.call_later(linger_s, self._begin, key) if linger_s else loop.call_soon(self._begin, key)
        outcome = await future
        if isinstance(outcome, _Failure):
            # One error is raised for many jobs: each begins with the traceback of the call, not with that of the job before it.
            raise outcome.error.with_traceback(outcome.traceback)
        return outcome

    def _begin(self, key: str | None) -> None:
        gathering = self._gathering.pop(key)
        if gathering.timer is not None:
            gathering.timer.cancel()
        # A job that was cancelled while it waited is not in the batch.
        members = [(job, future) for job, future in gathering.jobs if not future.done()]
        if members:
            task = asyncio.create_task(self._run(members), name=f"penstock-batch-{self._worked.name}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            for _, future in members:
                future.add_done_callback(lambda _: self._stop_if_all_are_done(task, members))

    @staticmethod
    def _stop_if_all_are_done(task: asyncio.Task[None], members: Sequence[tuple[Job[Any], asyncio.Future[Any]]]) -> None:
        """Cancel the call when all of its jobs were cancelled, as by their time limit."""
        if not task.done() and all(future.cancelled() for _, future in members):
            task.cancel()

    async def _run(self, members: Sequence[tuple[Job[Any], asyncio.Future[Any]]]) -> None:
        batch = Jobs(job for job, _ in members)
        worked = self._worked
        try:
            if worked.around is None:
                answer = await self._call(worked, batch, {})
            else:
                answer = await worked.around(batch, lambda dependencies: self._call(worked, batch, dependencies))
            outcomes = _outcomes(worked.name, answer, len(batch))
        except BaseException as error:
            failure = _Failure(error, error.__traceback__)
            outcomes = [failure] * len(batch)
        for (_, future), outcome in zip(members, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)


def _outcomes(name: str, answer: Any, size: int) -> list[Any]:
    """The outcome of each job: its result, or its error."""
    if answer is None:
        return [None] * size
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes) or len(answer) != size:
        given = f"{len(answer)} outcomes" if isinstance(answer, Sequence) else type(answer).__name__
        raise InvalidInput(
            f"the batch handler of {name} returned {given} for {size} jobs",
            hint="Return nothing, or a list with an outcome for each job: its result, or an exception such as Retry(...).",
        )
    return [_Failure(each, each.__traceback__) if isinstance(each, BaseException) else each for each in answer]
