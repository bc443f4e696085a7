"""The downstream worker: sends jobs to a service over HTTP and waits for its callbacks.

It is an ordinary worker whose handler, for every job type, POSTs the job to `/v1/jobs/{name}/{id}` of the service. When the
service has the job, the handler waits as a suspended coroutine, without a thread or a connection. The callback goes to any
HTTP server, which settles the job by its attempt number and notifies this process once for each batch of callbacks. In case
notifications are lost, one query every two seconds looks up all jobs whose callbacks are expected.

What the answer of the service means:

* 2xx: the service has the job. When the connection breaks after the request was sent, or no answer comes in time, the service may
  have it: the handler waits, and does not send the attempt again.
* An error with the id `service_unavailable`: the handler sends again after 0.5, 1 and 2 seconds; then the attempt has failed.
* Any other error, or a service that cannot be reached: the attempt has failed.

Job types share the connections, and the places of jobs in flight: half of them are divided among the types, and the other half
goes to the types that need it. The worker claims a type while a connection is free for it. The time limit of a job begins when it
has a connection; a job that gets none is released unchanged.

Without a callback within the time limit of the type (5 minutes unless it is set), the attempt has failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from difflib import get_close_matches
from typing import Any
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.core.serialization import Codec
from penstock.core.tracing import Tracing
from penstock.errors import PenstockError
from penstock.integrations.rickover.service import DownstreamSettings, Service, Unavailable
from penstock.integrations.rickover.shares import Shares
from penstock.jobs import http_queries as http
from penstock.jobs import type_queries
from penstock.jobs.handler import Job
from penstock.jobs.options import Delivery
from penstock.jobs.records import JobTypeRecord
from penstock.jobs.worked import NotStarted, SettledElsewhere, WorkedType
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification
from penstock.settings import Settings
from penstock.worker import Work, Worker
from penstock.worker.progress import Progress
from penstock.worker.roles import WorkerExecutor
from penstock.worker.running import Running

log = get_logger("penstock.downstream")
_LOOK_FOR_TYPES_S = 0.5
_LOOK_FOR_CALLBACKS_S = 2.0
_WARN_EVERY_S = 60.0
_PAUSES_S = (0.5, 1.0, 2.0)
_CALLBACK_WITHIN = timedelta(minutes=5)


class _Text(Codec[str]):
    """A codec that leaves payloads as the JSON text that is stored."""

    def __init__(self, what: str) -> None:
        super().__init__(Any, what)

    def load(self, text: str) -> str:
        return text


class Callbacks:
    """The attempts that wait for their callbacks."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[UUID, int], tuple[int, asyncio.Future[None]]] = {}
        self._told: set[tuple[UUID, int]] = set()
        self.came = asyncio.Event()
        """Set when a notification names one of these attempts as settled."""

    def expect(self, id: UUID, attempt: int, lease: int) -> asyncio.Future[None]:
        """A future that is done when the attempt is settled."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id, attempt] = (lease, future)
        return future

    def forget(self, id: UUID, attempt: int) -> None:
        """Stop waiting for an attempt."""
        self._waiting.pop((id, attempt), None)

    def settled(self, id: UUID, attempt: int) -> None:
        """The attempt is settled."""
        if (entry := self._waiting.get((id, attempt))) is not None and not entry[1].done():
            entry[1].set_result(None)

    def told(self, words: str) -> None:
        """A notification names settled attempts. Every role that may connect can send one, so the worker looks them up."""
        for settled in words.split():
            id, _, number = settled.partition(":")
            with suppress(ValueError):
                if (attempt := (UUID(id), int(number))) in self._waiting:
                    self._told.add(attempt)
        if self._told:
            self.came.set()

    def to_look_up(self) -> list[tuple[UUID, int, int]]:
        """Id, attempt and lease of the attempts to look up: those that notifications named, or all when none was named."""
        self.came.clear()
        told, self._told = self._told, set()
        attempts = [attempt for attempt in told if attempt in self._waiting] or list(self._waiting)
        return [(*attempt, self._waiting[attempt][0]) for attempt in attempts]


class DownstreamWorker:
    """Sends the jobs of all types (or of some) to a downstream service.

    It is the ordinary `Worker`, whose handler of every type sends the job. An `AdmissionControl`, since it claims a type only
    while a connection is free.

    Args:
        database: An open database.
        settings: Intervals, grace period.
        downstream: Settings of the service.
        names: Names of job types; none: all, including those that are created later.
    """

    def __init__(self, database: Database, settings: Settings, downstream: DownstreamSettings, names: Sequence[str] = ()) -> None:
        self._database = database
        self._types: dict[str, WorkedType] = {}
        self._records: dict[str, JobTypeRecord] = {}
        self._only = set(names)
        self._encrypted: set[str] = set()
        self._service = Service(downstream)
        self._callbacks = Callbacks()
        self._connections = Shares(downstream.connections)
        self._in_flight = Shares(downstream.concurrency)
        self._held_back = False
        self._known: list[str] = []
        self._warn_at = 0.0
        # Attempts that the service has, or may have.
        self._sent: set[tuple[UUID, int, int]] = set()
        self._worker = Worker(
            database,
            settings.model_copy(update={"concurrency": downstream.concurrency}),
            Work(self._types, dispatches=True),
            beside={"types": self._look_for_types, "callbacks": self._look_for_callbacks},
            admission=self,
            before_stopping_handlers=self._leave_to_callbacks,
            tracing=Tracing() if settings.traces else None,
        )
        self._worker.notifications.subscribe(self._settled, Kind.SETTLED)

    def stop(self) -> None:
        """See `Worker.stop`."""
        self._worker.stop()

    def retire(self) -> None:
        """See `Worker.retire`."""
        self._worker.retire()

    def progress(self) -> Progress:
        """See `Worker.progress`."""
        return self._worker.progress()

    async def run(self) -> None:
        """Work until `stop`."""
        await self._service.open()
        try:
            self._take(await type_queries.job_types(self._database))
            self._warn_of_missing()
            self._worker.work_on(self._types)
            await self._worker.run()
        finally:
            await self._service.close()

    def admit(self, names: list[str], limit: int) -> tuple[list[str], int]:
        """See `AdmissionControl`: the types for which a connection is free."""
        admitted = [name for name in names if self._connections.free(name) and self._in_flight.free(name)]
        self._held_back = len(admitted) < len(names)
        return admitted, min(limit, max(1, self._connections.vacant))

    def _warn_of_missing(self) -> None:
        """Warn, at intervals, that requested types do not exist yet, and name existing ones with similar names."""
        missing = sorted(self._only - self._types.keys() - self._encrypted)
        if not missing or time.monotonic() < self._warn_at:
            return
        self._warn_at = time.monotonic() + _WARN_EVERY_S
        alike = {name: close for name in missing if (close := get_close_matches(name, self._known))}
        log.warning(
            "no_such_job_type",
            types=missing,
            did_you_mean=alike or None,
            hint="These do not exist, so nothing of them is sent until they do. Types that exist: penstock stats.",
        )

    def _settled(self, notification: Notification) -> None:
        self._callbacks.told(notification.subject)
        self._worker.look()

    async def _leave_to_callbacks(self, executor: WorkerExecutor) -> None:
        """Leave the sent jobs in progress: their callbacks still count when this process has ended."""
        try:
            left = await http.leave_to_callback(self._database, list(self._sent))
        except PenstockError as error:
            log.warning("jobs_not_left", error=error)
            return
        if left:
            log.info("jobs_left_to_callbacks", jobs=left)
        for id, attempt, _ in list(self._sent):
            self._callbacks.settled(id, attempt)
        await executor.finished(1.0)

    def _take(self, records: list[JobTypeRecord]) -> bool:
        """Apply the job types of the database. Returns whether there are new ones."""
        new = False
        self._known = [record.name for record in records]
        for record in records:
            if self._only and record.name not in self._only:
                continue
            if record.encrypted:
                # Results and errors come back through the server, which has no keys to encrypt them with.
                if record.name not in self._encrypted:
                    self._encrypted.add(record.name)
                    log.warning("job_type_encrypted", job_type=record.name, hint="Run its jobs with handlers: penstock worker.")
                continue
            self._records[record.name] = record
            if record.name not in self._types:
                new = True
                text = _Text(record.name)
                self._types[record.name] = WorkedType(record.name, record.options, text, self._send, "async")
            worked = self._types[record.name]
            worked.refresh(record)
            worked.limit = worked.limit or _CALLBACK_WITHIN
        if new:
            self._connections.divide(self._types)
            self._in_flight.divide(self._types)
        return new

    async def _look_for_types(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_FOR_TYPES_S)
            try:
                if self._take(await type_queries.job_types(self._database)):
                    log.info("job_types_changed", types=sorted(self._types))
                    self._worker.work_on(self._types)
                self._warn_of_missing()
            except PenstockError as error:
                log.warning("job_types_unknown", error=error)

    async def _look_for_callbacks(self) -> None:
        while True:
            await wait_for_event(self._callbacks.came, _LOOK_FOR_CALLBACKS_S)
            expected = self._callbacks.to_look_up()
            if not expected:
                continue
            try:
                there = await http.attempts_of(self._database, [id for id, _, _ in expected])
            except PenstockError as error:
                log.warning("callbacks_unknown", error=error)
                continue
            for id, attempt, lease in expected:
                if there.get(id) != (attempt, lease):
                    self._callbacks.settled(id, attempt)

    async def _send(self, job: Job[str]) -> None:
        """The handler of every type."""
        assert isinstance(job.control, Running)  # noqa: S101
        self._in_flight.take(job.name)
        try:
            await self._wait_for_connection(job.name, job.control)
            await self._send_connected(job, job.control)
        finally:
            self._in_flight.give(job.name)
            self._stir()

    async def _wait_for_connection(self, name: str, running: Running) -> None:
        """Take a connection. The time limit of the attempt begins then. Raises `NotStarted` when none becomes free in time."""
        running.deadline = running.latest
        try:
            async with asyncio.timeout(max(0.0, running.latest - running.limit / 2 - time.monotonic())):
                await self._connections.wait(name)
        except TimeoutError:
            raise NotStarted from None
        except asyncio.CancelledError:
            if running.reason == "cancelled":
                raise
            raise NotStarted from None
        running.deadline = min(running.latest, time.monotonic() + running.limit)

    def _connection_left(self, name: str) -> None:
        self._connections.give(name)
        self._stir()

    def _stir(self) -> None:
        """A place is free: wake the fetcher when it passed over a type."""
        if self._held_back:
            self._held_back = False
            self._worker.look()

    async def _send_connected(self, job: Job[str], running: Running) -> None:
        held = (job.id, job.attempt, running.lease)
        settled = self._callbacks.expect(*held)
        try:
            again = self._records[job.name].delivery_strategy is Delivery.AT_LEAST_ONCE
            try:
                await self._deliver(job, held, settled, again)
            except PenstockError:
                # The service may have called back, and then failed to answer the request.
                if settled.done():
                    raise SettledElsewhere from None
                raise
            await settled
            raise SettledElsewhere
        finally:
            self._sent.discard(held)
            self._callbacks.forget(job.id, job.attempt)

    async def _deliver(self, job: Job[str], held: tuple[UUID, int, int], settled: asyncio.Future[None], again: bool) -> None:
        for pause in (*_PAUSES_S, None):
            self._sent.add(held)
            try:
                await self._service.post(job, again=again)
                return
            except Unavailable:
                if pause is None or settled.done():
                    raise
                self._sent.discard(held)
            finally:
                self._connection_left(job.name)
            await asyncio.sleep(pause)
            await self._connections.wait(job.name)
