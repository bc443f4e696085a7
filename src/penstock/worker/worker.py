"""One worker: it makes its parts, connects them, and starts and stops them.

A job goes from the fetcher to the executor to the completer; the result of a job in a pool passes its key queue. The parts are
tasks of the worker. When the worker is told to stop, the fetchers end first. It releases the jobs that have not started, gives
the running handlers the grace period, settles all results, and removes its row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Literal

from penstock.core import measuring
from penstock.core.encryption import Keyring
from penstock.core.garbage_collection import fewer_collections
from penstock.core.logs import get_logger
from penstock.core.polling import ANNOUNCE_EVERY_S, Polling
from penstock.core.tracing import Tracing
from penstock.errors import NotFound, PenstockError
from penstock.groups import heartbeat
from penstock.jobs import claim_queries, type_queries, workflow_ticks
from penstock.jobs.fetcher import Fetcher
from penstock.jobs.worked import WorkedType
from penstock.pools.service import PoolService, new_member_id
from penstock.pools.worked import WorkedPool
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notifications
from penstock.postgres.schema_watch import left_behind
from penstock.schedules.scheduler import Scheduler
from penstock.settings import Settings
from penstock.streams.consumer.consumer import Consumer
from penstock.streams.consumer.dispatcher import Halted
from penstock.worker import maintenance
from penstock.worker.completer import Completer
from penstock.worker.executor import Executor
from penstock.worker.fetchers import Fetchers
from penstock.worker.heartbeat import WorkerHeartbeat
from penstock.worker.isolation import Isolation
from penstock.worker.leader import LeaderService
from penstock.worker.locked_work import LockedWork
from penstock.worker.progress import Progress
from penstock.worker.queue_source import QUIET_S, AdmissionControl, AdmitAll, QueueSource
from penstock.worker.rates import write_rates
from penstock.worker.registration import Registration
from penstock.worker.results import Results
from penstock.worker.roles import WorkerExecutor
from penstock.worker.shutdown import Shutdown
from penstock.worker.work import Work

log = get_logger("penstock.worker")


class Worker:
    """Runs the handlers of some job types until it is told to stop.

    Args:
        database: An open database.
        settings: Concurrency, intervals, grace period.
        work: What the worker works on.
        process: Id of the worker, with which the ids of its members begin; None: a new one.
        beside: Further loops by name, which run as long as the worker does.
        admission: Decides what may be claimed now; None: everything.
        before_stopping_handlers: Called with the executor when the grace period is over and handlers may still run.
        executor: Executor for the jobs of pools instead of the one that runs handlers; it passes its results to `results`.
        results: Receives results; None: new ones.
        lifespan: What is set up before the first handler and cleaned up after the last one.
        keyring: Keys of encrypted payloads; None: the worker has none.
        tracing: Spans of the handlers; None: they have none.

    Attributes:
        work: What the worker works on.
        ended: The errors with which some of its consumers ended.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        work: Work,
        *,
        process: str | None = None,
        beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
        admission: AdmissionControl | None = None,
        before_stopping_handlers: Callable[[WorkerExecutor], Awaitable[None]] | None = None,
        executor: WorkerExecutor | None = None,
        results: Results | None = None,
        lifespan: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        keyring: Keyring | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        if settings.otel_metrics:
            # Before the parts are made, which ask whether the process measures itself.
            measuring.measure()
        self.work = work
        self.ended: list[PenstockError] = []
        self._database = database
        self._settings = settings
        self._process = process or new_member_id()
        self._keyring = keyring or Keyring()
        self._tracing = tracing
        self._beside = beside or {}
        self._before_stopping_handlers = before_stopping_handlers
        self._lifespan = lifespan
        self._shutdown = Shutdown(settings.shutdown_grace.total_seconds())
        self._running = asyncio.Event()

        self.notifications = Notifications()
        self._listener = Listener(database, ["penstock"], self.notifications.dispatch)
        holds_as: Literal["worker", "dispatcher"] = "dispatcher" if work.dispatches else "worker"
        self._registration = Registration(database, settings, work, self._process, holds_as, self._listener)
        self._results = results or Results(Completer(database, settings.code_version))
        self._completer = self._results.completer
        handlers = self._make_executor()
        self._executor: WorkerExecutor = executor or handlers
        self.pools = [self._make_pool(pool, number) for number, pool in enumerate(work.pools, 1)]
        self._fetchers = Fetchers(self._make_fetcher(handlers, admission or AdmitAll()), self.pools)
        self._maintenance = maintenance.of(database, settings)
        self._locked = LockedWork(database, self._keyring, lambda: self.id, work.consumers)
        self._heartbeat = WorkerHeartbeat(
            database, settings, self._registration, work, self._executor, self._fetchers, self._maintenance,
            self._shutdown.requested.is_set, self._locked,
        )  # fmt: skip
        self._heartbeat_beside_loop = heartbeat.of(database, settings)
        self._isolation = Isolation(
            database, self._fetchers.all, settings, self._completer.drained, lambda: self.id, self._keyring,
            lambda: "apart" in self._maintenance.due,
        )  # fmt: skip
        self._leaders = [
            LeaderService(database, task, settings, f"{self._process}.l{number}")
            for number, task in enumerate(work.leader_tasks, 1)
        ]
        self._scheduler = Scheduler(database, work.schedules, settings, self._process)
        self._connect()

    def _make_executor(self) -> Executor:
        handled = self.work.handled
        return Executor(
            self._database,
            handled,
            self._settings,
            # Without pools no result has to look for its key queue.
            self._completer.settle if handled is self.work.types else self._results.finish,
            self._completer.reports,
            begin_all=self.work.dispatches,
            may_start=self._registration.may_start,
            tracing=self._tracing,
        )

    def _make_fetcher(self, executor: Executor, admission: AdmissionControl) -> Fetcher[QueueSource] | None:
        types = self.work.types
        if not (types or self.work.dispatches):
            return None
        queues = QueueSource(
            self._database, types, self._settings, self._registration, executor, self._completer, admission, self._keyring
        )
        poll_s = self._settings.poll_interval.total_seconds()
        return Fetcher(queues, Polling(poll_s, quiet_s=QUIET_S, announce_every_s=ANNOUNCE_EVERY_S), asyncio.Lock())

    def _make_pool(self, pool: WorkedPool, number: int) -> PoolService:
        return PoolService(
            self._database,
            pool,
            self._settings,
            self._executor if self._executor.runs_jobs_of(pool) else None,
            self._completer.settle,
            self._completer.unsettled_leases,
            pool.member or f"{self._process}.p{number}",
            self._keyring,
        )

    def _connect(self) -> None:
        """Connect the parts by their callbacks, and subscribe them to notifications."""
        for pool in self.pools:
            if pool.key_queues is not None:
                self._results.register(pool.key_queues)
        fetchers = self._fetchers
        self._executor.on_room += [fetcher.room_made for fetcher in fetchers.all]
        self._completer.on_retried.append(self._maintenance.look)
        if fetchers.queues is not None:
            self._completer.on_written.append(fetchers.written)

        notifications = self.notifications
        fetchers.subscribe(notifications)
        if fetchers.queues is not None:
            notifications.wake(self._maintenance.look, Kind.JOBS, Kind.CONNECTED)
            notifications.wake(partial(workflow_ticks.tell, self._database), Kind.WORKFLOWS)
        notifications.wake(self._database.schema_changed.set, Kind.SCHEMA)
        self._heartbeat.subscribe(notifications)
        self._scheduler.subscribe(notifications)
        for pool in self.pools:
            pool.subscribe(notifications)
        for consumer in self.work.consumers:
            consumer.subscribe(notifications)
        for leader in self._leaders:
            leader.subscribe(notifications)
        parts: list[PoolService | Consumer[Any] | LeaderService] = [*self.pools, *self.work.consumers, *self._leaders]
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

    @property
    def settled(self) -> int:
        """How many results of jobs it has written."""
        return self._completer.settled

    def progress(self) -> Progress:
        """How the worker advances. May be called from any thread."""
        running = self._running.is_set()
        return Progress(
            max([self._heartbeat_beside_loop.idle_s, *self._fetchers.idle_s()]) if running else 0.0,
            running,
            self.stopping,
            self._executor.places,
        )

    def started_by(self, supervisor: str) -> None:
        """Note the id of the supervisor that starts this process again when it ends. To be called before `run`."""
        self._registration.supervisor = supervisor

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
        tracing = nullcontext() if self._tracing is None else self._tracing.exporting()
        with fewer_collections():
            async with self._exported(), tracing, self._lifespan():
                await self._run()

    def _exported(self) -> AbstractAsyncContextManager[None]:
        if not self._settings.otel_metrics:
            return nullcontext()
        from penstock.worker.exported import exported

        return exported(self, self._database.url, self._settings)

    async def _run(self) -> None:
        await self._prepare()
        tasks: list[asyncio.Task[None]] = []

        def start(name: str, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.create_task(part, name=f"penstock-{name}"))
            return tasks[-1]

        self._heartbeat_beside_loop.working_on = self._executor.in_loop
        self._heartbeat_beside_loop.keep(self._registration)
        if not self.work.dispatches:
            await self._isolation.hold()
        fetching = None if self._fetchers.queues is None else start("fetcher", self._fetchers.queues.run())
        start("completer", self._completer.run())
        start("reports", self._completer.reports.run())
        start("executor", self._executor.run())
        start("maintenance", self._maintenance.run(self._fetchers.wake_all))
        start("heartbeat", self._heartbeat.run())
        start("listener", self._listener.run())
        start("schema", self._watch_schema())
        if not self.work.dispatches:
            start("isolation", self._isolation.run())
        members = [start(f"pool-{pool.name}", pool.run()) for pool in self.pools]
        members += [start(f"consumer-{consumer.name}", self._consume(consumer)) for consumer in self.work.consumers]
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
        self._fetchers.work_on(types)

    def look(self) -> None:
        """Jobs or places may have come: look for them."""
        self._fetchers.look()

    async def _prepare(self) -> None:
        if not self.work.dispatches:
            for worked in self.work.types.values():
                options = worked.declared.as_json()
                worked.refresh(await type_queries.declare_job_type(self._database, worked.name, options, retry=True))
        for pool in self.pools:
            await pool.join()
        # Whether a registration that was lost with its connection has been made is not known: the next one has another id.
        await self._database.retrying(self._registration.register)
        await self._database.retrying(self._heartbeat.refresh)
        log.info("worker_started", worker=self.id, types=sorted(self.work.types), pools=[pool.name for pool in self.pools])
        for consumer in self.work.consumers:
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
        queues = self._fetchers.queues
        if queues is not None and fetching is not None:
            await queues.stop(fetching)
        for pool in self.pools:
            pool.stop(self._shutdown.grace_s)
        for consumer in self.work.consumers:
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
                if queues is not None:
                    await claim_queries.release_unknown(self._database, self.id, queues.source.known_leases)
                await self._heartbeat.leave()
                if self._settings.rates:
                    await write_rates(self._database)
        log.info("worker_stopped", worker=self.id)

    async def _consume(self, consumer: Consumer[Any]) -> None:
        """Run a consumer. When it ends by itself, the other parts of the worker continue."""
        try:
            await consumer.run()
        except (Halted, NotFound) as error:
            log.error("consumer_ended", consumer=consumer.name, worker=self.id, error=error)
            self.ended.append(error)
            self._heartbeat.consumer_halted(consumer.name, error.message)
            if not self.work.without_end and len(self.ended) == len(self.work.consumers):
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
