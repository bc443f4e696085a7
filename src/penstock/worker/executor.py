"""The executor: starts the handlers of claimed jobs, as many at once as there are places, and passes results on.

The kind of a handler says where it runs: on the event loop, in a thread or in a process (`handler_calls.py`). Each kind, and each
type whose handler takes batches, has a lane: its places, which the types share, and the claimed jobs that wait for one
(`lanes.py`). Each handler runs in a task of its own, so that its context variables end with it.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.core.serialization import dump_json
from penstock.core.tally import Attempts
from penstock.core.tracing import Tracing
from penstock.core.user_code import check_ran, in_thread
from penstock.jobs.handler import set_current_job
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.jobs.steps import SuspensionCaught
from penstock.jobs.worked import WorkedType
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.worker.batches import Batcher
from penstock.worker.begin_recorder import BeginRecorder
from penstock.worker.finishing import Confirmer
from penstock.worker.handler_calls import HandlerCalls
from penstock.worker.lanes import Lane, Plan, Share, lanes_of
from penstock.worker.outcomes import finished, not_committed, released, settlement_of, stopped
from penstock.worker.reports import Reports
from penstock.worker.running import Running, job_of
from penstock.worker.step_results import NAMED, with_results
from penstock.worker.steps import StepRecorder
from penstock.worker.traced import run_traced

log = get_logger("penstock.worker")
_SUCCEEDED = Outcome.SUCCEEDED


class Executor:
    """Runs handlers, each in a task of its own, as many at once as its kind has places.

    Args:
        database: Database in which leases are extended.
        types: The job types with their handlers.
        settings: Places of each kind of handler.
        settle: Receives each result.
        reports: Receives what the jobs report.
        begin_all: Whether every job is recorded as begun before it starts, not only those of `at_most_once` types.
        may_start: Whether this process still owns the jobs that it claimed from queues.
        tracing: Spans of the handlers; None: they have none.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        settle: Callable[[Settlement], None],
        reports: Reports,
        *,
        begin_all: bool = False,
        may_start: Callable[[], bool] = lambda: True,
        tracing: Tracing | None = None,
    ) -> None:
        self.database = database
        self.confirmer = Confirmer(database)
        self.steps = StepRecorder(database)
        self._begin_all = begin_all
        self._may_start = may_start
        self.loop = asyncio.get_running_loop()
        self.reports = reports
        self._types = types
        self._settle = settle
        self.on_room: list[Callable[[], None]] = []
        """Called soon after places have become free."""
        self._room_told = False
        self._lanes: dict[str, Lane[Running]] = lanes_of(types, settings)
        self._most_claimed = settings.claim_limit
        self._calls = HandlerCalls(settings)
        self._threads = self._calls.threads
        self._batchers = {
            worked.name: Batcher(worked, worked.batch, self._calls.call_batch, tracing)
            for worked in types.values()
            if worked.batch is not None
        }
        self._recorder = BeginRecorder(database, self._recorded)
        self._jobs: dict[UUID, Running] = {}
        self._stopping = False
        # Where the times of attempts go; None: nothing measures.
        self._tally = measuring.tally_of(database, types, settings.rates)
        self._successes: dict[str, Attempts] = {}
        # How a job runs is decided once, so that a worker without traces has nothing to check for each.
        self._attempt: Callable[[Running], Coroutine[Any, Any, Settlement | None]] = (
            self._run if tracing is None else partial(run_traced, tracing, self._run)
        )
        # Of the worker itself: what a handler sets must not reach the handlers that start when it ends.
        self._context = contextvars.copy_context()

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Of each lane the places that are taken, and all."""
        return {name: (lane.busy, lane.places) for name, lane in self._lanes.items()}

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

    def leases(self) -> set[int]:
        """Leases of the claimed jobs that are not finished."""
        return {running.lease for running in self._jobs.values()}

    def room(self, name: str) -> int:
        """See `PoolExecutor`."""
        return self.plan([name], self._most_claimed).limit

    def found(self, name: str, more: bool) -> None:
        """See `PoolExecutor`."""
        if self._lane_of(name).share(name).note(more):
            self._made_room()

    def plan(self, names: Sequence[str], limit: int) -> Plan:
        """What to claim for these types, which have one lane, see `Lane.plan`."""
        return self._lane_of(names[0]).plan(names, limit)

    def looked(self, plan: Plan, found: Mapping[str, int]) -> None:
        """A claim by this plan found so many jobs of each type, which were submitted."""
        if plan.names and self._lane_of(plan.names[0]).looked(plan, found):
            self._made_room()

    def _lane_of(self, name: str) -> Lane[Running]:
        worked = self._types[name]
        return self._lanes[worked.kind if worked.batch is None else worked.lane]

    def submit(self, claimed: Iterable[ClaimedJob], now: float) -> None:
        """Accept claimed jobs; `now` is the monotonic time before the claim."""
        lanes: set[Lane[Running]] = set()
        jobs, may_start = self._jobs, self._may_start
        # Jobs of one lease that have no time limit of their own have the same times, which are computed once.
        lease = -1
        for job in claimed:
            if job.lease != lease or job.time_limit_s is not None:
                worked, share, limit, deadline = self._terms(job, now)
                lease = job.lease if job.time_limit_s is None else -1
                lanes.add(share.lane)
            jobs[job.id] = running = Running(self, job, worked, share, limit, deadline, may_start)
            share.waiting.append(running)
        for lane in lanes:
            self._fill(lane)

    def start(self, job: ClaimedJob, claimed_at: float, may_start: Callable[[], bool], ahead: bool) -> None:
        """Accept one claimed job, `ahead` of those of its type that wait for a place or behind them.

        `may_start` is called at the last moment, since a process can be suspended at any point; a job that may not start is
        released.
        """
        worked, share, limit, deadline = self._terms(job, claimed_at)
        self._jobs[job.id] = running = Running(self, job, worked, share, limit, deadline, may_start)
        if ahead:
            share.waiting.appendleft(running)
        else:
            share.waiting.append(running)
        self._fill(share.lane)

    def _terms(self, job: ClaimedJob, now: float) -> tuple[WorkedType, Share[Running], float, float]:
        """The type of a job, its share of a lane, the seconds that its handler may run, and when its lease is about to end."""
        worked = self._types[job.name]
        limit = worked.time_limit(job.lease_s) if job.time_limit_s is None else min(job.time_limit_s, job.lease_s)
        share = self._lanes[worked.kind if worked.batch is None else worked.lane].share(job.name)
        share.lane.queued[job.name] = share
        return worked, share, limit, now + max(limit, job.lease_s * 0.9)

    def cancel(self, id: UUID, reason: str = "cancelled") -> None:
        """Tell a job's handler to stop."""
        running = self._jobs.get(id)
        if running is None or running.reason is not None:
            return
        if running.finishing is not None and running.finishing.task is not None:
            # Its handler has ended, or is left alone: the transaction decides.
            return
        running.reason = reason
        kind = running.worked.kind
        if not running.started:
            self._finish(running, stopped(running))
        elif kind == "async" or kind == "process":
            self._interrupt(running)
        elif reason != "cancelled":
            # A thread cannot be cancelled: settle the job without it, and ignore its late result.
            self._finish(running, stopped(running))

    async def run(self) -> None:
        """Watch the time limits until cancelled."""
        self._context = contextvars.copy_context()
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for running in [job for job in self._jobs.values() if job.deadline < now]:
                self.cancel(running.claimed.id, "time limit")
            for lane in self._lanes.values():
                # A place was kept for a type for long enough.
                self._fill(lane)

    def release_waiting(self) -> None:
        """Release the jobs that have not started, and start no more."""
        self._stopping = True
        for lane in self._lanes.values():
            for share in list(lane.queued.values()):
                while share.waiting:
                    running = share.waiting.popleft()
                    if running.claimed.id in self._jobs:
                        self._finish(running, released(running))
            lane.queued.clear()

    async def finished(self, grace: float | None) -> bool:
        """Wait until all handlers are done. False when the grace period (seconds; None: any time) was too short."""
        deadline = time.monotonic() + (float("inf") if grace is None else grace)
        # A handler that finished its job itself is followed by the wait for its transaction.
        while tasks := self._unfinished_tasks():
            left = None if grace is None else max(deadline - time.monotonic(), 0.0)
            _, late = await asyncio.wait(tasks, timeout=left)
            if late:
                break
        return not self._jobs

    def _unfinished_tasks(self) -> list[asyncio.Task[Any]]:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        tasks += [
            job.finishing.task for job in self._jobs.values() if job.finishing is not None and job.finishing.task is not None
        ]
        return [task for task in tasks if not task.done()]

    async def stop_handlers(self) -> None:
        """Cancel the running handlers; interrupted jobs go back to the queue."""
        for id in list(self._jobs):
            self.cancel(id, "shutdown")
        await self.finished(1.0)
        # The executor does not wait for a handler that ignores its cancellation; its late result does not count.
        for running in list(self._jobs.values()):
            if running.finishing is not None:
                # Nothing can be said of it while its transaction is open: its lease ends, or it is finished.
                self._stop_waiting(running)
                self._finish(running, None)
            else:
                self._finish(running, stopped(running))

    @staticmethod
    def _stop_waiting(running: Running) -> None:
        if running.finishing is not None and running.finishing.task is not None:
            running.finishing.task.cancel()

    def give_back(self, ids: Iterable[UUID]) -> None:
        """Release those of the jobs that wait for a place."""
        for id in ids:
            running = self._jobs.get(id)
            if running is not None and not running.started:
                self.cancel(id, "moved")

    def abandon(self, lost: Iterable[UUID]) -> list[asyncio.Task[Any]]:
        """Stop jobs that belong to other workers now, without settling them. Returns the tasks that are still ending."""
        ending = []
        for id in lost:
            running = self._jobs.pop(id, None)
            if running is None:
                continue
            running.reason = "lost"
            self._interrupt(running)
            self._stop_waiting(running)
            if running.task is not None:
                ending.append(running.task)
        return ending

    def close(self) -> None:
        """End threads and processes without waiting for them."""
        self._recorder.close()
        self._calls.close()

    def _fill(self, lane: Lane[Running]) -> None:
        if not lane.queued or lane.busy >= lane.places or self._stopping:
            return
        now = time.monotonic()
        while dealt := lane.deal():
            for share, places in dealt:
                self._fill_share(share, places, now)

    def _fill_share(self, share: Share[Running], places: int, now: float) -> None:
        """Start waiting jobs of a type in at most so many places."""
        queue, lane = share.waiting, share.lane
        # The release of a job can start others of its key, in places that were dealt.
        while queue and places > 0 and lane.busy < lane.places:
            running = queue.popleft()
            if self._jobs.get(running.claimed.id) is not running:
                continue
            if running.deadline - now < running.limit / 2:
                # It waited so long that its lease would end before its time limit.
                self._finish(running, released(running))
                continue
            running.started = True
            running.since = now
            running.deadline = min(running.deadline, now + running.limit)
            lane.busy += 1
            share.busy += 1
            places -= 1
            if self._begin_all or running.worked.once:
                self._recorder.begin(running)
            else:
                running.task = self.loop.create_task(self._attempt(running), context=self._context.copy())
        if not queue:
            lane.queued.pop(share.name, None)

    def _recorded(self, running: Running, begun: bool) -> None:
        # A job that was lost or cancelled meanwhile does not start: its settlement reports that, or is stale.
        if begun and running.reason is None and self._jobs.get(running.claimed.id) is running:
            running.task = self.loop.create_task(self._attempt(running), context=self._context.copy())
        else:
            self._free(running, stopped(running))

    async def _run(self, running: Running) -> Settlement | None:
        # Written inline, since each call that is made once for each job costs measurable time.
        claimed, worked = running.claimed, running.worked
        # A process can be suspended at any point: another worker may have the job by now.
        if time.monotonic() >= running.deadline or not running.may_start():
            self._free(running, stopped(running))
            return None
        kind = worked.kind
        running.entered = True
        settlement: Settlement | None
        try:
            if NAMED in claimed.data:
                running.claimed = claimed = await with_results(self.database, claimed, worked)
            if kind == "process" and worked.around is None:
                result = await self._calls.in_process(running)
            else:
                job = job_of(running)
                set_current_job(job)
                if worked.batch is not None:
                    result = await self._batchers[worked.name].run(job, running.may_start)
                elif worked.around is not None:
                    result = await worked.around(job, partial(self._calls.call, running, job))
                elif kind == "async":
                    result = await worked.handler(job)
                else:
                    result = await in_thread(self._threads, worked.handler, job)
            if running.suspended is not None:
                raise SuspensionCaught(running.suspended)
            detail = None
            if result is not None:
                check_ran(result, claimed.name)
            if worked.keep_result and result is not None:
                detail = worked.sealed("result", claimed.id, dump_json(result, f"the result of {claimed.name}"))
            settlement = Settlement(claimed.id, claimed.attempt, running.lease, Outcome.SUCCEEDED, detail, None, claimed.name)
        except BaseException as error:
            # A handler that calls sys.exit(), or raises another BaseException, ends its own job, not the worker.
            settlement = settlement_of(running, error)
        # The context of the task refers to the job, and the job to its task: without the circle no collection has to find them.
        running.task = None
        self._free(running, settlement)
        return settlement

    def _interrupt(self, running: Running) -> None:
        """Cancel the task of a job. A task that is cancelled before its first step runs none of its code, so that it can neither
        free its place nor settle the job itself.
        """
        task = running.task
        if task is None:
            return
        if not running.entered and not task.cancelling():
            task.add_done_callback(lambda _: self._free(running, stopped(running)))
        task.cancel()

    def _free(self, running: Running, settlement: Settlement | None) -> None:
        share = running.share
        lane = share.lane
        lane.busy -= 1
        lane.done += 1
        share.busy -= 1
        if share.measure and running.entered:
            share.ran(time.monotonic() - running.since)
        if (tally := self._tally) is not None and running.entered and settlement is not None:
            claimed = running.claimed
            attempts = self._successes.get(claimed.name) if settlement.outcome is _SUCCEEDED else None
            if attempts is None:
                attempts = tally.attempts(claimed.name, settlement.outcome)
                if settlement.outcome is _SUCCEEDED:
                    self._successes[claimed.name] = attempts
            attempts.ended(claimed.run_after, claimed.created_at, running.since, time.monotonic())
        self._finish(running, settlement)
        if lane.queued and not self._room_told:
            self._made_room()

    def _finish(self, running: Running, settlement: Settlement | None) -> None:
        id = running.claimed.id
        if self._jobs.get(id) is not running:
            return
        if running.finishing is not None and settlement is not None and not settlement.written:
            if running.finishing.task is None:
                running.finishing.task = self.loop.create_task(self._confirm(running, settlement), name="penstock-confirm")
            return
        del self._jobs[id]
        if settlement is not None:
            if running.lines is not None:
                self.reports.log(id, running)
            self._settle(settlement)
        if not self._room_told:
            self._made_room()

    async def _confirm(self, running: Running, otherwise: Settlement) -> None:
        """Settle a job whose handler wrote of it in transactions of its own, when these have ended: as finished when one finished
        it, as what the handler did when not.
        """
        finishing = running.finishing
        assert finishing is not None  # noqa: S101
        gone = await self.confirmer.finished(running.claimed, finishing)
        if gone and finishing.finishes:
            if otherwise.outcome is not Outcome.SUCCEEDED:
                log.info(
                    "job_ended_after_finish", job_id=str(otherwise.id), job_type=running.claimed.name, outcome=otherwise.outcome
                )
            settlement = finished(running)
        else:
            uncommitted = finishing.finishes and otherwise.outcome is Outcome.SUCCEEDED
            settlement = not_committed(running) if uncommitted else otherwise
            finishing.rolled_back()
        running.finishing = None
        self._finish(running, settlement)

    def _made_room(self) -> None:
        """Start the next jobs soon: once for all jobs that finish in this iteration of the event loop."""
        self._room_told = True
        # Not in the context of the handler that has just ended: what follows is work of the process.
        self.loop.call_soon(self._tell_of_room, context=self._context)

    def _tell_of_room(self) -> None:
        self._room_told = False
        for lane in self._lanes.values():
            self._fill(lane)
        for tell in self.on_room:
            tell()
