"""Deliveries: subscribers of topics that are connections.

Each connection is a subscriber with a queue of its own, like any other, so filters, `unique`, `run_after` and publishers that
wait for outcomes work in the usual way. This module opens and closes connections, keeps their subscriptions with one renewal for
all, and ends a connection whose client id another one has now; subscriptions of a process that died are not renewed, and end. The
copies come from `delivery_source.py`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta

from penstock.core.logs import get_logger
from penstock.errors import Conflict, DatabaseUnavailable, NotFound, PenstockError
from penstock.http.topics.delivery_buffer import Copy, DeliveryBuffer
from penstock.http.topics.delivery_source import DeliverySource
from penstock.jobs.models import Outcome
from penstock.postgres.database import Database
from penstock.postgres.listener import Listener
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.settings import Settings
from penstock.topics import queries as topics
from penstock.topics.models import Subscribed

log = get_logger("penstock.http")
LIVING = timedelta(seconds=30)
"""Time to live of a subscription that ends with its connection, for when no server can end it."""
_RENEWALS_IN_A_TTL = 4
_ASK_AGAIN_S = 1.0
# A connection has no keys: of an encrypted topic it could hand out nothing.
_OPTIONS = {"keep_result": True, "encrypted": False}
_TAKEN_OVER = "another connection has this client id now"


class Deliveries:
    """The connections of this process that receive topics.

    Args:
        database: Database of the topics.
        listener: Listens for this process.
        settings: Intervals.
    """

    def __init__(self, database: Database, listener: Listener, settings: Settings) -> None:
        self._database = database
        self._source = DeliverySource(database, listener, settings)
        self._opening: dict[tuple[str, str], list[DeliveryBuffer]] = {}
        self._named: set[str] = set()
        self._others_came = asyncio.Event()
        self._stopped = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connections(self) -> int:
        """How many there are."""
        return sum(1 for _ in self._source)

    async def open(self, buffer: DeliveryBuffer, since: int | None, last: int | None = None) -> Subscribed:
        """Subscribe a connection. From now on copies come to its buffer.

        Args:
            buffer: Buffer of the connection.
            since: The latest message that it saw; None: begin with what comes, and the last ones of `catch_up`.
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
                await self._source.caught_up()
                await buffer.look_for_missed(self._database)
            if self._stopped:
                buffer.end(self._stopped)
            if not buffer.ended:
                self._source.add(buffer)
        finally:
            self._opening[client].remove(buffer)
            if not self._opening[client]:
                del self._opening[client]
        self._source.full_scan()
        return receipt

    async def close(self, buffer: DeliveryBuffer) -> None:
        """End a connection: give back what it did not hand out, and end its subscription unless that stays."""
        self._source.remove(buffer)
        buffer.end("closed")
        self._source.give_back(buffer)
        with suppress(DatabaseUnavailable):
            await self._source.caught_up()
        others = self._source.of(buffer.queue) or (buffer.topic, buffer.client_id) in self._opening
        if not buffer.stays and not others:
            # When the database is away now, the time to live ends it.
            with suppress(PenstockError):
                await topics.unsubscribe(self._database, buffer.topic, buffer.client_id, True)
        self._source.fetcher.wake()

    def done(self, copy: Copy, outcome: Outcome = Outcome.SUCCEEDED, detail: str | None = None) -> None:
        """A copy was handed out, or its receiver says what became of it."""
        self._source.settle(copy, outcome, detail)

    def room_made(self) -> None:
        """A buffer was emptied."""
        self._source.fetcher.wake()

    def subscribe(self, notifications: Notifications) -> None:
        """Be told of what this process listens to."""
        notifications.wake(self.wake, Kind.JOBS, Kind.CONNECTED)
        notifications.wake(self._source.full_scan, Kind.FULL_SCAN)
        notifications.subscribe(self._taken, Kind.TAKEN)

    def wake(self) -> None:
        """Copies may have come."""
        self._source.fetcher.wake()

    def stop(self, reason: str) -> None:
        """End all connections, also those that are being opened."""
        self._stopped = reason
        for buffer in self._source:
            buffer.end(reason)

    async def aclose(self) -> None:
        """Settle what was handed out, and take leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._source.aclose()

    async def _start(self) -> None:
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._renew(), name="penstock-deliveries-renew"),
                asyncio.create_task(self._look_for_others(), name="penstock-deliveries-others"),
            ]
            await self._source.start()

    async def _subscribe(self, buffer: DeliveryBuffer, since: int | None) -> Subscribed:
        receipts = await topics.subscribe_many(
            self._database, buffer.topic, [buffer.client_id], ttl=buffer.ttl, filter=buffer.filter, since=since, options=_OPTIONS
        )
        return receipts[0]

    # -- another connection with the same client id

    def _end_others(self, buffer: DeliveryBuffer) -> None:
        """End the connections of this process that had the queue, and give back what they had not begun to write."""
        opening = self._opening[buffer.topic, buffer.client_id]
        for other in [*opening[: opening.index(buffer)], *self._source.of(buffer.queue)]:
            if other.alone:
                other.end(_TAKEN_OVER)
                self._source.give_back(other)

    def _taken(self, notification: Notification) -> None:
        # Every role that may connect to the database can send one: `_look_for_others` asks it.
        if any(buffer.alone for buffer in self._source.of(notification.subject)):
            self._named.add(notification.subject)
            self._others_came.set()

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
                await asyncio.sleep(_ASK_AGAIN_S)
                continue
            for queue, id in receiving.items():
                for buffer in self._source.of(queue):
                    if buffer.alone and buffer.id != id:
                        buffer.end(_TAKEN_OVER)
                        self._source.give_back(buffer)

    # -- subscriptions

    async def _renew(self) -> None:
        while True:
            living = {(buffer.topic, buffer.client_id): buffer for buffer in self._source if buffer.ttl is not None}
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
        if buffer.ended or buffer not in self._source.of(buffer.queue):
            return
        log.warning("subscription_lapsed", topic=buffer.topic, client_id=buffer.client_id)
        try:
            await self._subscribe(buffer, buffer.last_seq)
        except (Conflict, NotFound) as error:
            buffer.fail(error)
        self._source.fetcher.wake()
