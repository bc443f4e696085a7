"""One worker process: its parts, its life, its heartbeat.

The parts are tasks of one group. When the worker is told to stop, the claimer ends first; what waits is handed back; what
runs gets the grace period; then everything is settled and the worker takes its leave.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal
from uuid import UUID

from penstock.consuming.consumer import Consumer
from penstock.consuming.delivery import Halted
from penstock.errors import InvalidInput, NotFound, PenstockError
from penstock.job import Settlement
from penstock.logs import get_logger
from penstock.ownership import heartbeat
from penstock.ownership.member import monotonic
from penstock.postgres import jobs
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.schema_watch import left_behind
from penstock.schedule import Schedule
from penstock.settings import Settings
from penstock.waiting import happens
from penstock.worker.care import Care
from penstock.worker.claimer import Claimer
from penstock.worker.isolation import Fetches, Isolation
from penstock.worker.pool import PoolPart, RunnerOfPool, new_member_id
from penstock.worker.runner import Runner
from penstock.worker.scheduler import Scheduler
from penstock.worker.settler import Settler
from penstock.worker.types import WorkedPool, WorkedType

log = get_logger("penstock.worker")
_STALLED_S = 30.0
_FOR_EVER_S = 1e7
_CLAIM_S = 5.0
_FENCE_SHARE = 0.8


class Worker:
    """Runs the handlers of some job types until it is told to stop.

    Args:
        database: An open database.
        types: The job types with their handlers, by name.
        settings: Concurrency, intervals, grace period.
        pools: The pools to take part in.
        beside: What else is to run, without an end, as long as the worker does.
        consumers: Members of consumer groups to run.
        schedules: Timers and cron schedules.
        process: Its id, with which those of its members begin; None: a new one.
    """

    _types_may_come = False
    # A worker runs what it claims; a dispatcher sends it elsewhere. See `tables/0021_crashes.sql`.
    _holds_as: Literal["worker", "dispatcher"] = "worker"

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
    ) -> None:
        if not (types or pools or consumers or schedules or self._types_may_come):
            raise InvalidInput("there is nothing to work on", hint="Declare a handler with @app.job(...) first.")
        self.id = ""
        self._process = process or new_member_id()
        self._registrations = 0
        self._database = database
        self._types = types
        self._pools = pools
        self._consumers = consumers
        self._schedules = schedules
        self._settings = settings
        self._beside = beside or {}
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._retiring = asyncio.Event()
        self._hurry = asyncio.Event()
        self._running = asyncio.Event()
        self._scheduling: asyncio.Task[None] | None = None
        self._ended: list[PenstockError] = []
        # Consumers that have ended, with their errors; and under which id how many of them are in the worker's row.
        self._halted: dict[str, str] = {}
        self._noted = ("", 0)
        # Until when, by this process's clock, nobody else can take it for dead.
        self._fence_at = float("-inf")
        self._beat_now = asyncio.Event()
        self._leaving = False

    def stop(self) -> None:
        """Stop in an orderly way; a second call: at once, without waiting for handlers."""
        if self._retiring.is_set() and not self._hurry.is_set():
            self._hurry.set()
            return
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def retire(self) -> None:
        """Stop, and let what runs take as long as it needs; after a `stop` it has the usual time to end."""
        if not self._stop.is_set():
            self._retiring.set()
            self._stop.set()

    async def started(self) -> None:
        """Wait until the worker is registered and claims."""
        await self._running.wait()

    async def run(self) -> None:
        """Work until `stop`.

        Raises:
            PenstockError: The database refuses the worker.
            SchemaMismatch: A migration has changed the schema so that this version cannot work with it; the worker has stopped.
            Halted, NotFound: A consumer halted, or its stream was dropped. The other work goes on, until `stop` or when there is
                none; this is raised at the end.
        """
        self._loop = asyncio.get_running_loop()
        await self._prepare()
        parts: list[PoolPart] = []

        def settle(result: Settlement) -> None:
            for part in parts:
                if part.claimer is not None and part.claimer.lines.holds(result.id):
                    part.claimer.lines.finished(result)
                    return
            settler.settle(result)

        def written(results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
            claimer.places_freed()
            for part in parts:
                if part.claimer is not None:
                    part.claimer.lines.written(results, outcomes)

        def room_made() -> None:
            claimer.room_made()
            for part in parts:
                if part.claimer is not None:
                    part.claimer.room_made()

        settler = Settler(self._database, lambda: care.look(), written)
        keyed = {pool.name: pool.type for pool in self._pools if pool.type is not None}
        # Further types may come to self._types.
        types = {**self._types, **keyed} if keyed else self._types
        runner = Runner(
            self._database,
            types,
            self._settings,
            settle if self._pools else settler.settle,
            settler.progress,
            room_made,
            begin_all=self._holds_as == "dispatcher",
            may_start=self._may_start,
        )
        for number, pool in enumerate(self._pools, 1):
            runs = None if pool.type is None else RunnerOfPool(runner, pool.type.group)
            id = f"{self._process}.p{number}"
            part = PoolPart(self._database, pool, self._settings, runs, settler.settle, lambda: settler.leases, id)
            parts.append(part)
            await part.declare()
        claimer = Claimer(
            self._database,
            self._types,
            self._settings,
            runner,
            lambda: settler.leases,
            admit=self._admit,
            may_claim=self._may_start,
        )
        care = Care(self._database, self._settings, claimer.wake)
        await self._register(claimer)
        log.info("worker_started", worker=self.id, types=sorted(self._types), pools=[pool.name for pool in self._pools])

        for consumer in self._consumers:
            await consumer.declare()
        supporting: list[asyncio.Task[None]] = []

        def support(name: str, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            task = asyncio.create_task(part, name=f"penstock-{name}")
            supporting.append(task)
            return task

        claiming = support("claimer", claimer.run())
        support("settler", settler.run())
        support("progress", settler.run_progress())
        support("runner", runner.run())
        support("promotion", care.run_promotion())
        support("recovery", care.run_recovery())
        beside = heartbeat.of(self._database, self._settings)
        beside.working_on = runner.in_loop
        beside.keep(self)
        support("heartbeat", self._beat(claimer, runner, care))
        support("listener", self._listen(claimer, runner, care, parts))
        taking_part = [support(f"pool-{part.name}", part.run()) for part in parts]
        taking_part += [support(f"consumer-{consumer.name}", self._consume(consumer)) for consumer in self._consumers]
        fetchers: list[Fetches] = [claimer, *[part.claimer for part in parts if part.claimer is not None]]
        isolation = Isolation(self._database, fetchers, self._settings, settler.drained, lambda: self.id)
        if self._holds_as == "worker":
            support("isolation", isolation.run())
        support("streams", care.run_streams())
        support("schema", self._watch_schema())
        scheduler = Scheduler(self._database, self._schedules, self._settings, self.id)
        self._scheduling = support("scheduler", scheduler.run())
        taking_part.append(self._scheduling)
        for name, companion in self._companions(claimer, runner).items():
            support(name, companion)
        for name, start in self._beside.items():
            support(name, start())
        self._running.set()
        try:
            stopping = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([stopping, *supporting], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done:
                if task in supporting:
                    task.result()  # a part never ends by itself but with an error
            scheduler.stop()
            isolation.stop()
            await self._shut_down(claiming, claimer, runner, settler, parts, taking_part)
            if self._ended:
                raise self._ended[0]
        finally:
            beside.leave(self)
            for task in supporting:
                task.cancel()
            await asyncio.gather(*supporting, return_exceptions=True)
            runner.close()

    # What other kinds of workers do differently.

    async def _prepare(self) -> None:
        """Before the first claim: declare the types."""
        for worked in self._types.values():
            worked.refresh(await jobs.declare_job_type(self._database, worked.name, worked.declared.as_json(), retry=True))

    def _companions(self, claimer: Claimer, runner: Runner) -> dict[str, Coroutine[Any, Any, None]]:
        """Further tasks, by name, that live as long as the worker works."""
        return {}

    def _admit(self, names: list[str], limit: int) -> tuple[list[str], int]:
        """Before a claim: which of the types may be claimed now, and at most how many jobs."""
        return names, limit

    def _noticed(self, word: str, rest: str) -> bool:
        """A notification came. Returns whether it is dealt with; otherwise the worker looks for jobs."""
        return False

    async def _leave(self, runner: Runner) -> None:
        """The grace period is over; what still runs will be stopped."""

    async def _shut_down(
        self,
        claiming: asyncio.Task[None],
        claimer: Claimer,
        runner: Runner,
        settler: Settler,
        parts: Sequence[PoolPart],
        taking_part: Sequence[asyncio.Task[None]],
    ) -> None:
        log.info("worker_stopping", worker=self.id, in_flight=runner.in_flight)
        # A claim that is under way may still take jobs. Were its answer thrown away, they would count as lost with this worker.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLAIM_S), claimer.paused:
                claiming.cancel()
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        retiring = self._retiring.is_set()
        for part in parts:
            part.stop(_FOR_EVER_S if retiring else self._settings.shutdown_grace.total_seconds())
        for consumer in self._consumers:
            consumer.stop()
        runner.release_waiting()
        if retiring:
            await self._patiently(runner, taking_part)
        grace = asyncio.create_task(self._in_grace(runner, taking_part))
        hurry = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait([grace, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        grace.cancel()
        if self._scheduling is not None:
            self._scheduling.cancel()
        await self._leave(runner)
        await runner.stop_handlers()
        limit = 2.0 if self._stop_now.is_set() else 15.0
        # If the database is away now, the others recover what is left when the heartbeat is missed.
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(limit):
                await settler.drained()
                await asyncio.wait(taking_part)
                await jobs.release_unknown(self._database, self.id, claimer.known_leases)
                self._leaving = True
                await jobs.unregister_worker(self._database, self.id)
        log.info("worker_stopped", worker=self.id)

    async def _in_grace(self, runner: Runner, taking_part: Sequence[asyncio.Task[None]]) -> None:
        """Wait until what is in hand is done, jobs, events and runs of schedules alike, or the grace period is over."""
        seconds = self._settings.shutdown_grace.total_seconds()
        await asyncio.gather(runner.finished(seconds), asyncio.wait(taking_part, timeout=seconds))

    async def _patiently(self, runner: Runner, taking_part: Sequence[asyncio.Task[None]]) -> None:
        """Wait until everything in hand is done and every slot handed over, or until somebody wants the end."""

        async def done() -> None:
            await runner.finished(None)
            await asyncio.wait(taking_part)

        ends = [asyncio.create_task(done()), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def _consume(self, consumer: Consumer[Any]) -> None:
        """Run a consumer. One that ends by itself takes nothing else with it."""
        try:
            await consumer.run()
        except (Halted, NotFound) as error:
            log.error("consumer_ended", consumer=consumer.name, worker=self.id, error=error)
            self._ended.append(error)
            self._halted[consumer.name] = error.message
            self._beat_now.set()
            others = self._types or self._pools or self._schedules or self._types_may_come
            if not others and len(self._ended) == len(self._consumers):
                self._stop.set()
            await self._stop.wait()

    async def _watch_schema(self) -> None:
        """Stop when a migration has made the schema one that this version cannot use."""
        error = await left_behind(self._database)
        log.error("schema_cannot_be_used", worker=self.id, error=error, hint=error.hint)
        self._ended.append(error)
        self._stop.set()
        await asyncio.Event().wait()

    async def _register(self, claimer: Claimer) -> None:
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
        # Once it was taken for dead its old id is never heard of again.
        self._registrations += 1
        self.id = claimer.worker = self._process if self._registrations == 1 else f"{self._process}.{self._registrations}"
        sent_at = monotonic()
        await jobs.promise_to_begin(self._database, self.id, self._holds_as)
        await jobs.register_worker(
            self._database,
            self.id,
            list(self._types),
            host,
            os.getpid(),
            self._settings.concurrency,
            self._settings.dead_after,
        )
        self.kept(sent_at, self._settings.dead_after.total_seconds())

    # -- what the heartbeat's thread calls, see `heartbeat.Kept`

    @property
    def keep_s(self) -> float:
        """See `Kept`: the longest visibility timeout of what it works on; each lease ends by itself."""
        longest = [worked.declared.visibility_timeout for worked in list(self._types.values())]
        return max([self._settings.wedged_after, *longest]).total_seconds()

    def pulse(self) -> tuple[str, str, UUID] | None:
        """See `Kept`."""
        return ("", self.id, UUID(int=0)) if self.id else None

    def unknown(self) -> None:
        """See `Kept`: the loop's own heartbeat sees to it."""
        self._fence_at = float("-inf")
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._beat_now.set)

    def kept(self, sent_at: float, dead_after_s: float) -> None:
        """See `Kept`."""
        self._fence_at = max(self._fence_at, sent_at + dead_after_s * _FENCE_SHARE)

    def _may_start(self) -> bool:
        return monotonic() < self._fence_at

    async def _beat(self, claimer: Claimer, runner: Runner, care: Care) -> None:
        while True:
            await happens(self._beat_now, self._settings.heartbeat_interval.total_seconds())
            self._beat_now.clear()
            stalled = time.monotonic() - claimer.progressed_at
            if stalled > _STALLED_S and not self._stop.is_set():
                # It keeps what it has; that it claims nothing more is for people to see.
                log.error("claim_loop_stalled", for_s=round(stalled))
            try:
                sent_at = monotonic()
                state = "draining" if self._stop.is_set() else "running"
                beat = await jobs.heartbeat(self._database, self.id, runner.in_flight, state)
                if self._leaving:
                    return
                if not beat.known:
                    await self._begin_anew(claimer, runner)
                    continue
                self.kept(sent_at, self._settings.dead_after.total_seconds())
                await self._note_halted()
                care.workers = beat.workers
                for id in beat.cancelled:
                    runner.cancel(id)
                for record in await jobs.job_types(self._database, list(self._types)):
                    if record.name in self._types:
                        self._types[record.name].refresh(record)
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error)

    async def _note_halted(self) -> None:
        """Have it seen in the worker's row which consumers have ended: the worker lives, and looks well."""
        if self._noted == (self.id, len(self._halted)) or not self._halted:
            return
        for consumer, error in self._halted.items():
            await jobs.note_halted(self._database, self.id, consumer, error)
        self._noted = (self.id, len(self._halted))

    async def _begin_anew(self, claimer: Claimer, runner: Runner) -> None:
        """Others have its jobs. Those that it claimed since then nobody would miss: it stops them and hands them back."""
        log.error("worker_was_taken_for_dead", worker=self.id)
        async with claimer.paused:
            for id in runner.jobs_of(self._types):
                runner.cancel(id, "lost")
            await jobs.release_unknown(self._database, self.id, claimer.known_leases)
            await self._register(claimer)

    async def _listen(self, claimer: Claimer, runner: Runner, care: Care, parts: Sequence[PoolPart]) -> None:
        def heard(payload: str) -> None:
            word, _, rest = payload.partition(" ")
            if word in ("slots", "keys", "standing", "place", "connected"):
                for part in parts:
                    if word == "connected" or part.name == rest:
                        part.heard(word)
            for consumer in self._consumers:
                if word in ("connected", "events") or consumer.name == rest:
                    consumer.heard(word)
            if word in ("slots", "keys", "standing", "events", "moved"):
                return
            if word == "cancel":
                # Whoever may connect to the database can send notifications: ask it who is to be cancelled.
                if runner.holds(rest):
                    self._beat_now.set()
                    for part in parts:
                        part.heard(word)
            elif word == "place":
                claimer.wake()
            elif word == "sweep":
                claimer.sweep()
            elif word == "schema":
                self._database.schema_changed.set()
            elif not self._noticed(word, rest):
                care.look()
                claimer.wake()

        members = [*[part.member for part in parts], *[consumer.member for consumer in self._consumers]]
        # A worker that is taken for dead gets a new id, and with it a new channel.
        while True:
            id = self.id
            channels = ["penstock", *[f"penstock_{id}" for id in [id, *[member.id for member in members]]]]
            listening = asyncio.create_task(Listener(self._database, channels, heard).run())
            try:
                while id == self.id:
                    await asyncio.sleep(1.0)
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)


def stop_on(worker: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Call `worker` (its `stop`) on SIGTERM and SIGINT."""
    import signal

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker)
