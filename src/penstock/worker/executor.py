"""The executor: starts the handlers of claimed jobs, as many at once as each group has places, and hands results on.

Groups are where handlers run: the loop, threads, processes. Each has its places and its queue of claimed jobs that wait for
one. A job's handler runs in a task of its own, so that what it leaves in context variables ends with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import UUID

from pebble import ProcessPool

from penstock.core.logs import get_logger, hook_in
from penstock.core.serialization import dump_json
from penstock.core.user_code import call_plain
from penstock.errors import PenstockError
from penstock.jobs import queries as jobs
from penstock.jobs.handler import Group
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.jobs.worked import Held, WorkedType
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.outcomes import released, settlement_of, stopped
from penstock.worker.process import call_in_process
from penstock.worker.running import Running, job_of

log = get_logger("penstock.worker")
_LOOKAHEAD_S = 0.1
HANDLER_THREADS = "penstock-handler"


class Executor:
    """Runs handlers, each in a task of its own, as many at once as their group has places.

    Args:
        database: Database in which leases are extended.
        types: The job types with their handlers.
        settings: Places of each group.
        settle: Takes each result.
        report_progress: Takes each report of progress.
        begin_all: Whether each job is written as begun before it starts, not only one that may be started once.
        may_start: Whether this process still owns what it claimed for its queues.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        settle: Callable[[Settlement], None],
        report_progress: Callable[[UUID, Held, str], None],
        *,
        begin_all: bool = False,
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self.database = database
        self._begin_all = begin_all
        self._may_start = may_start
        # Those that have a place, and whose start is being written.
        self._beginning: list[tuple[Running, Group]] = []
        self._writing_begun: asyncio.Task[None] | None = None
        self.loop = asyncio.get_running_loop()
        self.report_progress = report_progress
        self._types = types
        self._settle = settle
        self.on_room: list[Callable[[], None]] = []
        """Called soon after places have come free."""
        self._room_told = False
        self._settings = settings
        self._places: dict[Group, int] = {
            "async": settings.concurrency,
            "thread": settings.threads,
            "process": settings.processes_for_handlers,
        }
        self._waiting: dict[Group, deque[Running]] = {"async": deque(), "thread": deque(), "process": deque()}
        self._busy: dict[Group, int] = dict.fromkeys(self._places, 0)
        self._done: dict[Group, int] = dict.fromkeys(self._places, 0)
        self._rate: dict[Group, float] = dict.fromkeys(self._places, 0.0)
        self._measured = time.monotonic()
        self._jobs: dict[UUID, Running] = {}
        self._leases: dict[int, int] = {}
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix=HANDLER_THREADS)
        self._pool: Any = None  # pebble.ProcessPool, whose methods are not all typed
        self._stopping = False

    @property
    def in_flight(self) -> int:
        """Claimed jobs that are not finished."""
        return len(self._jobs)

    def runs_jobs_of(self, pool: WorkedPool) -> bool:
        """See `WorkerExecutor`."""
        return pool.type is not None

    def in_loop(self) -> str | None:
        """See `WorkerExecutor`: job type and id, or the name of a task."""
        task = asyncio.current_task(self.loop)
        if task is None:
            return None
        for running in list(self._jobs.values()):
            if running.task is task:
                return f"{running.claimed.name} {running.claimed.id}"
        return task.get_name()

    def holds(self, id: str) -> bool:
        """See `WorkerExecutor`."""
        with suppress(ValueError):
            return UUID(id) in self._jobs
        return False

    def jobs_of(self, names: Collection[str]) -> list[UUID]:
        """See `WorkerExecutor`."""
        return [id for id, running in self._jobs.items() if running.claimed.name in names]

    def leases(self) -> list[int]:
        """Leases of the claimed jobs that are not finished."""
        return list(self._leases)

    def room(self, group: Group) -> int:
        """How many more jobs this process can start soon: free places, and what it gets through in a tenth of a second."""
        self._measure()
        ahead = min(int(self._rate[group] * _LOOKAHEAD_S), self._settings.claim_limit)
        wanted = self._places[group] + ahead
        have = self._busy[group] + len(self._waiting[group])
        room = wanted - have
        # Many small claims cost more than a few large ones: while there is enough to run, wait for a good part to be done.
        return room if have == 0 or room * 2 >= ahead else 0

    def submit(self, claimed: Iterable[ClaimedJob], now: float) -> None:
        """Take claimed jobs; `now` is the monotonic time before the claim."""
        for group in {self._take(job, now, self._may_start) for job in claimed}:
            self._fill(group)

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """Take one claimed job, `ahead` of those that wait for a place or behind them. `may_start` is asked at the last moment
        (a process can be stopped at any point); what may not start is handed back.
        """
        self._fill(self._take(job, claimed_at, may_start, ahead))

    def _take(self, job: ClaimedJob, now: float, may_start: Callable[[], bool], ahead: bool = False) -> Group:
        worked = self._types[job.name]
        limit = worked.time_limit(job.lease_s)
        running = Running(self, job, worked, limit, now + max(limit, job.lease_s * 0.9), may_start)
        self._jobs[job.id] = running
        self._leases[job.lease] = self._leases.get(job.lease, 0) + 1
        queue = self._waiting[worked.group]
        if ahead:
            queue.appendleft(running)
        else:
            queue.append(running)
        return worked.group

    def moved(self, running: Running, lease: int) -> None:
        """A job's lease was renewed under a new number."""
        self._forget_lease(running.lease)
        running.lease = lease
        self._leases[lease] = self._leases.get(lease, 0) + 1

    def cancel(self, id: UUID, reason: str = "cancelled") -> None:
        """Tell a job's handler to stop."""
        running = self._jobs.get(id)
        if running is None or running.reason is not None:
            return
        running.reason = reason
        group = running.worked.group
        if not running.started:
            self._finish(running, stopped(running))
        elif group == "async" or group == "process":
            self._interrupt(running)
        elif reason != "cancelled":
            # A thread cannot be ended: settle without it, and let its late result go.
            self._finish(running, stopped(running))

    async def run(self) -> None:
        """Watch the time limits until cancelled."""
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for running in [job for job in self._jobs.values() if job.deadline < now]:
                self.cancel(running.claimed.id, "time limit")

    def release_waiting(self) -> None:
        """Hand back what did not start."""
        self._stopping = True
        for queue in self._waiting.values():
            while queue:
                running = queue.popleft()
                if running.claimed.id in self._jobs:
                    self._finish(running, released(running))

    async def finished(self, grace: float | None) -> bool:
        """Wait until all handlers are done. False when the grace period (seconds; None: any time) was too short."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        return not self._jobs

    async def stop_handlers(self) -> None:
        """Cancel what still runs; what was interrupted goes back to the queue."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for id in list(self._jobs):
            self.cancel(id, "shutdown")
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        # A handler that swallows its cancellation is not waited for; its late result will not count.
        for running in list(self._jobs.values()):
            self._finish(running, stopped(running))

    def give_back(self, ids: Iterable[UUID]) -> None:
        """Hand back those that wait for a place."""
        for id in ids:
            running = self._jobs.get(id)
            if running is not None and not running.started:
                self.cancel(id, "moved")

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """These jobs belong to others now: stop without settling. Returns what still ends."""
        ending = []
        for id in lost:
            running = self._jobs.pop(id, None)
            if running is None:
                continue
            self._forget_lease(running.lease)
            running.reason = "lost"
            self._interrupt(running)
            if running.task is not None:
                ending.append(running.task)
        return ending

    def close(self) -> None:
        """End threads and processes without waiting for them."""
        if self._writing_begun is not None:
            self._writing_begun.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.stop()
            self._pool.join(timeout=5)

    def _fill(self, group: Group) -> None:
        queue = self._waiting[group]
        while queue and self._busy[group] < self._places[group] and not self._stopping:
            running = queue.popleft()
            if self._jobs.get(running.claimed.id) is not running:
                continue
            now = time.monotonic()
            if running.deadline - now < running.limit / 2:
                # It waited too long to have its time before the lease ends.
                self._finish(running, released(running))
                continue
            running.started = True
            running.deadline = min(running.deadline, now + running.limit)
            self._busy[group] += 1
            if self._begin_all or running.worked.once:
                self._beginning.append((running, group))
                if self._writing_begun is None or self._writing_begun.done():
                    self._writing_begun = self.loop.create_task(self._begin(), name="penstock-begin")
            else:
                running.task = self.loop.create_task(self._run(running, group))

    async def _begin(self) -> None:
        """Write that jobs are about to start, as many at once as came while the last ones were under way."""
        while self._beginning:
            batch, self._beginning = self._beginning, []
            begun: set[UUID] = set()
            try:
                ids, leases = [running.claimed.id for running, _ in batch], [running.lease for running, _ in batch]
                begun = await jobs.begin(self.database, ids, leases)
            except PenstockError as error:
                log.error("jobs_not_begun", jobs=len(batch), error=error)
            for running, group in batch:
                # What was lost or told to stop meanwhile does not start: its settlement says so, or is stale.
                if running.claimed.id in begun and running.reason is None and self._jobs.get(running.claimed.id) is running:
                    running.task = self.loop.create_task(self._run(running, group))
                else:
                    self._free(running, group, stopped(running))

    async def _run(self, running: Running, group: Group) -> None:
        # Of what happens once for each job as little as possible is a call of its own.
        claimed, worked = running.claimed, running.worked
        # A process can be stopped at any point: what it claimed may be another's by now.
        if time.monotonic() >= running.deadline or not running.may_start():
            self._free(running, group, stopped(running))
            return
        running.entered = True
        settlement: Settlement | None
        try:
            if group == "async":
                result = await worked.handler(job_of(running))
            else:
                result = await (self._in_thread(running) if group == "thread" else self._in_process(running))
            detail = dump_json(result, f"the result of {claimed.name}") if worked.keep_result and result is not None else None
            settlement = Settlement(claimed.id, claimed.attempts, running.lease, Outcome.SUCCEEDED, detail)
        except BaseException as error:
            # A handler that calls sys.exit(), or raises what is no Exception, ends its own job, not the worker.
            settlement = settlement_of(running, error)
        self._free(running, group, settlement)

    def _interrupt(self, running: Running) -> None:
        """Cancel the task of a job. One that is cancelled before its first step runs none of its own code, so that its place
        and its settlement cannot be left to it.
        """
        task = running.task
        if task is None:
            return
        if not running.entered and not task.cancelling():
            group = running.worked.group
            task.add_done_callback(lambda _: self._free(running, group, stopped(running)))
        task.cancel()

    def _free(self, running: Running, group: Group, settlement: Settlement | None) -> None:
        self._busy[group] -= 1
        self._done[group] += 1
        self._finish(running, settlement)
        self._fill(group)

    async def _in_thread(self, running: Running) -> Any:
        job = job_of(running)
        context = contextvars.copy_context()
        result, raised = await self.loop.run_in_executor(self._threads, context.run, call_plain, running.worked.handler, job)
        if raised is not None:
            raise raised
        return result

    async def _in_process(self, running: Running) -> Any:
        handler = running.worked.handler
        if self._pool is None:
            self._pool = ProcessPool(
                self._settings.processes_for_handlers, initializer=hook_in, context=multiprocessing.get_context("spawn")
            )
        limit = max(running.deadline - time.monotonic(), 0.1)
        future: Any = self._pool.schedule(
            call_in_process,
            args=[handler.__module__, handler.__qualname__, running.claimed],
            timeout=limit + 5,
        )
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            raise

    def _finish(self, running: Running, settlement: Settlement | None) -> None:
        if self._jobs.get(running.claimed.id) is not running:
            return
        del self._jobs[running.claimed.id]
        self._forget_lease(running.lease)
        if settlement is not None:
            self._settle(settlement)
        if not self._room_told:
            # Once for all that finish in this round of the loop.
            self._room_told = True
            self.loop.call_soon(self._tell_of_room)

    def _tell_of_room(self) -> None:
        self._room_told = False
        for tell in self.on_room:
            tell()

    def _forget_lease(self, lease: int) -> None:
        left = self._leases.get(lease, 0) - 1
        if left > 0:
            self._leases[lease] = left
        else:
            self._leases.pop(lease, None)

    def _measure(self) -> None:
        now = time.monotonic()
        span = now - self._measured
        if span < 0.05:
            return
        self._measured = now
        for group, done in self._done.items():
            self._rate[group] = 0.5 * self._rate[group] + 0.5 * done / span
            self._done[group] = 0
