"""The heartbeat of a worker on its event loop. It asks which jobs were cancelled, and registers again when it was declared dead.

The heartbeat beside the loop (`groups.heartbeat`) keeps the row alive while a handler blocks the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.core import measuring
from penstock.core import tally as tallies
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import PenstockError
from penstock.groups.membership import monotonic
from penstock.jobs import claim_queries, type_queries, worker_queries
from penstock.jobs.records import JobTypeRecord
from penstock.postgres import health
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.settings import Settings
from penstock.worker.fetchers import Fetchers
from penstock.worker.locked_work import LockedWork
from penstock.worker.maintenance import Maintenance
from penstock.worker.registration import Registration
from penstock.worker.roles import WorkerExecutor
from penstock.worker.work import Work

log = get_logger("penstock.worker")
_STALLED_S = 30.0


class Refreshed(Protocol):
    """A job type or a pool of the worker."""

    def refresh(self, record: JobTypeRecord) -> None:
        """Apply the options that the database has."""


class WorkerHeartbeat:
    """The heartbeat of one worker.

    Args:
        database: Database of the worker's row.
        settings: Interval.
        registration: The worker's row.
        work: What the worker works on; its types and pools are refreshed from the database.
        executor: Keeps the running jobs.
        fetchers: The fetchers of the worker.
        maintenance: Learns how many workers there are.
        stopping: Whether the worker has been told to stop.
        locked: Knows what the worker has no key for.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        registration: Registration,
        work: Work,
        executor: WorkerExecutor,
        fetchers: Fetchers,
        maintenance: Maintenance,
        stopping: Callable[[], bool],
        locked: LockedWork,
    ) -> None:
        self._locked = locked
        self._database = database
        self._interval = settings.heartbeat_interval.total_seconds()
        self._dead_after_s = settings.dead_after.total_seconds()
        self._registration = registration
        self._work = work
        self._executor = executor
        self._fetchers = fetchers
        self._maintenance = maintenance
        self._stopping = stopping
        self._leaving = False
        # Consumers that have ended, with their errors; then the id of the row in which they are recorded, and how many.
        self._halted: dict[str, str] = {}
        self._noted = ("", 0)

    def subscribe(self, notifications: Notifications) -> None:
        """Subscribe to the notifications on the worker's channel."""
        notifications.subscribe(self._cancelled, Kind.CANCEL)

    def _cancelled(self, notification: Notification) -> None:
        # Every role that may connect to the database can send a notification: the heartbeat asks which jobs to cancel.
        if self._executor.holds(notification.subject):
            self._registration.beat_now.set()

    def consumer_halted(self, consumer: str, error: str) -> None:
        """Record in the worker's row that a consumer has ended, since the worker itself continues and looks healthy."""
        self._halted[consumer] = error
        self._registration.beat_now.set()

    async def leave(self) -> None:
        """Remove the worker's row. The answer to an earlier heartbeat does not register it again."""
        self._leaving = True
        await worker_queries.unregister_worker(self._database, self._registration.id)

    async def run(self) -> None:
        """Send heartbeats until cancelled."""
        now = self._registration.beat_now
        while True:
            await wait_for_event(now, self._interval)
            now.clear()
            self._look_for_progress()
            try:
                await self._beat()
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error)
            if self._leaving:
                return

    def _look_for_progress(self) -> None:
        stalled_s = max(self._fetchers.idle_s(), default=0.0)
        if stalled_s > _STALLED_S and not self._stopping():
            # The worker keeps its jobs; the log tells operators that it claims no more.
            log.error("claim_loop_stalled", for_s=round(stalled_s))

    async def _beat(self) -> None:
        registration = self._registration
        sent_at = monotonic()
        state = "draining" if self._stopping() else "running"
        beat = await worker_queries.heartbeat(self._database, registration.id, self._executor.in_flight, state)
        if self._leaving:
            return
        if not beat.known:
            await self._register_again()
            return
        registration.kept(sent_at, self._dead_after_s)
        await self._note_halted()
        self._maintenance.workers = beat.workers
        for id in beat.cancelled:
            self._executor.cancel(id, "cancelled")
        await self.refresh()

    async def refresh(self) -> None:
        """Apply the options that the database has, and find out what the worker has no key for."""
        # The types of a dispatcher are added later.
        refreshed: dict[str, Refreshed] = {**self._work.types, **{pool.name: pool for pool in self._work.pools}}
        records = await type_queries.job_types(self._database, list(refreshed)) if refreshed else []
        for record in records:
            if record.name in refreshed:
                refreshed[record.name].refresh(record)
        await self._locked.look(records)
        if measuring.meter is not None:
            tallies.of(self._database).clock_is_ahead(await health.clock_ahead_s(self._database))

    async def _register_again(self) -> None:
        """Register under a new id, since other workers have its jobs.

        Jobs that the worker claimed after it was declared dead have not been recovered by any other worker, so it releases them.
        """
        log.error("worker_was_declared_dead", worker=self._registration.id)
        queues = self._fetchers.queues
        if queues is None:
            await self._registration.register()
            return
        async with queues.paused:
            for id in self._executor.jobs_of(self._work.types):
                self._executor.cancel(id, "lost")
            await claim_queries.release_unknown(self._database, self._registration.id, queues.source.known_leases)
            await self._registration.register()
        self._fetchers.announce_again()

    async def _note_halted(self) -> None:
        id = self._registration.id
        if self._noted == (id, len(self._halted)) or not self._halted:
            return
        for consumer, error in self._halted.items():
            await worker_queries.note_halted(self._database, id, consumer, error)
        self._noted = (id, len(self._halted))
