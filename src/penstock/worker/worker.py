"""One worker: it makes its parts, connects them, and starts and stops them.

A job goes from the fetcher to the executor to the completer; the result of a job in a pool passes its key queue. The parts are
tasks of the worker. When the worker is told to stop, the fetchers end first. It releases the jobs that have not started, gives
the running handlers the grace period, settles all results, and removes its row.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from penstock.core.encryption import Keyring
from penstock.core.logs import get_logger
from penstock.core.polling import Polling
from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.groups import heartbeat
from penstock.jobs import queries as jobs
from penstock.jobs.fetcher import Fetcher
from penstock.jobs.models import Settlement
from penstock.jobs.worked import WorkedType
from penstock.pools.service import PoolService, new_member_id
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notifications
from penstock.postgres.schema_watch import left_behind
from penstock.schedules.schedule import Schedule
from penstock.schedules.scheduler import Scheduler
from penstock.settings import Settings
from penstock.streams.consumer.consumer import Consumer
from penstock.streams.consumer.dispatcher import Halted
from penstock.worker import maintenance
from penstock.worker.completer import Completer
from penstock.worker.executor import Executor
from penstock.worker.heartbeat import WorkerHeartbeat
from penstock.worker.isolation import Isolation
from penstock.worker.leader import LeaderService, LeaderTask
from penstock.worker.locked_work import LockedWork
from penstock.worker.queue_source import QUIET_S, AdmissionControl, AdmitAll, QueueSource
from penstock.worker.registration import Registration
from penstock.worker.results import Results
from penstock.worker.roles import WorkerExecutor
from penstock.worker.shutdown import Shutdown

log = get_logger("penstock.worker")


@dataclass(frozen=True, slots=True)
class Progress:
    """How a worker advances.

    Attributes:
        idle_s: For how many seconds one of its claim loops, or the event loop, has made no progress.
        running: Whether it is registered and claims.
        stopping: Whether it has been told to stop.
        places: Of each kind of place those that are taken, and all.
    """

    idle_s: float
    running: bool
    stopping: bool
    places: dict[str, tuple[int, int]]


class Worker:
    """Runs the handlers of some job types until it is told to stop.

    Args:
        database: An open database.
        types: The job types with their handlers, by name.
        settings: Concurrency, intervals, grace period.
        pools: The pools to take part in.
        beside: Further loops by name, which run as long as the worker does.
        consumers: Members of consumer groups to run.
        schedules: Timers and cron schedules.
        process: Id of the worker, with which the ids of its members begin; None: a new one.
        dispatches: Whether the worker sends its jobs to another service. `types` are then those of the database, to which others
            may be added; each job is recorded as begun before it starts, and none runs alone.
        admission: Decides what may be claimed now; None: everything.
        before_stopping_handlers: Called with the executor when the grace period is over and handlers may still run.
        executor: Executor for the jobs of pools instead of the one that runs handlers; it passes its results to `results`.
        results: Receives results; None: new ones.
        lifespan: What is set up before the first handler and cleaned up after the last one.
        keyring: Keys of encrypted payloads; None: the worker has none.
        leader_tasks: Tasks of which one worker of all runs each.

    Attributes:
        consumers: Members of consumer groups that the worker runs.
        ended: The errors with which some of them ended.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        pools: Sequence[WorkedPool] = (),
        beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
        consumers: Sequence[Consumer[Any]] = (),
        schedules: Sequence[Schedule] = (),
        process: str | None = None,
        *,
        dispatches: bool = False,
        admission: AdmissionControl | None = None,
        before_stopping_handlers: Callable[[WorkerExecutor], Awaitable[None]] | None = None,
        executor: WorkerExecutor | None = None,
        results: Results | None = None,
        lifespan: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        keyring: Keyring | None = None,
        leader_tasks: Sequence[LeaderTask] = (),
    ) -> None:
        if not (types or pools or consumers or schedules or dispatches or leader_tasks):
            raise InvalidInput("there is nothing to work on", hint="Declare a handler with @app.job(...) first.")
        process = process or new_member_id()
        keyring = keyring or Keyring()
        self._database = database
        self._types = types
        self.consumers = consumers
        self._beside = beside or {}
        self._lifespan = lifespan
        self._dispatches = dispatches
        self._before_stopping_handlers = before_stopping_handlers
        self._shutdown = Shutdown(settings.shutdown_grace.total_seconds())
        self._running = asyncio.Event()
        self.ended: list[PenstockError] = []
        self._works_without_end = bool(types or pools or schedules or dispatches or leader_tasks)

        self.notifications = Notifications()
        self._listener = Listener(database, ["penstock"], self.notifications.dispatch)
        self._registration = Registration(
            database, settings, types, process, "dispatcher" if dispatches else "worker", self._listener
        )
        self._results = results or Results(Completer(database))
        self._completer = completer = self._results.completer
        keyed = {pool.name: pool.type for pool in pools if pool.type is not None}
        handlers = Executor(
            database,
            # The mapping itself: the types of a dispatcher are added to it later.
            {**types, **keyed} if keyed else types,
            settings,
            # Without pools no result has to look for its key queue.
            self._results.finish if keyed else completer.settle,
            completer.reports,
            begin_all=dispatches,
            may_start=self._registration.may_start,
        )
        self._executor: WorkerExecutor = executor or handlers
        # None: the worker claims in pools only.
        self._queues: Fetcher[QueueSource] | None = None
        if types or dispatches:
            queues = QueueSource(
                database, types, settings, self._registration, handlers, completer, admission or AdmitAll(), keyring
            )
            self._queues = Fetcher(queues, Polling(settings.poll_interval.total_seconds(), quiet_s=QUIET_S), asyncio.Lock())
        self.pools = [
            PoolService(
                database,
                pool,
                settings,
                self._executor if self._executor.runs_jobs_of(pool) else None,
                completer.settle,
                completer.unsettled_leases,
                pool.member or f"{process}.p{number}",
                keyring,
            )
            for number, pool in enumerate(pools, 1)
        ]
        self._fetchers: list[Fetcher[Any]] = [] if self._queues is None else [self._queues]
        self._fetchers += [pool.fetcher for pool in self.pools if pool.fetcher is not None]
        self._maintenance = maintenance.of(database, settings)
        self._locked = LockedWork(database, keyring, lambda: self.id)
        self._heartbeat = WorkerHeartbeat(
            database,
            settings,
            self._registration,
            types,
            # The types of a dispatcher are added later.
            lambda: {**types, **{pool.name: pool for pool in pools}},
            self._executor,
            self._queues,
            self._fetchers,
            self._maintenance,
            self._shutdown.requested.is_set,
            self._locked,
        )
        self._heartbeat_beside_loop = heartbeat.of(database, settings)
        self._isolation = Isolation(database, self._fetchers, settings, completer.drained, lambda: self.id, keyring)
        self._leaders = [
            LeaderService(database, task, settings, f"{process}.l{number}") for number, task in enumerate(leader_tasks, 1)
        ]
        self._scheduler = Scheduler(database, schedules, settings, process)
        self._connect()

    def _connect(self) -> None:
        """Connect the parts by their callbacks, and subscribe them to notifications."""
        for pool in self.pools:
            if pool.key_queues is not None:
                self._results.register(pool.key_queues)
        self._executor.on_room += [fetcher.room_made for fetcher in self._fetchers]
        self._completer.on_retried.append(self._maintenance.look)
        if self._queues is not None:
            self._completer.on_written.append(self._written)

        notifications = self.notifications
        notifications.wake(self.look, Kind.JOBS, Kind.PLACE, Kind.CONNECTED, Kind.LISTENING)
        if self._queues is not None:
            notifications.wake(self._maintenance.look, Kind.JOBS, Kind.CONNECTED)
        notifications.wake(self._full_scan, Kind.FULL_SCAN)
        notifications.wake(self._database.schema_changed.set, Kind.SCHEMA)
        self._heartbeat.subscribe(notifications)
        self._scheduler.subscribe(notifications)
        for pool in self.pools:
            pool.subscribe(notifications)
        for consumer in self.consumers:
            consumer.subscribe(notifications)
        for leader in self._leaders:
            leader.subscribe(notifications)
        parts: list[PoolService | Consumer[Any] | LeaderService] = [*self.pools, *self.consumers, *self._leaders]
        for part in parts:
            self._listener.add(f"penstock_{part.member.id}")

    @property
    def id(self) -> str:
        """The id of the worker, which changes when the worker was declared dead and registers again."""
        return self._registration.id

    @property
    def stopping(self) -> bool:
        """Whether the worker has been told to stop."""
        return self._shutdown.requested.is_set()

    def progress(self) -> Progress:
        """How the worker advances. May be called from any thread."""
        now = time.monotonic()
        idle_s = [now - fetcher.progressed_at for fetcher in self._fetchers]
        running = self._running.is_set()
        return Progress(
            max([self._heartbeat_beside_loop.idle_s, *idle_s]) if running else 0.0,
            running,
            self.stopping,
            self._executor.places,
        )

    def stop(self) -> None:
        """Stop in an orderly way; a second call stops at once, without waiting for handlers."""
        self._shutdown.stop()

    def retire(self) -> None:
        """Stop, and let running handlers take as long as they need; after a further `stop` they have the grace period."""
        self._shutdown.retire()

    async def started(self) -> None:
        """Wait until the worker is registered and claims."""
        await self._running.wait()

    async def run(self) -> None:
        """Work until `stop`.

        Raises:
            PenstockError: The database refuses the worker.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it; the worker has stopped.
            Conflict: A live worker of one of its pools has its id.
            Halted, NotFound: A consumer halted, or its stream was dropped. The other work continues until `stop`, or until none
                is left; the error is raised at the end.
        """
        async with self._lifespan():
            await self._run()

    async def _run(self) -> None:
        await self._prepare()
        tasks: list[asyncio.Task[None]] = []

        def start(name: str, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(part, name=f"penstock-{name}"))
            return tasks[-1]

        self._heartbeat_beside_loop.working_on = self._executor.in_loop
        self._heartbeat_beside_loop.keep(self._registration)
        fetching = None if self._queues is None else start("fetcher", self._queues.run())
        start("completer", self._completer.run())
        start("reports", self._completer.reports.run())
        start("executor", self._executor.run())
        start("maintenance", self._maintenance.run(self._wake))
        start("heartbeat", self._heartbeat.run())
        start("listener", self._listener.run())
        start("schema", self._watch_schema())
        if not self._dispatches:
            start("isolation", self._isolation.run())
        members = [start(f"pool-{pool.name}", pool.run()) for pool in self.pools]
        members += [start(f"consumer-{consumer.name}", self._consume(consumer)) for consumer in self.consumers]
        members += [start(f"leadership-{leader.name}", leader.run()) for leader in self._leaders]
        scheduling = start("scheduler", self._scheduler.run())
        for name, part in self._beside.items():
            start(name, part())
        self._running.set()
        try:
            await self._until_told_to_stop(tasks)
            await self._shut_down(fetching, [*members, scheduling], scheduling)
            if self.ended:
                raise self.ended[0]
        finally:
            self._heartbeat_beside_loop.leave(self._registration)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._executor.close()

    def work_on(self, types: Mapping[str, WorkedType]) -> None:
        """Work on these types, which have changed, from now on."""
        if self._queues is not None:
            self._queues.source.work_on(types)
        self.look()

    def look(self) -> None:
        """Jobs or places may have come: look for them."""
        if self._queues is not None:
            self._queues.wake()
            self._queues.room_made()

    def _wake(self) -> None:
        # Due jobs of any type and pool have become ready.
        for fetcher in self._fetchers:
            fetcher.wake()

    def _full_scan(self) -> None:
        if self._queues is not None:
            self._queues.source.full_scan()
            self._queues.wake()

    def _written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        # A limited type may have a place again.
        if self._queues is not None and self._queues.source.waits_for_places:
            self._queues.wake()

    async def _prepare(self) -> None:
        if not self._dispatches:
            for worked in self._types.values():
                options = worked.declared.as_json()
                worked.refresh(await jobs.declare_job_type(self._database, worked.name, options, retry=True))
        for pool in self.pools:
            await pool.join()
        await self._registration.register()
        await self._heartbeat.refresh()
        log.info("worker_started", worker=self.id, types=sorted(self._types), pools=[pool.name for pool in self.pools])
        for consumer in self.consumers:
            await consumer.declare()

    async def _until_told_to_stop(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._shutdown.requested.wait())
        try:
            done, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        for task in done:
            if task is not stopping:
                task.result()  # a part ends by itself only with an error

    async def _shut_down(
        self,
        fetching: asyncio.Task[None] | None,
        members: Sequence[asyncio.Task[None]],
        scheduling: asyncio.Task[None],
    ) -> None:
        log.info("worker_stopping", worker=self.id, in_flight=self._executor.in_flight)
        self._scheduler.stop()
        self._isolation.stop()
        if self._queues is not None and fetching is not None:
            await self._queues.stop(fetching)
        for pool in self.pools:
            pool.stop(self._shutdown.grace_s)
        for consumer in self.consumers:
            consumer.stop()
        for leader in self._leaders:
            leader.stop()
        self._executor.release_waiting()
        await self._shutdown.finished(self._executor, members)
        scheduling.cancel()
        if self._before_stopping_handlers is not None:
            await self._before_stopping_handlers(self._executor)
        await self._executor.stop_handlers()
        # If the database is unavailable now, other workers recover what is left when this one has become silent.
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(self._shutdown.leave_s):
                await self._completer.drained()
                await asyncio.wait(members)
                if self._queues is not None:
                    await jobs.release_unknown(self._database, self.id, self._queues.source.known_leases)
                await self._heartbeat.leave()
        log.info("worker_stopped", worker=self.id)

    async def _consume(self, consumer: Consumer[Any]) -> None:
        """Run a consumer. When it ends by itself, the other parts of the worker continue."""
        try:
            await consumer.run()
        except (Halted, NotFound) as error:
            log.error("consumer_ended", consumer=consumer.name, worker=self.id, error=error)
            self.ended.append(error)
            self._heartbeat.consumer_halted(consumer.name, error.message)
            if not self._works_without_end and len(self.ended) == len(self.consumers):
                self._shutdown.requested.set()
            await self._shutdown.requested.wait()

    async def _watch_schema(self) -> None:
        """Stop when a migration has made the schema one that this version cannot use."""
        error = await left_behind(self._database)
        log.error("schema_cannot_be_used", worker=self.id, error=error, hint=error.hint)
        self.ended.append(error)
        self._shutdown.requested.set()
        await asyncio.Event().wait()


def stop_on(worker: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Call `worker` (its `stop`) on SIGTERM and SIGINT."""
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker)
