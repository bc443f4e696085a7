"""The scheduler: runs timers and cron schedules, one task for each, so that a slow one delays no other.

A schedule that runs once across all workers is a row in the database; whoever sees first that it is due takes it, and nobody else
does until the run is over, or its worker is silent for too long. The clock is the database's.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import structlog

from penstock.errors import PenstockError
from penstock.postgres import schedules
from penstock.postgres.database import Database
from penstock.schedule import Schedule, Tick
from penstock.settings import Settings

log = structlog.get_logger("penstock.scheduler")
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

    async def run(self) -> None:
        """Run the schedules until cancelled."""
        if not self._declared:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            for schedule in self._declared:
                run = self._run_here(schedule) if schedule.per_worker else self._run_once(schedule)
                group.create_task(run, name=f"penstock-schedule-{schedule.name}")

    async def _run_here(self, schedule: Schedule) -> None:
        """Each worker for itself. Times that passed while a run took too long are skipped."""
        base = due = schedule.times.after(datetime.now(UTC), datetime.now(UTC))
        while True:
            await asyncio.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
            await self._call(schedule, Tick(schedule.name, due, max(datetime.now(UTC) - due, timedelta(0))))
            due = schedule.times.after(max(datetime.now(UTC), due), base)

    async def _run_once(self, schedule: Schedule) -> None:
        now = await schedules.now(self._database)
        first = schedule.times.after(now, now)
        await schedules.declare(self._database, schedule.name, schedule.times.kind, schedule.times.spec, first)
        while True:
            try:
                due = await schedules.take(self._database, schedule.name, self._worker, self._settings.dead_after)
                if due.taken:
                    await self._take(schedule, due)
                    continue
                # Due and not taken: another runs it.
                pause = due.in_s if due.in_s > 0 else self._settings.poll_interval.total_seconds()
                await asyncio.sleep(min(pause, _LOOK_EVERY_S * random.uniform(0.8, 1.0)))
            except PenstockError as error:
                log.warning("schedule_failed", schedule=schedule.name, error=error.message)
                await asyncio.sleep(random.uniform(0.5, 1.5))

    async def _take(self, schedule: Schedule, due: schedules.Due) -> None:
        run_for, next_at = schedule.decide(due.at, due.now)
        if run_for is not None:
            call = asyncio.create_task(self._call(schedule, Tick(schedule.name, run_for, due.now - run_for)))
            holding = asyncio.create_task(self._hold(schedule, due, call))
            try:
                await asyncio.wait([call])
            finally:
                holding.cancel()
                call.cancel()
                await asyncio.gather(call, holding, return_exceptions=True)
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
            if inspect.iscoroutinefunction(schedule.handler):
                await schedule.handler(*arguments)
            else:
                await asyncio.to_thread(schedule.handler, *arguments)
        except Exception:
            # The next time is due all the same.
            with suppress(Exception):
                log.exception("schedule_handler_failed", schedule=schedule.name, at=tick.at)
