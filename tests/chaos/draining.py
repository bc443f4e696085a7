"""The wait for the end of what a run has begun."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from penstock import Penstock, PenstockError

_MEASURE_EVERY_S = 1.0


async def until_over(over: Callable[[], Awaitable[bool]], measure: Callable[[], Awaitable[object]], stands_s: float) -> None:
    """Wait until everything is over, or until nothing has moved for some time: a busy machine is slow, but does not stand still.

    Args:
        over: Whether everything is over.
        measure: Measures how far it is; a `PenstockError` says nothing.
        stands_s: Seconds without another measure, after which what is left counts as stuck.
    """
    measured: object = None
    moved_at, measured_at = time.monotonic(), 0.0
    while not await over():
        now = time.monotonic()
        if now - moved_at > stands_s:
            return
        if now - measured_at > _MEASURE_EVERY_S:
            measured_at = now
            with suppress(PenstockError):
                if (far := await measure()) != measured:
                    measured, moved_at = far, time.monotonic()
        await asyncio.sleep(0.05)


async def until_jobs_are_over(app: Penstock, over: Callable[[], Awaitable[bool]], stands_s: float) -> None:
    """See `until_over`. What moves is the number of jobs that have ended."""

    async def ended() -> object:
        return await (await app.database()).fetchval("select count(*) from penstock.archived_jobs")

    await until_over(over, ended, stands_s)
