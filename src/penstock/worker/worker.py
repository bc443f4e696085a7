"""One worker process: its parts, its life, its heartbeat.

The parts are tasks of one group. When the worker is told to stop, the claimer ends first; what waits is handed back; what
runs gets the grace period; then everything is settled and the worker takes its leave.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

import structlog

from penstock.errors import InvalidInput, PenstockError
from penstock.postgres import jobs
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.worker.care import Care
from penstock.worker.claimer import Claimer
from penstock.worker.runner import Runner
from penstock.worker.settler import Settler
from penstock.worker.types import WorkedType

log = structlog.get_logger("penstock.worker")
_STALLED_S = 30.0


class Worker:
    """Runs the handlers of some job types until it is told to stop.

    Args:
        database: An open database.
        types: The job types with their handlers, by name.
        settings: Concurrency, intervals, grace period.
        beside: What else is to run, without an end, as long as the worker does.
    """

    def __init__(
        self,
        database: Database,
        types: Mapping[str, WorkedType],
        settings: Settings,
        beside: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] | None = None,
    ) -> None:
        if not types:
            raise InvalidInput("there is nothing to work on", hint="Declare a handler with @app.job(...) first.")
        self.id = ""
        self._database = database
        self._types = types
        self._settings = settings
        self._beside = beside or {}
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._running = asyncio.Event()

    def stop(self) -> None:
        """Stop in an orderly way; a second call: at once, without waiting for handlers."""
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def started(self) -> None:
        """Wait until the worker is registered and claims."""
        await self._running.wait()

    async def run(self) -> None:
        """Work until `stop`. Raises `PenstockError` when the database refuses the worker."""
        for worked in self._types.values():
            worked.refresh(await jobs.declare_job_type(self._database, worked.name, worked.declared.as_json(), retry=True))
        settler = Settler(self._database, retried=lambda: care.look())
        runner = Runner(
            self._database, self._types, self._settings, settler.settle, settler.progress, lambda: claimer.room_made()
        )
        claimer = Claimer(self._database, self._types, self._settings, runner, lambda: settler.leases)
        care = Care(self._database, self._settings, claimer.wake)
        await self._register(claimer)
        log.info("worker_started", worker=self.id, types=sorted(self._types))

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
        support("heartbeat", self._beat(claimer, runner, care))
        support("listener", self._listen(claimer, runner, care))
        for name, part in self._beside.items():
            support(name, part())
        self._running.set()
        try:
            stopping = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([stopping, *supporting], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            for task in done:
                if task in supporting:
                    task.result()  # a part never ends by itself but with an error
            await self._shut_down(claiming, runner, settler)
        finally:
            for task in supporting:
                task.cancel()
            await asyncio.gather(*supporting, return_exceptions=True)
            runner.close()

    async def _shut_down(self, claiming: asyncio.Task[None], runner: Runner, settler: Settler) -> None:
        log.info("worker_stopping", worker=self.id, in_flight=runner.in_flight)
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        runner.release_waiting()
        grace = asyncio.create_task(runner.finished(self._settings.shutdown_grace.total_seconds()))
        hurry = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait([grace, hurry], return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        grace.cancel()
        await runner.stop_handlers()
        limit = 2.0 if self._stop_now.is_set() else 15.0
        # If the database is away now, the others recover what is left when the heartbeat is missed.
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(limit):
                await settler.drained()
                await jobs.unregister_worker(self._database, self.id)
        log.info("worker_stopped", worker=self.id)

    async def _register(self, claimer: Claimer) -> None:
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
        self.id = claimer.worker = f"{host[:24]}.{os.getpid()}.{secrets.token_hex(3)}"
        await jobs.register_worker(
            self._database,
            self.id,
            list(self._types),
            host,
            os.getpid(),
            self._settings.concurrency,
            self._settings.dead_after,
        )

    async def _beat(self, claimer: Claimer, runner: Runner, care: Care) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval.total_seconds())
            stalled = time.monotonic() - claimer.progressed_at
            if stalled > _STALLED_S and not self._stop.is_set():
                log.error("claim_loop_stalled", for_s=round(stalled))
                continue
            try:
                state = "draining" if self._stop.is_set() else "running"
                beat = await jobs.heartbeat(self._database, self.id, runner.in_flight, state)
                if not beat.known:
                    # Others have its jobs already: what it still runs can no longer be settled.
                    log.error("worker_was_taken_for_dead", worker=self.id)
                    runner.abandon()
                    await self._register(claimer)
                    continue
                care.workers = beat.workers
                for id in beat.cancelled:
                    runner.cancel(id)
                for record in await jobs.job_types(self._database, list(self._types)):
                    self._types[record.name].refresh(record)
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error.message)

    async def _listen(self, claimer: Claimer, runner: Runner, care: Care) -> None:
        def heard(payload: str) -> None:
            word, _, rest = payload.partition(" ")
            if word == "cancel":
                runner.cancel(UUID(rest))
            elif word == "sweep":
                claimer.sweep()
            else:
                care.look()
                claimer.wake()

        # A worker that is taken for dead gets a new id, and with it a new channel.
        while True:
            id = self.id
            listening = asyncio.create_task(Listener(self._database, ["penstock", f"penstock_{id}"], heard).run())
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
