"""The pull worker of a pool: the program asks for jobs and settles them.

The worker itself is made by the application (`worker/pulling.py`), since pools know no worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

from penstock.core.blocking import BackgroundLoop
from penstock.core.checks import check_mapping
from penstock.core.iteration import Iteration
from penstock.core.serialization import Codec, dump_json, plain_text
from penstock.core.user_code import message_of
from penstock.errors import InvalidInput, Snooze
from penstock.groups.membership import Membership
from penstock.jobs.handler import Job, JobControl
from penstock.jobs.models import ClaimedJob, Outcome
from penstock.pools.service import new_member_id
from penstock.pools.sync import SyncPoolWorker, SyncPulledJob
from penstock.pools.worked import WorkedPool
from penstock.postgres.context import Context

T = TypeVar("T")
_LONGEST_ERROR = 2_000


class Pulled(JobControl, Protocol):
    """A claimed job that the program has."""

    claimed: ClaimedJob

    async def settle(self, outcome: Outcome, detail: str | None, after: timedelta | None = None) -> None:
        """Settle the job, and wait until that is written. Raises `Conflict` when it no longer belongs to this worker."""

    def quarantine(self, problem: str) -> None:
        """Settle a job that cannot be given to the program."""

    def sealed(self, kind: str, text: str) -> str:
        """A document of the job (its result or progress) as it is stored."""

    def sealed_error(self, error: Mapping[str, Any]) -> str:
        """The error of the attempt as it is stored, JSON text."""


class Pulling(Protocol):
    """The worker behind a pull worker."""

    @property
    def member(self) -> Membership | None:
        """Its membership in the group of the pool; None: it has not been opened."""

    async def open(self) -> None:
        """Join the pool. Raises `Conflict` when a live worker has this id."""

    async def close(self) -> None:
        """Release all jobs, and leave the pool."""

    async def next(self) -> Pulled | None:
        """Wait for the next job that may start now. None: the worker has ended. Raises the error that ended it."""


MakePulling: TypeAlias = Callable[[Context, WorkedPool, str, int], Pulling]


class PulledJob(Job[T], Generic[T]):
    """A job that a program pulled. Until the program settles it with `ack`, `fail`, `snooze` or `release`, its key waits.

    After `finish`, and the commit of its transaction, `ack` lets the key go on; it raises `Conflict` when that was rolled back.
    """

    __slots__ = ("_background", "_pulled")
    _background: BackgroundLoop
    _pulled: Pulled

    @property
    def sync(self) -> SyncPulledJob[T]:
        """The blocking half, for threads without an event loop."""
        return SyncPulledJob(self, self._background)

    async def ack(self, result: Any = None) -> None:
        """Settle the job as succeeded. Returns when that is written.

        Args:
            result: Result of the job, kept when its type has `keep_result`.

        Raises:
            Conflict: The job no longer belongs to this worker; another one runs it, or will run it.
        """
        detail = None if result is None else self._pulled.sealed("result", dump_json(result, f"the result of {self.name}"))
        await self._pulled.settle(Outcome.SUCCEEDED, detail)

    async def fail(self, error: str | BaseException, *, retry: bool = True, after: timedelta | None = None) -> None:
        """Settle the attempt as failed. The job is retried, `after` a delay or the backoff of the pool, while attempts are left.

        Args:
            error: Error of the attempt, as an exception or a text.
            retry: Whether the job may be retried.
            after: Delay before the next attempt; None: the backoff of the pool.

        Raises:
            Conflict: The job no longer belongs to this worker.
        """
        raised = isinstance(error, BaseException)
        kind = type(error).__qualname__ if raised else "Failed"
        message = message_of(error) if isinstance(error, BaseException) else plain_text(error[:_LONGEST_ERROR])
        detail = self._pulled.sealed_error({"type": kind, "message": message})
        await self._pulled.settle(Outcome.FAILED if retry else Outcome.FAILED_FOR_GOOD, detail, after)

    async def snooze(self, duration: timedelta) -> None:
        """Put the job off without using up an attempt: it comes again after this time. See `Snooze`.

        Args:
            duration: How long the job waits.

        Raises:
            InvalidInput: The duration is not more than nothing, or too long.
            Conflict: The job no longer belongs to this worker.
        """
        await self._pulled.settle(Outcome.SNOOZED, None, Snooze(duration).duration)

    async def release(self) -> None:
        """Release the job as if it had not been pulled."""
        await self._pulled.settle(Outcome.RELEASED, None)


class PoolWorker(Generic[T]):
    """A worker of a pool whose jobs are pulled. Made by `Pool.worker`; use it as an async context manager.

    It is the ordinary `Worker` with an executor that gives jobs to the program.

    Attributes:
        id: Id of the worker, unique in the pool.
    """

    id: str

    def __init__(
        self, context: Context, pool: WorkedPool, codec: Codec[T], id: str | None, prefetch: int, make_pulling: MakePulling
    ) -> None:
        if prefetch < 1:
            raise InvalidInput(f"prefetch must be at least 1, not {prefetch}")
        process = new_member_id()
        self.id = id or f"{process}.p1"
        self._context = context
        self._pool = replace(pool, member=self.id)
        self._codec = codec
        self._pulling = make_pulling(context, self._pool, process, prefetch)

    @property
    def sync(self) -> SyncPoolWorker[T]:
        """The blocking half, for threads without an event loop."""
        return SyncPoolWorker(self, self._context.background)

    async def __aenter__(self) -> Self:
        """Join the pool. Raises `Conflict` when a live worker has this id."""
        await self._pulling.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._pulling.close()

    @property
    def slots(self) -> list[int]:
        """The slots that this worker owns at this moment."""
        member = self._pulling.member
        return [] if member is None else sorted(member.owned)

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Publish other metadata of this worker; a pool with its own `assign` places its keys again.

        Args:
            metadata: A JSON object, which `assign` gets.
        """
        check_mapping("metadata", metadata, '{"clients": ["ada"]}')
        if (member := self._pulling.member) is not None:
            await member.set_metadata(metadata)

    def jobs(self) -> AsyncIterator[PulledJob[T]]:
        """The jobs of the keys that this worker owns, as they arrive, one of each key at a time.

        The iteration goes on after a request that was cancelled, as by a time limit, or interrupted.

        Raises:
            Conflict: This worker was declared dead, and another one has its id now.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it.
        """
        return Iteration(self._next)

    async def _next(self) -> PulledJob[T]:
        if self._pulling.member is None:
            raise InvalidInput(f"worker {self.id} is not in its pool", hint="Use it in: async with pool.worker(...) as worker:")
        while (pulled := await self._pulling.next()) is not None:
            try:
                job = self._given(pulled)
            except Exception as error:
                # As with a handler; the key must not wait for it.
                pulled.quarantine(f"its payload cannot be read: {getattr(error, 'message', error)}")
                continue
            return job
        raise StopAsyncIteration

    def _given(self, pulled: Pulled) -> PulledJob[T]:
        claimed = pulled.claimed
        job = PulledJob(
            claimed.id,
            claimed.name,
            claimed.key,
            claimed.attempt,
            claimed.max_attempts,
            self._pool.sealer.codec(self._codec).load(claimed.data),
            claimed.created_at,
            pulled,
            claimed.snoozes,
            claimed.traceparent,
        )
        job._background = self._context.background
        job._pulled = pulled
        return job
