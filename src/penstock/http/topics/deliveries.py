"""Deliveries: subscribers of topics that are connections.

Each connection is a subscriber with a queue of its own, like any other, so filters, `unique`, `run_after` and publishers that
wait for outcomes work in the usual way. This process is one worker for all of its connections: one claim for the copies of all of
them, one settle for all outcomes, one renewal for all subscriptions. When the process dies, other workers recover its leases, as
those of any dead worker, and the subscriptions that are not renewed end.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from penstock.core.logs import get_logger
from penstock.core.polling import Polling
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, PenstockError
from penstock.http.topics.delivery_buffer import Copy, DeliveryBuffer
from penstock.jobs import worker_queries
from penstock.jobs.claiming import FailedClaims, WatermarkedClaims
from penstock.jobs.fetcher import Fetcher, Look
from penstock.jobs.models import ClaimedJob, Outcome, Settlement
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.settings import Settings
from penstock.topics import queries as topics
from penstock.topics.models import Subscribed
from penstock.worker.completer import Completer

log = get_logger("penstock.http")
LIVING = timedelta(seconds=30)
"""Time to live of a subscription that ends with its connection, for when no server can end it."""
_RENEWALS_IN_A_TTL = 4
_MOST_CLAIMED, _FEWEST_CLAIMED = 1_000, 100
_MOST_AT_HAND = 5_000
_POLL_S = 1.0
_BLOCKED_S = 30.0
_CAUGHT_UP_WITHIN_S = 5.0
_NAMES_AT_FULL_PACE = 100
_MOST_FORGOTTEN = 1_000
# A connection has no keys: of an encrypted topic it could hand out nothing.
_OPTIONS = {"keep_result": True, "encrypted": False}
_TAKEN_OVER = "another connection has this client id now"
_NO_MESSAGE = '{"type": "InvalidInput", "message": "the job is not a copy of a message"}'


class Deliveries:
    """Claims for the connections of this process. A `Source`.

    Args:
        database: Database of the topics.
        listener: Listens for this process.
        settings: Intervals.
    """

    def __init__(self, database: Database, listener: Listener, settings: Settings) -> None:
        self.id = f"deliver.{os.getpid()}.{secrets.token_hex(4)}"
        self._database = database
        self._listener = listener
        self._settings = settings
        self._completer = Completer(database)
        self._completer.on_written.append(self._written)
        self._buffers: dict[str, list[DeliveryBuffer]] = {}
        self._claims = WatermarkedClaims(database)
        self._failed = FailedClaims(database, lambda: self.id, lambda: list(self._buffers), self._known_leases)
        self._announced: frozenset[str] = frozenset()
        self.fetcher: Fetcher[Deliveries] = Fetcher(self, Polling(_POLL_S), asyncio.Lock())
        self._forgotten = 0
        self._opening: dict[tuple[str, str], list[DeliveryBuffer]] = {}
        self._returning: Counter[str] = Counter()  # by queue: copies that are released, which is not written yet
        self._given_back: set[str] = set()  # queues to which something was released since the last claim began
        self._named: set[str] = set()
        self._others_came = asyncio.Event()
        self._stopped = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> int:
        """How many there are."""
        return sum(map(len, self._buffers.values()))

    # -- connections

    async def open(self, buffer: DeliveryBuffer, since: int | None, last: int | None = None) -> Subscribed:
        """Subscribe a connection. From now on copies come to its buffer.

        Args:
            buffer: Buffer of the connection.
            since: The latest message that it saw; None: begin with what comes, and what the topic keeps.
            last: The one that it saw last, when that is an older one that came late.

        Raises:
            NotFound: There is no such topic.
            Conflict: The name is taken, or messages after `since` are gone.
        """
        await self._start()
        client = (buffer.topic, buffer.client_id)
        self._opening.setdefault(client, []).append(buffer)
        try:
            receipt = await self._subscribe(buffer, since)
            buffer.queue = receipt.queue
            if since is None:
                buffer.begins(receipt.seq)
            else:
                buffer.comes_back(since, last)
            if buffer.alone:
                await topics.take_over(self._database, buffer.queue, buffer.id)
                self._end_others(buffer)
            if since is not None and not receipt.created:
                await self._caught_up()
                await buffer.look_for_missed(self._database)
            if self._stopped:
                buffer.end(self._stopped)
            if not buffer.ended:
                self._buffers.setdefault(buffer.queue, []).append(buffer)
        finally:
            self._opening[client].remove(buffer)
            if not self._opening[client]:
                del self._opening[client]
        # It may have been in the queue for long.
        self._claims.full_scan()
        self.fetcher.wake()
        return receipt

    async def close(self, buffer: DeliveryBuffer) -> None:
        """End a connection: give back what it did not hand out, and end its subscription unless that stays."""
        there = self._buffers.get(buffer.queue, [])
        if buffer in there:
            there.remove(buffer)
            if not there:
                del self._buffers[buffer.queue]
                self._forgotten += 1
                if self._forgotten > _MOST_FORGOTTEN:
                    # Watermarks of queues that are gone.
                    self._claims, self._forgotten = WatermarkedClaims(self._database), 0
        buffer.end("closed")
        self._give_back(buffer)
        with suppress(DatabaseUnavailable):
            await self._caught_up()
        others = buffer.queue in self._buffers or (buffer.topic, buffer.client_id) in self._opening
        if not buffer.stays and not others:
            # When the database is away now, the time to live ends it.
            with suppress(PenstockError):
                await topics.unsubscribe(self._database, buffer.topic, buffer.client_id, True)
        self.fetcher.wake()

    def done(self, copy: Copy, outcome: Outcome = Outcome.SUCCEEDED, detail: str | None = None) -> None:
        """A copy was handed out, or its receiver says what became of it."""
        self._completer.settle(_settlement(copy, outcome, detail))

    def room_made(self) -> None:
        """A buffer was emptied."""
        self.fetcher.wake()

    def subscribe(self, notifications: Notifications) -> None:
        """Be told of what this process listens to."""
        notifications.wake(self.wake, Kind.JOBS, Kind.CONNECTED)
        notifications.wake(self._full_scan, Kind.FULL_SCAN)
        notifications.subscribe(self._taken, Kind.TAKEN)

    def wake(self) -> None:
        """Copies may have come."""
        self.fetcher.wake()

    def _full_scan(self) -> None:
        self._claims.full_scan()
        self.fetcher.wake()

    def _taken(self, notification: Notification) -> None:
        # Every role that may connect to the database can send one: `_look_for_others` asks it.
        if any(buffer.alone for buffer in self._buffers.get(notification.subject, [])):
            self._named.add(notification.subject)
            self._others_came.set()

    def stop(self, reason: str) -> None:
        """End all connections, also those that are being opened."""
        self._stopped = reason
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer.end(reason)

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

    def _end_others(self, buffer: DeliveryBuffer) -> None:
        """End the connections of this process that had the queue, and give back what they had not begun to write."""
        opening = self._opening[buffer.topic, buffer.client_id]
        before = opening[: opening.index(buffer)] + self._buffers.get(buffer.queue, [])
        for other in before:
            if other.alone:
                other.end(_TAKEN_OVER)
                self._give_back(other)

    def _give_back(self, buffer: DeliveryBuffer) -> None:
        for copy in buffer.give_back():
            self._release(buffer.queue, _settlement(copy, Outcome.RELEASED))

    def _release(self, queue: str, released: Settlement) -> None:
        self._returning[queue] += 1
        self._given_back.add(queue)
        self._completer.settle(released._replace(name=queue))

    async def _caught_up(self) -> None:
        """Wait until it is in the database what connections before were given, and what they gave back.

        What the database does not know yet as handed out is not found as missed; and nothing finds it later, when the receiver
        says then that it saw a newer message.
        """
        try:
            async with asyncio.timeout(_CAUGHT_UP_WITHIN_S):
                await self._completer.caught_up()
        except TimeoutError:
            raise DatabaseUnavailable("what was delivered before is not in the database yet", hint="Come back later.") from None

    async def _subscribe(self, buffer: DeliveryBuffer, since: int | None) -> Subscribed:
        receipts = await topics.subscribe_many(
            self._database, buffer.topic, [buffer.client_id], ttl=buffer.ttl, filter=buffer.filter, since=since, options=_OPTIONS
        )
        return receipts[0]

    # -- the loops

    async def _start(self) -> None:
        if self._tasks:
            return
        self._tasks = [
            asyncio.create_task(loop, name=f"penstock-deliveries-{name}")
            for name, loop in (
                ("fetch", self.fetcher.run()), ("settle", self._completer.run()), ("beat", self._beat()),
                ("renew", self._renew()), ("others", self._look_for_others()),
            )
        ]  # fmt: skip
        self._listener.add(f"penstock_{self.id}")
        await self._register()

    async def _register(self) -> None:
        with suppress(Conflict):
            await worker_queries.register_worker(
                self._database, self.id, [], socket.gethostname(), os.getpid(), _MOST_AT_HAND, self._settings.dead_after
            )

    async def _look_for_others(self) -> None:
        """End connections whose client id another connection has now."""
        while True:
            await self._others_came.wait()
            self._others_came.clear()
            named, self._named = self._named, set()
            try:
                receiving = await topics.connections_of(self._database, list(named))
            except PenstockError as error:
                log.warning("connections_unknown", error=error)
                self._named |= named
                self._others_came.set()
                await asyncio.sleep(_POLL_S)
                continue
            for queue, id in receiving.items():
                for buffer in self._buffers.get(queue, []):
                    if buffer.alone and buffer.id != id:
                        buffer.end(_TAKEN_OVER)
                        self._give_back(buffer)

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

    def _room(self) -> int:
        return _MOST_AT_HAND - sum(buffer.at_hand for buffers in self._buffers.values() for buffer in buffers)

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
            copy = Copy.of(job, *message, like=frames.get(message[1]))  # type: ignore[arg-type]
            frames.setdefault(copy.id, copy)
            copies.append((copy, max(buffers, key=lambda buffer: buffer.room)))
        # In this order `penstock.late_messages` knows what a client has that saw one of them.
        for copy, buffer in sorted(copies, key=lambda one: (one[0].late, one[0].seq)):
            buffer.put(copy)

    def _known_leases(self) -> list[int]:
        held = [lease for buffers in self._buffers.values() for buffer in buffers for lease in buffer.leases]
        return [*held, *self._completer.unsettled_leases()]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval.total_seconds())
            try:
                at_hand = sum(buffer.at_hand for buffers in self._buffers.values() for buffer in buffers)
                if not (await worker_queries.heartbeat(self._database, self.id, at_hand, "running")).known:
                    log.warning("deliveries_declared_dead", worker=self.id)
                    # What was claimed is others' by now.
                    for buffers in self._buffers.values():
                        for buffer in buffers:
                            buffer.give_back()
                    await self._register()
                    self.fetcher.wake()
            except PenstockError as error:
                log.warning("heartbeat_failed", error=error)

    async def _renew(self) -> None:
        while True:
            living = {(i.topic, i.client_id): i for buffers in self._buffers.values() for i in buffers if i.ttl is not None}
            shortest = min([LIVING, *(buffer.ttl for buffer in living.values() if buffer.ttl is not None)])
            await asyncio.sleep(shortest.total_seconds() / _RENEWALS_IN_A_TTL)
            if not living:
                continue
            try:
                for missing in living.keys() - (await topics.renew(self._database, list(living))).keys():
                    await self._begin_again(living[missing])
            except PenstockError as error:
                log.warning("renewal_failed", error=error)

    async def _begin_again(self, buffer: DeliveryBuffer) -> None:
        """The subscription ended under a living connection, such as after a long outage: go on where it was."""
        if buffer.ended or buffer not in self._buffers.get(buffer.queue, ()):
            return
        log.warning("subscription_lapsed", topic=buffer.topic, client_id=buffer.client_id)
        try:
            await self._subscribe(buffer, buffer.last_seq)
        except (Conflict, NotFound) as error:
            buffer.fail(error)
        self.fetcher.wake()

    def _written(self, results: Sequence[Settlement], outcomes: Mapping[UUID, str]) -> None:
        """Claim again from queues to which everything is back; tell receivers that acknowledge what came too late."""
        if self._returning:
            self._returning -= Counter(result.name for result in results if result.outcome is Outcome.RELEASED)
            self._claims.full_scan()
            self.fetcher.wake()
        for result in results:
            if outcomes.get(result.id) == "stale":
                for buffers in self._buffers.values():
                    for buffer in buffers:
                        buffer.came_too_late(result.id)


def _settlement(copy: Copy, outcome: Outcome, detail: str | None = None) -> Settlement:
    return Settlement(copy.job, copy.attempt, copy.lease, outcome, detail)
