"""The scheduler: it runs timers and cron schedules, with one task for each, so that a slow schedule delays no other.

A schedule that runs once across all workers is a row in the database. Where its runs are jobs, the first worker that finds it due
moves it to its next time and enqueues the run, in one transaction. Where it runs in place, that worker takes it, and no other
worker does until the run has ended or its worker has been silent for too long. The clock is the database's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.core.user_code import check_ran, contained, in_thread, is_async, message_of
from penstock.errors import NotFound, PenstockError
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notifications
from penstock.schedules import queries as schedules
from penstock.schedules.schedule import Schedule, Tick
from penstock.schedules.times import Every
from penstock.settings import Settings

log = get_logger("penstock.scheduler")
_LOOK_EVERY_S = 15.0
_NOTE_EVERY_S = 5.0
_BUSY_S = 0.05
# Clocks of two connections may differ a little.
_STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class _Ran:
    """The outcome of a run in place; `error` is JSON text, None for success."""

    at: datetime
    started_at: datetime
    finished_at: datetime
    error: str | None


class Scheduler:
    """Runs the schedules of one worker.

    Args:
        database: Database of the schedules.
        declared: Schedules to run.
        settings: Settings; `dead_after` is the silence after which another worker takes over a run in place.
        worker: Id of the worker.
    """

    def __init__(self, database: Database, declared: Sequence[Schedule], settings: Settings, worker: str) -> None:
        self._database = database
        self._declared = declared
        self._settings = settings
        self._worker = worker
        self._stopping = asyncio.Event()
        # Of each schedule that runs in place: set when a run was requested, and at the end.
        self._awake = {schedule.name: asyncio.Event() for schedule in declared if schedule.runs_as == "in-place"}
        self._ended = asyncio.Event()
        # The latest run, and the latest failed run, of each schedule with `per_worker`, until they are recorded.
        self._latest: dict[str, _Ran] = {}
        self._failed: dict[str, _Ran] = {}
        # Of each schedule that another application has declared with other times: those.
        self._outdated: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(max(len(declared), 1), thread_name_prefix="penstock-schedule")

    async def run(self) -> None:
        """Run the schedules until `stop`."""
        runs = {"job": self._run_jobs, "in-place": self._run_once, "per-worker": self._run_here}
        try:
            if not self._declared:
                await self._stopping.wait()
                return
            async with asyncio.TaskGroup() as recording:
                recorder = recording.create_task(self._record(), name="penstock-schedules")
                async with asyncio.TaskGroup() as group:
                    for schedule in self._declared:
                        group.create_task(runs[schedule.runs_as](schedule), name=f"penstock-schedule-{schedule.name}")
                    await self._stopping.wait()
                self._ended.set()
                await recorder
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Begin no further runs; `run` ends with the runs that are under way."""
        self._stopping.set()
        for awake in self._awake.values():
            awake.set()

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the requests for runs in place."""
        for name, awake in self._awake.items():
            notifications.wake(awake.set, Kind.SCHEDULE, Kind.CONNECTED, subject=name)

    async def _record(self) -> None:
        """Record at intervals that this worker declares the schedules, and the outcomes of their runs."""
        names = [schedule.name for schedule in self._declared]
        ended = False
        while True:
            try:
                for ran in (self._failed, self._latest):
                    for name, run in list(ran.items()):
                        del ran[name]
                        await schedules.note_run(
                            self._database, name, self._worker, run.at, run.started_at, run.finished_at, run.error
                        )
                await schedules.note(self._database, names)
            except PenstockError as error:
                log.warning("schedules_not_noted", error=error)
            if ended:
                return
            # A run is recorded soon after its end, but not each run of a schedule of every few milliseconds.
            ended = await wait_for_event(self._ended, random.uniform(0.8, 1.0) * _NOTE_EVERY_S)

    async def _run_here(self, schedule: Schedule) -> None:
        """Run a schedule with `per_worker`. Times that pass during a long run are skipped."""
        times = schedule.times
        base = due = times.after(datetime.now(UTC), datetime.now(UTC))
        declared = asyncio.create_task(self._declare_with_retry(schedule), name=f"penstock-schedule-{schedule.name}-declared")
        try:
            while True:
                # The wait is divided, since the clock may be set meanwhile and the machine may be suspended.
                while (left := (due - datetime.now(UTC)).total_seconds()) > 0:
                    if _stepped_back(schedule, left):
                        base = due = times.after(datetime.now(UTC), datetime.now(UTC))
                    elif await wait_for_event(self._stopping, min(left, _LOOK_EVERY_S)):
                        return
                if self._stopping.is_set():
                    return
                ran = await self._call(schedule, due, max(datetime.now(UTC) - due, timedelta(0)))
                self._latest[schedule.name] = ran
                if ran.error is not None:
                    self._failed[schedule.name] = ran
                due = times.after(max(datetime.now(UTC), due), base)
        finally:
            declared.cancel()
            await asyncio.gather(declared, return_exceptions=True)

    async def _run_jobs(self, schedule: Schedule) -> None:
        await self._declare_with_retry(schedule)
        busy_s, spec = _BUSY_S, schedule.times.spec
        while not self._stopping.is_set():
            try:
                due = await schedules.look(self._database, schedule.name)
                if due.spec != spec:
                    await self._wait_for_own_times(schedule, due.spec)
                elif _stepped_back(schedule, due.in_s):
                    await schedules.bring_forward(self._database, schedule.name, spec, due.at)
                elif due.in_s > 0:
                    await wait_for_event(self._stopping, min(due.in_s, _LOOK_EVERY_S * random.uniform(0.8, 1.0)))
                elif due.running:
                    # The run before has not ended.
                    await wait_for_event(self._stopping, busy_s)
                    busy_s = min(busy_s * 1.5, self._settings.poll_interval.total_seconds())
                else:
                    busy_s = _BUSY_S
                    run_at, next_at = schedule.decide(due.at, due.now)
                    key = None if run_at is None else schedule.key_of(run_at, due.now)
                    job = await schedules.enqueue_run(self._database, schedule.name, spec, due.at, run_at, next_at, key)
                    if run_at is None:
                        log.info("schedule_skipped", schedule=schedule.name, at=due.at)
                    elif job is not None:
                        log.debug("schedule_enqueued", schedule=schedule.name, at=run_at, job_id=str(job))
            except NotFound:
                await self._declare_with_retry(schedule)
            except PenstockError as error:
                await self._back_off(schedule, error)

    async def _run_once(self, schedule: Schedule) -> None:
        await self._declare_with_retry(schedule)
        awake, spec = self._awake[schedule.name], schedule.times.spec
        while not self._stopping.is_set():
            try:
                awake.clear()
                due = await schedules.take(self._database, schedule.name, spec, self._worker, self._settings.dead_after)
                if due.taken:
                    await self._take(schedule, due)
                    continue
                if due.spec != spec:
                    await self._wait_for_own_times(schedule, due.spec)
                    continue
                if _stepped_back(schedule, due.in_s):
                    await schedules.bring_forward(self._database, schedule.name, spec, due.at)
                    continue
                # A schedule that is due and not taken is running in another worker.
                pause = due.in_s if due.in_s > 0 else self._settings.poll_interval.total_seconds()
                if not self._stopping.is_set():
                    await wait_for_event(awake, min(pause, _LOOK_EVERY_S * random.uniform(0.8, 1.0)))
            except NotFound:
                await self._declare_with_retry(schedule)
            except PenstockError as error:
                await self._back_off(schedule, error)

    async def _declare_with_retry(self, schedule: Schedule) -> None:
        while not self._stopping.is_set():
            try:
                await declare(self._database, schedule)
                return
            except PenstockError as error:
                await self._back_off(schedule, error)

    async def _wait_for_own_times(self, schedule: Schedule, stored: str) -> None:
        """Wait, since another application has declared the schedule with other times, by which this one does not run it."""
        if self._outdated.get(schedule.name) != stored:
            self._outdated[schedule.name] = stored
            log.warning("schedule_declared_differently", schedule=schedule.name, declared=schedule.times.spec, stored=stored)
        await wait_for_event(self._stopping, _LOOK_EVERY_S * random.uniform(0.8, 1.0))

    async def _back_off(self, schedule: Schedule, error: PenstockError) -> None:
        log.warning("schedule_failed", schedule=schedule.name, error=error)
        await wait_for_event(self._stopping, random.uniform(0.5, 1.5))

    async def _take(self, schedule: Schedule, due: schedules.Due) -> None:
        run_for, next_at = (due.now, due.at) if due.requested else schedule.decide(due.at, due.now)
        if run_for is None:
            log.info("schedule_skipped", schedule=schedule.name, at=due.at)
            await schedules.end(self._database, schedule.name, self._worker, due.at, next_at)
            return
        call = asyncio.create_task(self._call(schedule, run_for, due.now - run_for))
        holding = asyncio.create_task(self._hold(schedule, due, call))
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            # The run did not end in time: the next worker that finds it due runs it again.
            call.cancel()
            await asyncio.wait([call])
            with suppress(PenstockError):
                await schedules.end(self._database, schedule.name, self._worker, due.at, due.at)
            raise
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        if call.cancelled():
            log.error("schedule_lost", schedule=schedule.name, at=due.at)
            return
        # The run started when it was taken, by the database's clock.
        error = call.result().error
        await schedules.end(self._database, schedule.name, self._worker, due.at, next_at, run_for, due.now, error)

    async def _hold(self, schedule: Schedule, due: schedules.Due, call: asyncio.Task[_Ran]) -> None:
        """Extend the run while it lasts; cancel it when another worker has taken it."""
        while True:
            await asyncio.sleep(self._settings.dead_after.total_seconds() / 3)
            if not await schedules.extend(self._database, schedule.name, self._worker, due.at, self._settings.dead_after):
                call.cancel()
                return

    async def _call(self, schedule: Schedule, at: datetime, late: timedelta) -> _Ran:
        """Call the function in place."""
        tick = Tick(schedule.name, schedule.times.local(at), late)
        signature = schedule.signature

        async def call(dependencies: Mapping[str, Any]) -> None:
            if is_async(signature.function):
                answer = await signature.call(tick, dependencies)
            else:
                answer = await in_thread(self._threads, signature.call, tick, dependencies)
            check_ran(answer, schedule.name)

        started_at = datetime.now(UTC)
        failed: str | None = None
        try:
            with contained():
                await (call({}) if schedule.around is None else schedule.around(tick, call))
        except Exception as error:
            # A failed run does not affect the next one.
            with suppress(Exception):
                log.exception("schedule_handler_failed", schedule=schedule.name, at=at)
            failed = orjson.dumps({"type": type(error).__qualname__, "message": message_of(error)}).decode()
        return _Ran(at, started_at, datetime.now(UTC), failed)


def _stepped_back(schedule: Schedule, due_in_s: float) -> bool:
    """Whether a timer is due later than an interval from now, which only a clock that was put back explains."""
    return isinstance(schedule.times, Every) and due_in_s > schedule.times.span.total_seconds() + _STEP_S


async def declare(database: Database, schedule: Schedule) -> None:
    """Create a schedule in the database, or begin it again when its times have changed."""
    now = await schedules.now(database)
    times = schedule.times
    await schedules.declare(database, schedule.name, times.kind, times.spec, times.after(now, now), schedule.runs_as)
