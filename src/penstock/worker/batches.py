"""Batch handlers: jobs of one type that run at the same time go to one call of their handler.

Each job of a batch is a job of its own: it has its own place, time limit, cancellation and settlement. Only the call is shared.
A job that was cancelled or lost by the time of the call is not handed to the handler: that may have happened while the batch
gathered, while the middleware waited, or while no thread was free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.core.tracing import Tracing
from penstock.errors import InvalidInput
from penstock.jobs.handler import Job, Jobs
from penstock.jobs.worked import BatchOptions, NotStarted, WorkedType

Call = Callable[[WorkedType, Callable[[], Jobs[Any]], Mapping[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class _Failure:
    """The error of a job, with the traceback that it had before it was raised for each job."""

    error: BaseException
    traceback: TracebackType | None


@dataclass(frozen=True, slots=True)
class _Member:
    """A job of a batch, its outcome, and whether its worker still owns it."""

    job: Job[Any]
    outcome: asyncio.Future[Any]
    may_start: Callable[[], bool]


@dataclass(slots=True)
class _Gathering:
    """Jobs that wait for the call of their batch."""

    members: list[_Member] = field(default_factory=list)
    timer: asyncio.Handle | None = None


class Batcher:
    """Gathers the jobs of one type, and calls its handler for each batch.

    Args:
        worked: The job type.
        options: Size of a batch, and how long the first job of a batch waits for others.
        call: Calls the handler with its dependencies, on the loop or in a thread, with the batch that a function returns there.
        tracing: Makes a span of each call; None: there are none.
    """

    def __init__(self, worked: WorkedType, options: BatchOptions, call: Call, tracing: Tracing | None = None) -> None:
        self._worked = worked
        self._options = options
        self._call = call
        self._tracing = tracing
        self._gathering: dict[str | None, _Gathering] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self, job: Job[Any], may_start: Callable[[], bool]) -> Any:
        """Run a job in the next batch. Returns its result, or raises its error.

        Raises:
            NotStarted: `may_start` said no at the time of the call.
        """
        loop = asyncio.get_running_loop()
        member = _Member(job, loop.create_future(), may_start)
        key = job.key if self._options.by_key else None
        gathering = self._gathering.setdefault(key, _Gathering())
        gathering.members.append(member)
        if len(gathering.members) >= self._options.max_batch_size:
            self._begin(key)
        elif gathering.timer is None:
            linger_s = self._options.linger.total_seconds()
            # Without a linger, the jobs that start in this iteration of the event loop go together.
            gathering.timer = loop.call_later(linger_s, self._begin, key) if linger_s else loop.call_soon(self._begin, key)
        outcome = await member.outcome
        if isinstance(outcome, _Failure):
            # One error is raised for many jobs: each begins with the traceback of the call, not with that of the job before it.
            raise outcome.error.with_traceback(outcome.traceback)
        return outcome

    def _begin(self, key: str | None) -> None:
        gathering = self._gathering.pop(key)
        if gathering.timer is not None:
            gathering.timer.cancel()
        members = _waiting(gathering.members)
        if members:
            task = asyncio.create_task(self._run(members), name=f"penstock-batch-{self._worked.name}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            for member in members:
                member.outcome.add_done_callback(lambda _: self._stop_if_all_are_done(task, members))

    @staticmethod
    def _stop_if_all_are_done(task: asyncio.Task[None], members: Sequence[_Member]) -> None:
        """Cancel the call when all of its jobs were cancelled, as by their time limit."""
        if not task.done() and all(member.outcome.cancelled() for member in members):
            task.cancel()

    async def _run(self, members: Sequence[_Member]) -> None:
        # Middleware and dependencies hold the same list as the handler: it has the jobs that there are at the time of the call.
        batch = Jobs(member.job for member in members)
        worked = self._worked

        def taken() -> Jobs[Any]:
            nonlocal members
            members = _waiting(members)
            batch[:] = [member.job for member in members]
            return batch

        async def call(dependencies: Mapping[str, Any]) -> Any:
            for member in _waiting(members):
                # A process can be suspended at any point: another worker may have the job by now.
                if not member.may_start():
                    member.outcome.set_result(_Failure(NotStarted(), None))
            return await self._call(worked, taken, dependencies)

        try:
            with nullcontext() if self._tracing is None else self._span(self._tracing, batch):
                answer = await (call({}) if worked.around is None else worked.around(batch, call))
            handed = _in_order_of(batch, members)
            outcomes = _outcomes(worked.name, answer, len(handed))
        except BaseException as error:
            # When the call was cancelled, its thread may be taking the batch at this moment.
            handed = members
            outcomes = [_Failure(error, error.__traceback__)] * len(handed)
        for member, outcome in zip(handed, outcomes, strict=True):
            if not member.outcome.done():
                member.outcome.set_result(outcome)

    def _span(self, tracing: Tracing, batch: Jobs[Any]) -> AbstractContextManager[None]:
        one = len(batch) == 1
        attributes = {"messaging.message.id": str(batch[0].id), "penstock.attempt": batch[0].attempt} if one else {}
        return tracing.processing(self._worked.name, [job.traceparent for job in batch], batch[0].attempt, attributes)


def _waiting(members: Sequence[_Member]) -> list[_Member]:
    """Those whose outcome is still awaited: a job that is cancelled or lost awaits it no more."""
    return [member for member in members if not member.outcome.done()]


def _in_order_of(batch: Jobs[Any], members: Sequence[_Member]) -> Sequence[_Member]:
    """The jobs of a call in the order of the list that its handler holds, who may have sorted it: so are the outcomes."""
    place = {id(job): number for number, job in enumerate(batch)}
    if len(batch) != len(members) or any(id(member.job) not in place for member in members):
        return members
    return sorted(members, key=lambda member: place[id(member.job)])


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
    return [_Failure(each, each.__traceback__) if isinstance(each, BaseException) else each for each in map(_made, answer)]


def _made(outcome: Any) -> Any:
    """The class of an exception stands for one, as for `raise`: as a result it would be a success."""
    if isinstance(outcome, type) and issubclass(outcome, BaseException):
        try:
            return outcome()
        except Exception as error:
            return error
    return outcome
