"""Following streams: what is appended is read once for all followers of a stream in this process.

A broadcast reads the end of one stream, woken by notifications, and keeps its newest events ready, as JSON, up to a few
mebibytes. A follower that keeps up takes them from there; one that lags reads from the database by itself until it has caught
up. So a thousand followers cost one read for an event that comes, and a slow one costs no memory.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from penstock.core.logs import get_logger
from penstock.core.polling import wait_for_event
from penstock.errors import DatabaseUnavailable, NotFound, OffsetGone, PenstockError
from penstock.http.streams.events import Piece, pieces_of
from penstock.postgres.database import Database
from penstock.postgres.notifications import Kind, Notification, Notifications
from penstock.streams import queries as streams
from penstock.streams.models import Chunk, StreamRecord
from penstock.streams.waiting import polling_for_events

log = get_logger("penstock.http")
_LIMIT = 500
_READY_BYTES = 4 << 20
_AT_ONCE_BYTES = 1 << 20
_POLL_S = 1.0
_LOOK_FOR_GROWTH_EVERY_S = 5.0


class Broadcast:
    """The newest events of one stream.

    Args:
        database: Database to read from.
        record: The stream.
        channel: What this process listens on.
    """

    def __init__(self, database: Database, record: StreamRecord, channel: str) -> None:
        self.record = record
        self.ends: dict[int, int] = {}
        self.waiting: set[asyncio.Event] = set()
        self.polling = polling_for_events(_POLL_S)
        self._database = database
        self._channel = channel
        self._ready: dict[int, deque[Piece]] = {}
        self._order: deque[Piece] = deque()
        self._bytes = 0
        self._dropped: NotFound | None = None

    def check(self) -> None:
        """Raises `NotFound` when the stream was dropped."""
        if self._dropped is not None:
            raise NotFound(self._dropped.message, hint="It was dropped.")

    def ready(self, partition: int, offset: int) -> list[Piece] | None:
        """What is kept of a partition from an offset on; None when some of it has to be read from the database."""
        pieces = self._ready.get(partition)
        if not pieces or pieces[0].first > offset:
            return None
        return [piece for piece in pieces if piece.next > offset]

    def wake(self) -> None:
        """Let all followers look."""
        for event in self.waiting:
            event.set()

    async def run(self) -> None:
        """Read what is appended, until cancelled or the stream is dropped."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + _LOOK_FOR_GROWTH_EVERY_S
        while True:
            self.polling.begin()
            try:
                if not self.ends:
                    self.ends = {at: found.next for at, found in (await streams.bounds(self._database, self.record.name)).items()}
                    self.wake()
                if loop.time() > look_at:
                    look_at = loop.time() + _LOOK_FOR_GROWTH_EVERY_S
                    await self._look_for_growth()
                if await self._read():
                    self.polling.found()
                else:
                    await self.polling.rest(self._announce)
            except OffsetGone:
                # Overtaken by retention: begin at the end; followers read what is between, and find out that it is gone.
                self.ends = {}
                self._forget()
            except NotFound as error:
                self._dropped = error
                self.wake()
                return
            except PenstockError as error:
                log.warning("broadcast_failed", stream=self.record.name, error=error)
                await self.polling.back_off()

    async def _announce(self) -> None:
        await streams.wait_for_events(self._database, self.record.name, self._channel)

    async def _read(self) -> bool:
        chunks = await streams.read_chunks(self._database, self.record.name, self.ends, _LIMIT, _AT_ONCE_BYTES, id=self.record.id)
        for piece in pieces_of(self.record, chunks, self.ends):
            self._ready.setdefault(piece.partition, deque()).append(piece)
            self._order.append(piece)
            self._bytes += piece.size
        while self._bytes > _READY_BYTES and self._order:
            oldest = self._order.popleft()
            self._ready[oldest.partition].popleft()
            self._bytes -= oldest.size
        if chunks:
            self.wake()
        return bool(chunks)

    async def _look_for_growth(self) -> None:
        for partition, bounds in (await streams.bounds(self._database, self.record.name)).items():
            if partition not in self.ends:
                self.ends[partition] = bounds.first
                self.wake()

    def _forget(self) -> None:
        self._ready.clear()
        self._order.clear()
        self._bytes = 0


