"""Maintenance: the work that every process does for the whole database, so that nothing else has to be run or scheduled.

All workers of a process on one database share one maintenance, see `of`. A process works often when there are few workers
and seldom when there are many, so that the database receives about the same number of these calls whatever their number.

Almost always there is nothing to do. So one statement a second promotes due jobs and asks what else is due (`due_work`), and what
it names is done at once. It does not name what no process waits for: a round of everything, twice a minute, does that.

Pauses after work follow from what was done, not from the time that it took: a statement that waited for a processor, or for
another transaction, cost the database nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

from penstock.core import measuring
from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import PenstockError
from penstock.history import lake_queries
from penstock.jobs import worker_queries, workflow_ticks
from penstock.operations import queries as operations
from penstock.operations.vacuuming import vacuum_erased
from penstock.postgres.database import Database
from penstock.settings import Settings
from penstock.streams import queries as streams
from penstock.streams.maintenance import maintain
from penstock.topics import queries as topics
from penstock.worker import retention
from penstock.worker.rates import keep_writing
from penstock.workflows import queries as workflows

log = get_logger("penstock.maintenance")
_WORKERS_AT_FULL_PACE = 4
PRUNE_EVERY_S = 600.0
_MAINTAIN_EVERY_S = 5.0
_RESOLVE_EVERY_S = 0.005
_EVERYTHING_ROUNDS = 30
_LONGEST_LOOK_S = 4.0
"""A job that is deferred for less than 5 s wakes an idle worker; one that is deferred for longer is seen before it is due."""
_PROMOTE_EVERY_S = 0.01
# Ten times what it costs the database to promote a job, what it costs to release one, to look at ticks, and to do a batch.
_PER_PROMOTED_S = 0.0002
_PER_RELEASED_S = 0.00003
_LOOK_AT_TICKS_S = 0.001
_AFTER_BATCH_S = 0.05
_MOST_ROUNDS_LEFT_OUT = 11


class Maintenance:
    """Promotes due jobs, recovers lost jobs, expires jobs, ends subscriptions, maintains streams and prunes.

    Args:
        database: Database to maintain.
        settings: Intervals, and how long the archive is kept, which it stores in the database.
    """

    def __init__(self, database: Database, settings: Settings) -> None:
        self.workers = 1
        """Number of workers on the database."""
        self._database = database
        self._settings = settings
        self._taking_part: list[Callable[[], None]] = []
        self._running: asyncio.Task[None] | None = None
        self.due: frozenset[str] = frozenset()
        """What the last question of what is due named."""
        self._look = asyncio.Event()
        self._recovery_due = asyncio.Event()
        self._operations_due = asyncio.Event()
        self._all_workflows_due = False
        # Of streams: how many rounds more they are left out, and how many the next time.
        self._left_out: dict[str, tuple[int, int]] = {}
        self._more: list[Callable[[], Awaitable[bool]]] = []
        self._retention_stored = False

    def look(self) -> None:
        """Look for due jobs: one may be due sooner than was known."""
        self._look.set()

    async def run(self, wake: Callable[[], None]) -> None:
        """Take part until cancelled. The first participant starts the maintenance, the last one ends it.

        Args:
            wake: Called when jobs became ready.
        """
        self._taking_part.append(wake)
        if self._running is None:
            self._running = asyncio.create_task(self._maintain(), name="penstock-maintenance")
        running = self._running
        try:
            # It ends by itself only with an error, which all participants raise.
            await asyncio.shield(running)
        finally:
            self._taking_part.remove(wake)
            if not self._taking_part or running.done():
                running.cancel()
                if self._running is running:
                    self._running = None
                await asyncio.gather(running, return_exceptions=True)

    async def _maintain(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._promote(), name="penstock-promotion")
            group.create_task(self._recover_and_prune(), name="penstock-recovery")
            group.create_task(self._maintain_streams_at_intervals(), name="penstock-streams")
            group.create_task(self._advance_operations(), name="penstock-operations")
            group.create_task(self._resolve_workflows(), name="penstock-workflows")
            if self._settings.rates:
                group.create_task(keep_writing(self._database), name="penstock-rates")

    def _wake(self) -> None:
        for wake in list(self._taking_part):
            wake()

    async def _promote(self) -> None:
        """Put due jobs into the ready queues, and find out what else is due, until cancelled."""
        asked_at = float("-inf")
        while True:
            self._look.clear()
            promoted, due_in_s = 0, None
            longest_s = self._longest_look_s()
            try:
                # Between two questions, when jobs become due all the time, it only promotes.
                if time.monotonic() - asked_at < longest_s * 0.7:
                    promoted, due_in_s = await worker_queries.due_in(self._database)
                else:
                    found = await worker_queries.due_work(self._database)
                    asked_at = time.monotonic()
                    promoted, due_in_s = found.promoted, found.due_in_s
                    self._tell(found.due)
                if promoted:
                    self._wake()
            except PenstockError as error:
                log.warning("promotion_failed", error=error)
            ask_in_s = longest_s * random.uniform(0.9, 1.0)
            wait_s = ask_in_s if due_in_s is None else min(max(due_in_s, 0.0), ask_in_s)
            shortest_s = min((_PROMOTE_EVERY_S + promoted * _PER_PROMOTED_S) * self._share(), 5.0)
            # Promotion takes at most a tenth of the time of one backend, shared among the workers.
            await asyncio.sleep(shortest_s)
            await wait_for_event(self._look, max(wait_s - shortest_s, 0.0))

    def _tell(self, due: frozenset[str]) -> None:
        self.due = due
        if due & {"recover", "expire"}:
            self._recovery_due.set()
        if due & {"operations", "vacuum"}:
            self._operations_due.set()
        if "workflows" in due:
            self._all_workflows_due = True
            workflow_ticks.tell(self._database)

    async def _recover_and_prune(self) -> None:
        """Recover the jobs of dead workers and ended leases, expire jobs, and prune, until cancelled."""
        pruned_at = maintained_at = time.monotonic()
        everything_at = pruned_at + self._everything_s()
        while True:
            if not self._retention_stored:
                # At the start, so that no process deletes by a retention that is shorter than what this one was told.
                await self._try(self._store_retention())
            within_s = min(max(everything_at - time.monotonic(), 0.0), self._maintain_every_s())
            if self._more:
                within_s = min(within_s, self._interval_s() * self._share())
            await wait_for_event(self._recovery_due, within_s)
            self._recovery_due.clear()
            due = self.due
            if time.monotonic() >= everything_at:
                everything_at = time.monotonic() + self._everything_s()
                due = due | {"recover", "expire", "topics"}
            if "recover" in due:
                await self._try(self._recover())
            if "expire" in due:
                await self._try(self._expire())
            if "topics" in due and time.monotonic() - maintained_at > self._maintain_every_s():
                maintained_at = time.monotonic()
                await self._try(self._maintain_topics())
            if self._retention_stored and time.monotonic() - pruned_at > PRUNE_EVERY_S * self._share():
                pruned_at = time.monotonic()
                await self._try(self._prune_staged())
                self._more = [self._prune, self._prune_messages, self._prune_history]
            # One batch of each in each round, so that recovery does not wait.
            more, self._more = self._more, []
            for prune in more:
                await self._try(self._prune_once(prune))

    async def _advance_operations(self) -> None:
        """Advance the operations on all jobs that match a filter, batch by batch, until cancelled."""
        while True:
            everything = not await wait_for_event(self._operations_due, self._everything_s())
            self._operations_due.clear()
            due = self.due
            if everything or "operations" in due:
                await self._try(self._advance())
            # The last batch of an erasure may just have been done.
            if everything or due & {"operations", "vacuum"}:
                await self._try(self._vacuum_erased())

    async def _resolve_workflows(self) -> None:
        """Release or cancel what waited for jobs that have ended: when that is told, and at intervals, until cancelled."""
        told = workflow_ticks.event_of(self._database)
        while True:
            everything = not await wait_for_event(told, self._everything_s())
            told.clear()
            # Often children of a large group have ended, from which nothing follows yet: the next due_work tells of them.
            everything, self._all_workflows_due = everything or self._all_workflows_due, False
            await self._try(self._resolve(if_due=not everything))

    async def _resolve(self, *, if_due: bool) -> None:
        longest_s = self._settings.maintenance_interval.total_seconds()
        busy_s = _RESOLVE_EVERY_S
        was_busy = False
        while True:
            done = await workflows.resolve(self._database, if_due=if_due)
            if done is None:
                was_busy = True
                # Another process does it, and may not see what ended just now; or a caller keeps its transaction open.
                await asyncio.sleep(busy_s * random.uniform(0.7, 1.3))
                busy_s = min(busy_s * 2, longest_s)
                continue
            if done or was_busy:
                # A claim loop that became idle meanwhile was not notified: its registration was not visible to the release.
                self._wake()
                was_busy = False
            if not done:
                # Many small settlements tell of their ends one after the other: the looks at them take half of the time at most.
                await asyncio.sleep(_LOOK_AT_TICKS_S)
                return
            if_due = True
            # The database is for the jobs half of the time, and what ends meanwhile is folded together.
            await asyncio.sleep(_RESOLVE_EVERY_S + done * _PER_RELEASED_S)

    async def _advance(self) -> None:
        while True:
            operation = await operations.advance(self._database)
            if operation is None:
                return
            if operation.ended:
                log.info(
                    "operation_ended",
                    operation=str(operation.id),
                    kind=operation.kind,
                    done=operation.done,
                    skipped=operation.skipped,
                    failed=operation.failed,
                )
            # The database is for the jobs half of the time.
            await asyncio.sleep(_AFTER_BATCH_S)

    async def _vacuum_erased(self) -> None:
        while (operation := await vacuum_erased(self._database)) is not None:
            log.info("operation_ended", operation=str(operation.id), kind=operation.kind, done=operation.done)

    async def _maintain_streams_at_intervals(self) -> None:
        """Maintain the streams at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._maintain_every_s() * random.uniform(0.7, 1.3))
            if self.due & {"streams", "retired"}:
                await self._try(self.maintain_streams())

    async def maintain_streams(self) -> None:
        """Begin new segments, and apply retention and compaction, once. A failure at one stream does not stop the others.

        A stream in which there was nothing to do again and again, although there might have been, is left out for some rounds.
        """
        names = await streams.to_maintain(self._database)
        self._left_out = {name: self._left_out[name] for name in names if name in self._left_out}
        for name in names:
            rounds, next_rounds = self._left_out.get(name, (0, 0))
            if rounds > 0:
                self._left_out[name] = (rounds - 1, next_rounds)
                continue
            self._left_out[name] = (next_rounds, min(next_rounds * 2 + 1, _MOST_ROUNDS_LEFT_OUT))
            await self._try(self._maintain_stream(name))
        await streams.drop_retired(self._database)

    async def _maintain_stream(self, stream: str) -> None:
        rolled, retired, compacted = await maintain(self._database, stream)
        if rolled or retired or compacted:
            del self._left_out[stream]
            log.info("stream_maintained", stream=stream, rolled=rolled, retired=retired, compacted=compacted)

    async def _recover(self) -> None:
        if recovered := await worker_queries.recover(self._database):
            log.warning("jobs_recovered", jobs=recovered)
            if measuring.meter is not None:
                measuring.meter.recovered(recovered)
            self._wake()

    async def _expire(self) -> None:
        while await worker_queries.expire(self._database) == 1000:
            await asyncio.sleep(0)

    async def _store_retention(self) -> None:
        await retention.store(self._database, self._settings)
        self._retention_stored = True

    async def _prune_once(self, prune: Callable[[], Awaitable[bool]]) -> None:
        if await prune():
            self._more.append(prune)

    async def _prune(self) -> bool:
        dropped = await worker_queries.prune_due(self._database)
        for partition, count in dropped.items():
            log.info("archive_pruned", partition=partition, jobs=count)
        return bool(dropped)

    async def _prune_staged(self) -> None:
        pruned = 0
        while more := await streams.prune_staged(self._database):
            pruned += more
        if pruned:
            log.info("staged_rows_pruned", rows=pruned)

    async def _prune_messages(self) -> bool:
        if messages := await topics.prune_messages_due(self._database):
            log.info("messages_pruned", messages=messages)
        return messages > 0

    async def _prune_history(self) -> bool:
        if rows := await lake_queries.prune_history_due(self._database):
            log.info("history_pruned", rows=rows)
        return rows > 0

    async def _maintain_topics(self) -> None:
        ended, removed = await topics.maintain(self._database)
        if ended or removed:
            log.info("subscriptions_ended", ended=ended, queues_removed=removed)

    async def _try(self, call: Awaitable[None]) -> None:
        try:
            await call
        except PenstockError as error:
            log.warning("maintenance_failed", error=error)

    def _interval_s(self) -> float:
        return self._settings.maintenance_interval.total_seconds()

    def _longest_look_s(self) -> float:
        # One job in the far future does not keep the others waiting, however many workers share the looks.
        interval_s = self._interval_s()
        return max(interval_s, min(interval_s * self._share(), _LONGEST_LOOK_S))

    def _maintain_every_s(self) -> float:
        return min(_MAINTAIN_EVERY_S, self._interval_s() * 5) * self._share()

    def _everything_s(self) -> float:
        interval_s = self._interval_s()
        return max(interval_s, min(interval_s * _EVERYTHING_ROUNDS, 30.0)) * self._share() * random.uniform(0.7, 1.3)

    def _share(self) -> float:
        # The workers of this process count as one.
        return max(1.0, self.workers / max(len(self._taking_part), 1) / _WORKERS_AT_FULL_PACE)


_maintenances: WeakKeyDictionary[Database, Maintenance] = WeakKeyDictionary()


def of(database: Database, settings: Settings) -> Maintenance:
    """The maintenance of this process on a database, with the settings of the first caller."""
    if (found := _maintenances.get(database)) is None:
        found = _maintenances[database] = Maintenance(database, settings)
    return found
