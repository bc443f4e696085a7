"""Starts, stops and shows the standing jobs of a pool, from any process. `standing_executor.py` runs them in workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from penstock.core.serialization import load_json
from penstock.errors import JobFailed
from penstock.jobs.job_type import JobType
from penstock.pools import queries as pools
from penstock.pools import views as pool_views
from penstock.pools.models import StandingState
from penstock.pools.sealed_standing import SealedStanding
from penstock.postgres.database import Database

_PAGE = 1_000


class StandingControl:
    """What a program does with the standing jobs of one pool. Payloads and messages are JSON text, encrypted here if the pool is.

    Args:
        type: Job type of the pool.
    """

    def __init__(self, type: JobType[Any]) -> None:
        self._type = type
        self._name = type.name

    @property
    def _sealed(self) -> SealedStanding:
        return SealedStanding(self._name, self._type.sealer())

    async def start(self, key: str, text: str, replace: bool, timeout: timedelta | None) -> str:
        """See `Pool.start`."""
        database = await self._declared()
        if self._sealed.encrypted:
            present = await pool_views.standing_jobs(database, self._name, key=key)
            stored = present[0].data if present else None
            # A payload from before the pool was encrypted is replaced by its envelope.
            replace = replace or (stored is not None and stored == load_json(text))
            text = self._sealed.payload(key, text, stored)
        outcome = await pools.start_standing(database, self._name, key, text, replace=replace)
        if timeout is None:
            return outcome
        pause = 0.01
        async with asyncio.timeout(timeout.total_seconds()):
            while not await self._runs(database, key):
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 0.5)
        return "started" if outcome == "starting" else outcome

    async def _runs(self, database: Database, key: str) -> bool:
        """Whether the start side of a standing job has succeeded. Raises `JobFailed`."""
        found = [self._sealed.opened(job) for job in await pool_views.standing_jobs(database, self._name, key=key)]
        if not found or not found[0].wanted:
            raise JobFailed(f"standing job {key} of pool {self._name} was stopped meanwhile")
        job = found[0]
        if job.running_by is not None:
            return job.entered_at is not None
        if job.error is not None:
            what = f"{job.error.get('type')}: {job.error.get('message')}"
            raise JobFailed(f"standing job {key} of pool {self._name} failed: {what}")
        return False

    async def stop(self, key: str) -> bool:
        """See `Pool.stop`."""
        return await pools.stop_standing(await self._declared(), self._name, key)

    async def notify(self, key: str, text: str) -> None:
        """See `Pool.notify`."""
        sealed = self._sealed.message(key, text)
        await pools.notify_standing(await self._declared(), self._name, key, sealed)

    async def reconcile(self, texts: Mapping[str, str]) -> tuple[int, int, int]:
        """See `Pool.reconcile`."""
        database = await self._declared()
        sealed = self._sealed
        if sealed.encrypted:
            present = {job.key: job.data for job in await self._stored(database)}
            texts = {key: sealed.payload(key, text, present.get(key)) for key, text in texts.items()}
        return await pools.reconcile_standing(database, self._name, texts)

    async def all(self) -> list[StandingState]:
        """See `Pool.standing_jobs`."""
        sealed = self._sealed
        return [sealed.opened(job) for job in await self._stored(await self._type.context.database())]

    async def _stored(self, database: Database) -> list[StandingState]:
        found: list[StandingState] = []
        while True:
            after = found[-1].key if found else None
            page = await pool_views.standing_jobs(database, self._name, after=after, limit=_PAGE)
            found += page
            if len(page) < _PAGE:
                return found

    async def _declared(self) -> Database:
        await self._type.ensure(again=False)
        return await self._type.context.database()
