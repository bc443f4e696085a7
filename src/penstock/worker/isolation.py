"""Isolation: tries jobs beside nothing else that were twice in progress when their worker was lost.

No process can tell which of the jobs in flight crashed a worker. After the second crash the database sets apart those that
were in flight (see `tables/0002_jobs.sql`), divides these suspects into trials, and no claim returns them. A worker that
finds such a trial stops claiming, releases the jobs that it has not started, waits until the running ones have ended and
everything is settled, and runs the suspects of the trial side by side. A suspect that survives is settled as usual. When the
process crashes, those that had not ended are divided again, until the one that ends its workers is alone.

A worker that starts looks for trials before it claims anything else, since it is empty. Of the idle workers all but one try
suspects at a time, of the others one in four, for a few seconds or for as long as it took to become empty; then a worker
works as usual for at least as long, so that ordinary work continues. Standing jobs and consumers of streams continue
meanwhile, but none of their suspects is on trial in the process.

A worker whose handlers do not end in time leaves the suspects to another one. It waits for as long as the same suspect has
been the first, at least for a few seconds, and somewhat longer than it needed the last time. So the time that one worker
spends in vain counts for all of them, and while any of them makes progress, one with very long handlers wastes little.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Protocol
from uuid import UUID

from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import NotFound, PenstockError
from penstock.groups.trials import Trials
from penstock.jobs import claim_queries
from penstock.jobs.fetcher import Fetcher, Source
from penstock.jobs.models import ClaimedJob
from penstock.postgres.database import Database
from penstock.settings import Settings

log = get_logger("penstock.isolation")
SESSION_S = 5.0
FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 3_600.0
_LOOK_S = 0.01


class RunsAlone(Source, Protocol):
    """A source of a fetcher whose jobs can be tried beside nothing else."""

    @property
    def empty(self) -> bool:
        """Whether none of the jobs that it claimed is in flight or unsettled."""

    def types_apart(self) -> Sequence[str]:
        """The job types whose suspects it may try."""

    async def next_alone(self) -> UUID | None:
        """The suspect that it would claim first; None: there is none that it may try now."""

    def hand_back(self) -> None:
        """Release the claimed jobs that have not started."""

    async def claim_alone(self) -> list[ClaimedJob]:
        """Claim the suspects of one trial, and start them. Returns them; none: there is no trial that may begin."""


class Isolation:
    """Runs the trials of one process.

    Args:
        database: Database to claim from.
        fetchers: All fetchers of this process.
        settings: Intervals.
        settled: Waits until all results are written.
        worker: Id of the worker's row.
        keyring: Keys of encrypted payloads.
        any_apart: Whether a job of any type may wait to run alone, as far as the maintenance knows.
    """

    def __init__(
        self,
        database: Database,
        fetchers: Sequence[Fetcher[RunsAlone]],
        settings: Settings,
        settled: Callable[[], Awaitable[None]],
        worker: Callable[[], str],
        keyring: Keyring,
        any_apart: Callable[[], bool],
    ) -> None:
        self._keys = keyring.ids or None
        self._database = database
        self._fetchers = fetchers
        self._interval = settings.maintenance_interval.total_seconds()
        self._settled = settled
        self._any_apart = any_apart
        self._worker = worker
        self._wait_s = FIRST_WAIT_S
        # The first of the suspects of each fetcher, and since when these have been the first.
        self._first: list[UUID | None] = []
        self._first_since = 0.0
        self._stopping = asyncio.Event()
        self._trials = Trials.of(database)
        self._held: AsyncExitStack | None = None

    def stop(self) -> None:
        """Begin no more trials; one that is under way continues."""
        self._stopping.set()

    async def hold(self) -> None:
        """Keep the fetchers from claiming before `run` has looked for a trial, which a worker that starts can begin at once."""
        self._held = await self._pause()

    async def run(self) -> None:
        """Look for suspects, at once and at intervals, until cancelled."""
        ordinary_until = 0.0
        while True:
            try:
                wait_s = await self._may_wait_s()
                if wait_s is not None and not self._stopping.is_set() and (self._empty or time.monotonic() >= ordinary_until):
                    began = time.monotonic()
                    try:
                        await self._run_some(wait_s)
                    finally:
                        ordinary_until = 2 * time.monotonic() - began
            except PenstockError as error:
                log.warning("isolation_failed", error=error)
            finally:
                await self._resume()
            if await wait_for_event(self._stopping, self._interval * random.uniform(0.7, 1.3)):
                return

    @property
    def _empty(self) -> bool:
        return all(fetcher.source.empty for fetcher in self._fetchers)

    async def _pause(self) -> AsyncExitStack:
        async with AsyncExitStack() as stack:
            for fetcher in self._fetchers:
                await stack.enter_async_context(fetcher.paused)
            return stack.pop_all()

    async def _resume(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()

    async def _may_wait_s(self) -> float | None:
        """For how long the process may wait now until it is empty; None: no job waits that it may run alone."""
        names = [name for fetcher in self._fetchers for name in fetcher.source.types_apart()]
        first: list[UUID | None] = []
        # Before its first claim a worker looks by itself: the maintenance does not know yet.
        looks = self._held is not None or self._any_apart()
        if names and looks and await claim_queries.are_apart(self._database, names, self._keys):
            first = [await fetcher.source.next_alone() for fetcher in self._fetchers]
        if first != self._first:
            self._first, self._first_since = first, time.monotonic()
        if not any(first):
            return None
        return min(max(self._wait_s, time.monotonic() - self._first_since), _LONGEST_WAIT_S)

    async def _run_some(self, wait_s: float) -> None:
        worker = self._worker()
        # While a standing job or an event is on trial in this process, its end would say nothing about a job.
        if not self._trials.begin(self):
            return
        try:
            if not await claim_queries.isolate(self._database, worker, True, self._empty):
                return
            try:
                self._held = self._held or await self._pause()
                for fetcher in self._fetchers:
                    fetcher.source.hand_back()
                began = time.monotonic()
                if not await self._emptied(wait_s):
                    log.info("isolation_put_off", waited_s=wait_s)
                    self._wait_s = FIRST_WAIT_S
                    return
                now = time.monotonic()
                took_s = now - began
                # The next time may take a little longer.
                self._wait_s = max(FIRST_WAIT_S, took_s * 1.5)
                until = now + max(SESSION_S, took_s)
                while time.monotonic() < until and not self._stopping.is_set() and await self._try_some():
                    pass
            finally:
                await self._resume()
                await claim_queries.isolate(self._database, worker, False)
        finally:
            self._trials.end(self, survived=False)

    async def _try_some(self) -> bool:
        for fetcher in self._fetchers:
            try:
                jobs = await fetcher.source.claim_alone()
            except NotFound:
                continue
            if jobs:
                log.info("suspects_on_trial", jobs=len(jobs), job_id=str(jobs[0].id), job_type=jobs[0].name)
                await self._emptied(None)
                return True
        return False

    async def _emptied(self, wait_s: float | None) -> bool:
        until = float("inf") if wait_s is None else time.monotonic() + wait_s
        while not self._empty:
            if time.monotonic() >= until or self._stopping.is_set():
                return False
            now = time.monotonic()
            for fetcher in self._fetchers:
                fetcher.progressed_at = now
            await asyncio.sleep(_LOOK_S)
        await self._settled()
        return True
