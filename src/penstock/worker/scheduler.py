"""The scheduler: runs timers and cron schedules, one task for each, so that a slow one delays no other.

A schedule that runs once across all workers is a row in the database; whoever sees first that it is due takes it, and nobody else
does until the run is over, or its worker is silent for too long. The clock is the database's.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from penstock.contained import contained, in_thread
from penstock.errors import NotFound, PenstockError
from penstock.logs import get_logger
from penstock.postgres import schedules
from penstock.postgres.database import Database
from penstock.schedule import Schedule, Tick
from penstock.settings import Settings
from penstock.waiting import happens

log = get_logger("penstock.scheduler")
_LOOK_EVERY_S = 15.0


class Scheduler:
    """Runs the schedules of one worker.

    Args:
        database: Where.
        declared: The schedules.
        settings: `dead_after`: after how much silence another worker takes a run over.
        worker: Who runs them.
    """

    def __init__(self, database: Database, declared: Sequence[Schedule], settings: Settings, worker: str) -> None:
        self._database = database
        self._declared = declared
        self._settings = settings
        self._worker = worker
        self._stopping = asyncio.Event()
        self._threads = ThreadPoolExecutor(max(len(declared), 1), thread_name_prefix="penstock-schedule")

    async def run(self) -> None:
        """Run the schedules until `stop`."""
        try:
            async with asyncio.TaskGroup() as group:
                for schedule in self._declared:
                    run = self._run_here(schedule) if schedule.per_worker else self._run_once(schedule)
                    group.create_task(run, name=f"penstock-schedule-{schedule.name}")
                await self._stopping.wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Begin no run any more; `run` ends when those under way do."""
        self._stopping.set()

    async def _run_here(self, schedule: Schedule) -> None:
        """Each worker for itself. Times that passed while a run took too long are skipped."""
        base = due = schedule.times.after(datetime.now(UTC), datetime.now(UTC))
        while True:
            # Not in one go: the clock may be set meanwhile, and the machine may sleep.
            while (left := (due - datetime.now(UTC)).total_seconds()) > 0:
                if await happens(self._stopping, min(left, _LOOK_EVERY_S)):
                    return
            if self._stopping.is_set():
                return
            await self._call(schedule, Tick(schedule.name, due, max(datetime.now(UTC) - due, timedelta(0))))
            due = schedule.times.after(max(datetime.now(UTC), due), base)

    async def _run_once(self, schedule: Schedule) -> None:
        await self._declare(schedule)
        while not self._stopping.is_set():
            try:
                due = await schedules.take(self._database, schedule.name, self._worker, self._settings.dead_after)
                if due.taken:
                    await self._take(schedule, due)
                    continue
                # Due and not taken: another runs it.
                pause = due.in_s if due.in_s > 0 else self._settings.poll_interval.total_seconds()
                await happens(self._stopping, min(pause, _LOOK_EVERY_S * random.uniform(0.8, 1.0)))
            except NotFound:
                await self._declare(schedule)
            except PenstockError as error:
                log.warning("schedule_failed", schedule=schedule.name, error=error)
                await happens(self._stopping, random.uniform(0.5, 1.5))

    async def _declare(self, schedule: Schedule) -> None:
        now = await schedules.now(self._database)
        first = schedule.times.after(now, now)
        await schedules.declare(self._database, schedule.name, schedule.times.kind, schedule.times.spec, first)

    async def _take(self, schedule: Schedule, due: schedules.Due) -> None:
        run_for, next_at = schedule.decide(due.at, due.now)
        if run_for is not None:
            call = asyncio.create_task(self._call(schedule, Tick(schedule.name, run_for, due.now - run_for)))
            holding = asyncio.create_task(self._hold(schedule, due, call))
            try:
                await asyncio.wait([call])
            except asyncio.CancelledError:
                # Not done in time: whoever looks next does it anew.
                call.cancel()
                await asyncio.wait([call])
                with suppress(PenstockError):
                    await schedules.end(self._database, schedule.name, self._worker, due.at, due.at, ran=False)
                raise
            finally:
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)
            if call.cancelled():
                log.error("schedule_lost", schedule=schedule.name, at=due.at)
                return
        else:
            log.info("schedule_skipped", schedule=schedule.name, at=due.at)
        await schedules.end(self._database, schedule.name, self._worker, due.at, next_at, ran=run_for is not None)

    async def _hold(self, schedule: Schedule, due: schedules.Due, call: asyncio.Task[None]) -> None:
        """Keep the run ours while it lasts; stop it when another has taken it."""
        while True:
            await asyncio.sleep(self._settings.dead_after.total_seconds() / 3)
            if not await schedules.extend(self._database, schedule.name, self._worker, due.at, self._settings.dead_after):
                call.cancel()
                return

    async def _call(self, schedule: Schedule, tick: Tick) -> None:
        arguments = (tick,) if schedule.takes_tick else ()
        try:
            with contained():
                if inspect.iscoroutinefunction(schedule.handler):
                    await schedule.handler(*arguments)
                else:
                    await in_thread(self._threads, schedule.handler, *arguments)
        except Exception:
            # The next time is due all the same.
            with suppress(Exception):
                log.exception("schedule_handler_failed", schedule=schedule.name, at=tick.at)
