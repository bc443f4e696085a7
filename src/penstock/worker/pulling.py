"""A worker whose jobs a program pulls: the ordinary `Worker` of one pool, with an executor that gives the jobs to the program.

`pools/pull_worker.py` is what the program holds.
"""

from __future__ import annotations

import asyncio

from penstock.core import measuring
from penstock.core.encryption import no_key
from penstock.groups.membership import Membership
from penstock.jobs import claim_queries
from penstock.jobs.models import Outcome
from penstock.jobs.options import Delivery
from penstock.pools.worked import WorkedPool
from penstock.postgres.context import Context
from penstock.worker.completer import Completer
from penstock.worker.external_executor import ExternalExecutor, Pulled
from penstock.worker.results import Results
from penstock.worker.work import Work
from penstock.worker.worker import Worker


class PullingWorker:
    """A worker of one pool, whose jobs a program pulls. A `Pulling`.

    Args:
        context: Database, settings and keys of the application.
        pool: The pool, with the id of the member.
        process: Id of the process.
        prefetch: The largest number of jobs held at once.
    """

    def __init__(self, context: Context, pool: WorkedPool, process: str, prefetch: int) -> None:
        self._context = context
        self._pool = pool
        self._process = process
        self._prefetch = prefetch
        self._executor: ExternalExecutor | None = None
        self._worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None

    @property
    def member(self) -> Membership | None:
        """See `Pulling`."""
        return None if self._worker is None else self._worker.pools[0].member

    async def open(self) -> None:
        """See `Pulling`."""
        database = await self._context.database()
        results = Results(Completer(database, self._context.settings.code_version))
        tally = measuring.tally_of(database, [self._pool.name], self._context.settings.rates)
        self._executor = ExternalExecutor(database, results, self._prefetch, self._pool.sealer, tally)
        worker = self._worker = Worker(
            database,
            self._context.settings,
            Work(pools=[self._pool]),
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
            await self.close()
            raise no_key(f"pool {self._pool.name}")

    async def close(self) -> None:
        """See `Pulling`."""
        assert self._worker is not None and self._executor is not None and self._working is not None  # noqa: S101
        self._executor.release_all()
        self._worker.stop()
        # `next` has raised the error that ended it.
        await asyncio.gather(self._working, return_exceptions=True)

    async def next(self) -> Pulled | None:
        """See `Pulling`."""
        executor, working = self._executor, self._working
        assert executor is not None and working is not None  # noqa: S101
        while True:
            while (pulled := executor.next()) is not None:
                if await self._begun(executor, pulled):
                    return pulled
            executor.arrived.clear()
            arrival = asyncio.create_task(executor.arrived.wait())
            try:
                await asyncio.wait([arrival, working], return_when=asyncio.FIRST_COMPLETED)
            finally:
                arrival.cancel()
            if working.done():
                working.result()
                return None

    async def _begun(self, executor: ExternalExecutor, pulled: Pulled) -> bool:
        """Write of a job that may be started only once that it begins. False: it may not, and is handed back."""
        if self._pool.declared.delivery is not Delivery.AT_MOST_ONCE:
            return True
        begun = False
        try:
            begun = bool(await claim_queries.begin(executor.database, [pulled.claimed.id], [pulled.lease])) and pulled.may_start()
        finally:
            if not begun:
                executor.finish(pulled, pulled.settlement(Outcome.RELEASED))
        return begun
