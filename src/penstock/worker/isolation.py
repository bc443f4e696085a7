"""Isolation: runs jobs alone that were twice in progress when their worker was lost.

No process can tell which of the jobs in flight crashed a worker. After the second crash the database sets apart those that were
in flight (see `tables/0002_jobs.sql`), and no claim returns them. A worker that finds such jobs stops claiming, releases the jobs
that it has not started, waits until the running ones have ended and everything is settled, and runs the suspects one after the
other. A suspect that survives is settled as usual. One that crashes the process is archived as failed, with the reason
`quarantined`, by the worker that recovers it.

One worker in four does this at a time, for a few seconds or for as long as it took to become empty, and then works as usual for
at least as long, so that ordinary work continues. Standing jobs and consumers of streams continue meanwhile.

A worker whose handlers do not end in time leaves the suspects to another one. It waits for as long as the same suspect has been
the first, at least for a few seconds, and somewhat longer than it needed the last time. So the time that one worker spends in
vain counts for all of them, and while any of them makes progress, one with very long handlers wastes little.
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
    """A source of a fetcher whose jobs can be run alone."""

    @property
    def empty(self) -> bool:
        """Whether none of the jobs that it claimed is in flight or unsettled."""

    def types_apart(self) -> Sequence[str]:
        """The job types whose jobs it may run alone."""

    async def next_alone(self) -> UUID | None:
        """The job that waits to run alone and that it would claim first; None: there is none that it may run now."""

    def hand_back(self) -> None:
        """Release the claimed jobs that have not started."""

    async def claim_alone(self) -> ClaimedJob | None:
        """Claim one job that waits to run alone, and start it."""


class Isolation:
    """Runs jobs alone, in one process.

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

    def stop(self) -> None:
        """Begin no more jobs; a running one continues."""
        self._stopping.set()

    async def run(self) -> None:
        """Look for jobs that wait to run alone, until cancelled."""
        ordinary_until = 0.0
        while not await wait_for_event(self._stopping, self._interval * random.uniform(0.7, 1.3)):
            try:
                wait_s = await self._may_wait_s()
                if wait_s is not None and time.monotonic() >= ordinary_until and not self._stopping.is_set():
                    began = time.monotonic()
                    try:
                        await self._run_some(wait_s)
                    finally:
                        ordinary_until = 2 * time.monotonic() - began
            except PenstockError as error:
                log.warning("isolation_failed", error=error)

    async def _may_wait_s(self) -> float | None:
        """For how long the process may wait now until it is empty; None: no job waits that it may run alone."""
        names = [name for fetcher in self._fetchers for name in fetcher.source.types_apart()]
        first: list[UUID | None] = []
        if names and self._any_apart() and await claim_queries.are_apart(self._database, names, self._keys):
            first = [await fetcher.source.next_alone() for fetcher in self._fetchers]
        if first != self._first:
            self._first, self._first_since = first, time.monotonic()
        if not any(first):
            return None
        return min(max(self._wait_s, time.monotonic() - self._first_since), _LONGEST_WAIT_S)

    async def _run_some(self, wait_s: float) -> None:
        worker = self._worker()
        if not await claim_queries.isolate(self._database, worker, True):
            return
        try:
            async with AsyncExitStack() as stack:
                for fetcher in self._fetchers:
                    await stack.enter_async_context(fetcher.paused)
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
                while time.monotonic() < until and not self._stopping.is_set() and await self._run_one():
                    pass
        finally:
            await claim_queries.isolate(self._database, worker, False)

    async def _run_one(self) -> bool:
        for fetcher in self._fetchers:
            try:
                job = await fetcher.source.claim_alone()
            except NotFound:
                continue
            if job is not None:
                log.info("job_runs_alone", job_id=str(job.id), job_type=job.name)
                await self._emptied(None)
                return True
        return False

    async def _emptied(self, wait_s: float | None) -> bool:
        until = float("inf") if wait_s is None else time.monotonic() + wait_s
        while not all(fetcher.source.empty for fetcher in self._fetchers):
            if time.monotonic() >= until or self._stopping.is_set():
                return False
            now = time.monotonic()
            for fetcher in self._fetchers:
                fetcher.progressed_at = now
            await asyncio.sleep(_LOOK_S)
        await self._settled()
        return True
