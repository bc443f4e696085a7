"""The pull worker of a pool: the program asks for jobs and settles them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.core.blocking import BackgroundLoop
from penstock.core.checks import check_mapping
from penstock.core.encryption import no_key
from penstock.core.serialization import Codec, dump_json, plain_text
from penstock.core.user_code import message_of
from penstock.errors import InvalidInput, Snooze
from penstock.groups.membership import Membership
from penstock.jobs import queries as jobs
from penstock.jobs.handler import Job
from penstock.jobs.models import Delivery, Outcome
from penstock.pools.service import new_member_id
from penstock.pools.worked import WorkedPool
from penstock.postgres.context import Context
from penstock.worker.completer import Completer
from penstock.worker.external_executor import ExternalExecutor, Pulled
from penstock.worker.results import Results
from penstock.worker.sync import SyncPoolWorker, SyncPulledJob
from penstock.worker.worker import Worker

T = TypeVar("T")
_LONGEST_ERROR = 2_000


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

    def __init__(self, context: Context, pool: WorkedPool, codec: Codec[T], id: str | None, prefetch: int) -> None:
        if prefetch < 1:
            raise InvalidInput(f"prefetch must be at least 1, not {prefetch}")
        self._process = new_member_id()
        self.id = id or f"{self._process}.p1"
        self._context = context
        self._pool = replace(pool, member=self.id)
        self._codec = codec
        self._prefetch = prefetch
        self._executor: ExternalExecutor | None = None
        self._worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None

    @property
    def sync(self) -> SyncPoolWorker[T]:
        """The blocking half, for threads without an event loop."""
        return SyncPoolWorker(self, self._context.background)

    async def __aenter__(self) -> Self:
        """Join the pool. Raises `Conflict` when a live worker has this id."""
        database = await self._context.database()
        results = Results(Completer(database))
        self._executor = ExternalExecutor(database, results, self._prefetch, self._pool.sealer)
        worker = self._worker = Worker(
            database,
            {},
            self._context.settings,
            [self._pool],
            process=self._process,
            executor=self._executor,
            results=results,
            keyring=self._context.keyring,
        )
        working = self._working = asyncio.create_task(worker.run(), name=f"penstock-worker-of-{self._pool.name}")
        starting = asyncio.create_task(worker.started())
        try:
            await asyncio.wait([working, starting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            raise
        finally:
            starting.cancel()
        if working.done():
            working.result()
        if self._pool.sealer.locked:
            await self.__aexit__(None, None, None)
            raise no_key(f"pool {self._pool.name}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._worker is not None and self._executor is not None and self._working is not None  # noqa: S101
        self._executor.release_all()
        self._worker.stop()
        # `jobs` has raised the error that ended it.
        await asyncio.gather(self._working, return_exceptions=True)

    @property
    def slots(self) -> list[int]:
        """The slots that this worker owns at this moment."""
        return sorted(self._member.owned) if self._worker is not None else []

    async def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Publish other metadata of this worker; a pool with its own `assign` places its keys again.

        Args:
            metadata: A JSON object, which `assign` gets.
        """
        check_mapping("metadata", metadata, '{"clients": ["ada"]}')
        if self._worker is not None:
            await self._member.set_metadata(metadata)

    async def jobs(self) -> AsyncIterator[PulledJob[T]]:
        """The jobs of the keys that this worker owns, as they arrive, one of each key at a time.

        Raises:
            Conflict: This worker was declared dead, and another one has its id now.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it.
        """
        executor, working = self._executor, self._working
        if executor is None or working is None:
            raise InvalidInput(f"worker {self.id} is not in its pool", hint="Use it in: async with pool.worker(...) as worker:")
        while True:
            while (pulled := executor.next()) is not None:
                if not await self._begun(executor, pulled):
                    continue
                try:
                    job = self._given(pulled)
                except Exception as error:
                    # As with a handler; the key must not wait for it.
                    problem = f"its payload cannot be read: {getattr(error, 'message', error)}"
                    detail = pulled.sealed_error(jobs.quarantined_error(problem))
                    executor.finish(pulled, pulled.settlement(Outcome.QUARANTINED, detail))
                    continue
                yield job
            executor.arrived.clear()
            arrival = asyncio.create_task(executor.arrived.wait())
            try:
                await asyncio.wait([arrival, working], return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrival.cancel()
            if working.done():
                working.result()
                return

    @property
    def _member(self) -> Membership:
        assert self._worker is not None  # noqa: S101
        return self._worker.pools[0].member

    async def _begun(self, executor: ExternalExecutor, pulled: Pulled) -> bool:
        """Write of a job that may be started only once that it begins. False: it may not, and is handed back."""
        if self._pool.declared.delivery is not Delivery.AT_MOST_ONCE:
            return True
        begun = False
        try:
            begun = bool(await jobs.begin(executor.database, [pulled.job.id], [pulled.lease])) and pulled.may_start()
        finally:
            if not begun:
                executor.finish(pulled, pulled.settlement(Outcome.RELEASED))
        return begun

    def _given(self, pulled: Pulled) -> PulledJob[T]:
        claimed = pulled.job
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
        )
        job._background = self._context.background
        job._pulled = pulled
        return job
