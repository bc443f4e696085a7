"""The worker of the connections that receive topics: it claims copies for all of them, hands them out and settles them.

This process is one worker for all of its connections: one claim for the copies of all of them, one settle for all outcomes. When
the process dies, other workers recover its leases, as those of any dead worker. `deliveries.py` opens and closes the connections.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from uuid import UUID

from penstock._version import __version__
from penstock.core import tally as tallies
from penstock.core.logs import get_logger
from penstock.core.polling import ANNOUNCE_EVERY_S, Polling
from penstock.errors import Conflict, DatabaseUnavailable, PenstockError
from penstock.http.topics.delivery_buffer import Copy, DeliveryBuffer
from penstock.jobs import worker_queries
from penstock.jobs.claiming import FailedClaims, WatermarkedClaims
from penstock.jobs.fetcher import Fetcher, Look
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.settings import Settings
from penstock.topics import queries as topics
from penstock.worker.completer import Completer

log = get_logger("penstock.http")
_MOST_CLAIMED, _FEWEST_CLAIMED = 1_000, 100
_MOST_AT_HAND = 5_000
_POLL_S = 1.0
_BLOCKED_S = 30.0
_CAUGHT_UP_WITHIN_S = 5.0
_NAMES_AT_FULL_PACE = 100
_MOST_FORGOTTEN = 1_000
_NO_MESSAGE = '{"type": "InvalidInput", "message": "the job is not a copy of a message"}'


class DeliverySource:
    """Claims for the connections of this process. A `Source`.

    Args:
        database: Database of the topics.
        listener: Listens for this process.
        settings: Intervals.
    """

    def __init__(self, database: Database, listener: Listener, settings: Settings) -> None:
        self.id = f"deliver.{os.getpid()}.{secrets.token_hex(4)}"
        self.fetcher: Fetcher[DeliverySource] = Fetcher(self, Polling(_POLL_S, announce_every_s=ANNOUNCE_EVERY_S), asyncio.Lock())
        self._database = database
        self._listener = listener
        self._settings = settings
        self._tally = tallies.of(database)
        self._completer = Completer(database)
        self._completer.on_written.append(self._written)
        self._buffers: dict[str, list[DeliveryBuffer]] = {}
        self._claims = WatermarkedClaims(database)
        self._failed = FailedClaims(database, lambda: self.id, lambda: list(self._buffers), self._known_leases)
        self._announced: frozenset[str] = frozenset()
        self._forgotten = 0
        self._returning: Counter[str] = Counter()  # by queue: copies that are released, which is not written yet
        self._given_back: set[str] = set()  # queues to which something was released since the last claim began
        self._tasks: list[asyncio.Task[None]] = []

    # -- connections

    def __iter__(self) -> Iterator[DeliveryBuffer]:
        """All connections."""
        return (buffer for buffers in list(self._buffers.values()) for buffer in list(buffers))

    def of(self, queue: str) -> Sequence[DeliveryBuffer]:
        """The connections of a queue."""
        return self._buffers.get(queue, ())

    def add(self, buffer: DeliveryBuffer) -> None:
        """From now on copies come to the buffer."""
        self._buffers.setdefault(buffer.queue, []).append(buffer)

    def full_scan(self) -> None:
        """Look at once, and at everything: what waits may have been in the queue for long."""
        self._claims.full_scan()
        self.fetcher.wake()

    def remove(self, buffer: DeliveryBuffer) -> None:
        """No more copies come to the buffer."""
        there = self._buffers.get(buffer.queue, [])
        if buffer in there:
            there.remove(buffer)
            if not there:
                del self._buffers[buffer.queue]
                self._forgotten += 1
                if self._forgotten > _MOST_FORGOTTEN:
                    # Watermarks of queues that are gone.
                    self._claims, self._forgotten = WatermarkedClaims(self._database), 0

    # -- outcomes

    def settle(self, copy: Copy, outcome: Outcome, detail: str | None = None) -> None:
        """A copy was handed out, or its receiver says what became of it."""
        if self._settings.rates:
            attempts = self._tally.attempts(copy.name, outcome)
            attempts.ended(copy.run_after, copy.created_at, copy.since, time.monotonic())
        self._completer.settle(_settlement(copy, outcome, detail))

    def give_back(self, buffer: DeliveryBuffer) -> None:
        """Release the copies that a connection has not handed out, or of which its receiver has said nothing."""
        for copy in buffer.give_back():
            self._release(buffer.queue, _settlement(copy, Outcome.RELEASED))

    async def caught_up(self) -> None:
        """Wait until it is in the database what connections before were given, and what they gave back.

        What the database does not know yet as handed out is not found as missed; and nothing finds it later, when the receiver
        says then that it saw a newer message.
        """
        try:
            async with asyncio.timeout(_CAUGHT_UP_WITHIN_S):
                await self._completer.caught_up()
        except TimeoutError:
            raise DatabaseUnavailable("what was delivered before is not in the database yet", hint="Come back later.") from None

    def _release(self, queue: str, released: Settlement) -> None:
        self._returning[queue] += 1
        self._given_back.add(queue)
        self._completer.settle(released._replace(name=queue))

    def _written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Claim again from queues to which everything is back; tell receivers that acknowledge what came too late."""
        if self._returning:
            self._returning -= Counter(result.name for result in results if result.outcome is Outcome.RELEASED)
            self.full_scan()
        for result in results:
            if outcomes.get(result.id) == "stale":
                for buffer in self:
                    buffer.came_too_late(result.id)

    # -- the worker

    async def start(self) -> None:
        """Begin to work, unless it does."""
        if self._tasks:
            return
        self._tasks = [
            asyncio.create_task(loop, name=f"penstock-deliveries-{name}")
            for name, loop in (("fetch", self.fetcher.run()), ("settle", self._completer.run()), ("beat", self._beat()))
        ]
        self._listener.add(f"penstock_{self.id}")
        await self._register()

    async def aclose(self) -> None:
        """Settle what was handed out, and take leave."""
        if not self._tasks:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._completer.drained()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.remove(f"penstock_{self.id}")
        with suppress(PenstockError):
            await worker_queries.unregister_worker(self._database, self.id)

    async def _register(self) -> None:
        with suppress(Conflict):
            await worker_queries.register_worker(
                self._database,
                self.id,
                [],
                socket.gethostname(),
                os.getpid(),
                _MOST_AT_HAND,
                self._settings.dead_after,
                version=__version__,
            )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval.total_seconds())
            try:
                if not (await worker_queries.heartbeat(self._database, self.id, self._at_hand(), "running")).known:
                    log.warning("deliveries_declared_dead", worker=self.id)
                    # What was claimed is others' by now.
                    for buffer in self:
                        buffer.give_back()
                    await self._register()
                    self.fetcher.wake()
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error)

    # -- see `Source`

    def blocked_s(self) -> float | None:
        """See `Source`."""
        return None if self._hungry() and self._room() > 0 else _BLOCKED_S

    async def look(self) -> Look:
        """See `Source`."""
        if not (names := self._hungry()):
            return Look(full=True)
        # Another comes first each time, so that a deep queue does not keep the others waiting.
        first = random.randrange(len(names))
        names = names[first:] + names[:first]
        limit = min(self._room(), max(_FEWEST_CLAIMED, min(len(names), _MOST_CLAIMED)))
        self._given_back.clear()
        claimed = await self._claims.claim(self.id, names, limit)
        if claimed:
            self._hand_out(claimed, await topics.messages_of(self._database, [job.id for job in claimed]))
        elif not self._announced.issuperset(names):
            self.fetcher.polling.announce_again()
        self.fetcher.polling.poll_s = max(_POLL_S, len(names) / _NAMES_AT_FULL_PACE)
        return Look(len(claimed))

    async def announce(self) -> None:
        """See `Source`."""
        names = self._hungry()
        await worker_queries.wait_for_jobs(self._database, self.id, names)
        self._announced = frozenset(names)

    async def recover(self, error: PenstockError) -> None:
        """See `Source`."""
        await self._failed.recover(error)

    def _hungry(self) -> list[str]:
        """The queues of connections that have room. What is on its way back to a queue comes before what is behind it there."""
        return [
            name
            for name, buffers in self._buffers.items()
            if name not in self._returning and any(buffer.room > 0 for buffer in buffers)
        ]

    def _at_hand(self) -> int:
        return sum(buffer.at_hand for buffer in self)

    def _room(self) -> int:
        return _MOST_AT_HAND - self._at_hand()

    def _hand_out(self, claimed: Sequence[ClaimedJob], messages: Mapping[UUID, tuple[int, UUID, object]]) -> None:
        frames: dict[UUID, Copy] = {}
        given_back = frozenset(self._given_back)
        copies: list[tuple[Copy, DeliveryBuffer]] = []
        for job in claimed:
            message = messages.get(job.id)
            buffers = [buffer for buffer in self._buffers.get(job.name, ()) if not buffer.ended]
            if job.name in given_back:
                # What went back meanwhile comes before it.
                buffers = []
            if message is None or not buffers:
                # The connection is closed; or it is an ordinary job, which is not for a connection.
                if message is not None:
                    self._release(job.name, Settlement(job.id, job.attempt, job.lease, Outcome.RELEASED))
                else:
                    self._completer.settle(Settlement(job.id, job.attempt, job.lease, Outcome.FAILED_FOR_GOOD, _NO_MESSAGE))
                continue
            buffer = max(buffers, key=lambda buffer: buffer.room)
            copy = Copy.of(job, buffer.counted_as, *message, like=frames.get(message[1]))  # type: ignore[arg-type]
            frames.setdefault(copy.id, copy)
            copies.append((copy, buffer))
        # In this order `penstock.late_messages` knows what a client has that saw one of them.
        for copy, buffer in sorted(copies, key=lambda one: (one[0].late, one[0].seq)):
            buffer.put(copy)

    def _known_leases(self) -> list[int]:
        return [*(lease for buffer in self for lease in buffer.leases), *self._completer.unsettled_leases()]


def _settlement(copy: Copy, outcome: Outcome, detail: str | None = None) -> Settlement:
    return Settlement(copy.job, copy.attempt, copy.lease, outcome, detail, name=copy.name)