class Follower:
    """A follower of a stream.

    Args:
        database: Database to read from.
        broadcast: The newest events of the stream.
        at: Where it is in each partition; goes on as events are taken.
        grows: Whether partitions that come later are followed as well.
    """

    def __init__(self, database: Database, broadcast: Broadcast, at: dict[int, int], grows: bool) -> None:
        self.at = at
        self.event = asyncio.Event()
        self._database = database
        self._broadcast = broadcast
        self._grows = grows

    async def next(self, within: float) -> list[Piece]:
        """What comes next in each partition, and goes past it; none when nothing came, or could be read.

        Raises:
            OffsetGone: Retention dropped what comes next.
            NotFound: The stream was dropped.
        """
        self.event.clear()
        self._broadcast.check()
        behind = self._behind()
        if not behind:
            await wait_for_event(self.event, within)
            self._broadcast.check()
            behind = self._behind()
        found: list[Piece] = []
        missing: dict[int, int] = {}
        for partition in behind:
            ready = self._broadcast.ready(partition, self.at[partition])
            if ready is None:
                missing[partition] = self.at[partition]
            else:
                found += [piece.since(self.at[partition]) for piece in ready]
        if missing:
            found += pieces_of(self._broadcast.record, await self._read(missing), self.at)
        for piece in found:
            self.at[piece.partition] = max(self.at[piece.partition], piece.next)
        return found

    async def _read(self, wanted: dict[int, int]) -> list[Chunk]:
        try:
            record = self._broadcast.record
            return await streams.read_chunks(self._database, record.name, wanted, _LIMIT, _AT_ONCE_BYTES, id=record.id)
        except DatabaseUnavailable as error:
            # It comes back, and a browser would not when it were refused meanwhile.
            log.warning("read_failed", stream=self._broadcast.record.name, error=error)
            await asyncio.sleep(random.uniform(0.2, 0.6))
            return []

    def _behind(self) -> list[int]:
        if self._grows:
            for partition in self._broadcast.ends.keys() - self.at.keys():
                self.at[partition] = 0
        return [partition for partition, at in self.at.items() if at < self._broadcast.ends.get(partition, 0)]


@dataclass(slots=True)
class _Running:
    broadcast: Broadcast
    task: asyncio.Task[None]
    followers: int = 0


class Broadcaster:
    """The broadcasts of one process; a broadcast runs while a client follows it.

    Args:
        database: Database to read from.
        channel: What this process listens on.
        stopping: Set when the server stops.
    """

    def __init__(self, database: Database, channel: str, stopping: asyncio.Event) -> None:
        self._database = database
        self._channel = channel
        self._stopping = stopping
        self._running: dict[str, _Running] = {}

    def subscribe(self, notifications: Notifications) -> None:
        """Be told of what this process listens to."""
        notifications.subscribe(self._came, Kind.EVENTS, Kind.CONNECTED)

    def _came(self, notification: Notification) -> None:
        for running in self._running.values():
            if notification.kind is Kind.CONNECTED or notification.subject == str(running.broadcast.record.id):
                running.broadcast.polling.wake()

    def stop(self) -> None:
        """Wake all followers."""
        for running in self._running.values():
            running.broadcast.wake()

    async def close(self) -> None:
        """Take back that this process waits for events."""
        with suppress(PenstockError):
            await streams.stop_waiting(self._database, self._channel)

    @asynccontextmanager
    async def waiting(self, record: StreamRecord, event: asyncio.Event) -> AsyncIterator[Broadcast]:
        """The broadcast of a stream, which sets the event when something came."""
        running = self._running.get(record.name)
        if running is None or running.broadcast.record.id != record.id:
            broadcast = Broadcast(self._database, record, self._channel)
            running = _Running(broadcast, asyncio.create_task(broadcast.run(), name="penstock-broadcast"))
            before, self._running[record.name] = self._running.get(record.name), running
            if before is not None:
                before.broadcast.wake()
        running.followers += 1
        running.broadcast.waiting.add(event)
        if self._stopping.is_set():
            event.set()
        try:
            yield running.broadcast
        finally:
            running.broadcast.waiting.discard(event)
            running.followers -= 1
            if running.followers == 0:
                if self._running.get(record.name) is running:
                    del self._running[record.name]
                running.task.cancel()
                await asyncio.gather(running.task, return_exceptions=True)

    @asynccontextmanager
    async def following(self, record: StreamRecord, at: Mapping[int, int], *, grows: bool = False) -> AsyncIterator[Follower]:
        """Follow a stream from these offsets on."""
        event = asyncio.Event()
        async with self.waiting(record, event) as broadcast:
            follower = Follower(self._database, broadcast, dict(at), grows)
            follower.event = event
            yield follower
