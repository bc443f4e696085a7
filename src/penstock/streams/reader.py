"""Readers: they follow a stream without a group, and only the reader itself knows its position."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Generic, TypeVar

from penstock.core.logs import get_logger
from penstock.core.polling import IdleLimit, idle_seconds
from penstock.errors import DatabaseUnavailable, InvalidInput, NotFound, OffsetGone, PenstockError
from penstock.postgres.listener import Listener
from penstock.streams import queries as streams
from penstock.streams.codec import Undecodable, unreadable
from penstock.streams.declared_stream import DeclaredStream
from penstock.streams.models import Event, OffsetReset, Start
from penstock.streams.sync import SyncStreamReader
from penstock.streams.waiting import polling_for_events

log = get_logger("penstock.streams")
T = TypeVar("T")
_LIMIT = 500
GROWN_EVERY_S = 5.0
_MOST_BYTES = 32 << 20


class StreamReader(Generic[T]):
    """Follows a stream. `Stream.tail` makes it; iterate over it, and close it (`aclose`, or `async with`).

    An event that cannot be read raises `Unreadable`; the next request continues behind it. So does the request after one that
    was cancelled, as `asyncio.wait_for` does after its time.
    """

    def __init__(
        self,
        stream: DeclaredStream[T],
        start: Start,
        partitions: list[int] | None,
        auto_offset_reset: OffsetReset,
        idle_timeout: timedelta | None,
    ) -> None:
        self._stream = stream
        self._start = start
        self._partitions = partitions
        self._auto_offset_reset = auto_offset_reset
        self._idle = IdleLimit(idle_seconds(idle_timeout))
        self._chunks: AsyncIterator[Iterator[Event[T]]] | None = None
        self._events: Iterator[Event[T]] = iter(())  # of the chunk that the program is in
        # Where it is, since its first look: the next offset of each partition, all partitions that it knows, when it looks
        # for further ones, and the stream's id.
        self._at: dict[int, int] | None = None
        self._known: set[int] = set()
        self._look_at = 0.0
        self._id: int | None = None

    @property
    def sync(self) -> SyncStreamReader[T]:
        """The blocking half, for threads without an event loop."""
        return SyncStreamReader(self, self._stream.context.background)

    def __aiter__(self) -> AsyncIterator[Event[T]]:
        return self

    async def __anext__(self) -> Event[T]:
        while True:
            try:
                event = next(self._events, None)
            except Exception:
                await self.aclose()  # what cannot be decoded is not passed over
                raise
            if event is None:
                self._events = await self._idle.next(self._next_chunk)
            elif isinstance(event.data, Undecodable):
                raise unreadable(self._stream.name, event)
            else:
                return event

    async def _next_chunk(self) -> Iterator[Event[T]]:
        if self._chunks is None:
            self._chunks = self._follow()
        try:
            return await self._chunks.__anext__()
        except asyncio.CancelledError:
            # It ends with the request that it worked for; unless the iteration is over, the next request continues.
            if not self._idle.expired():
                self._chunks = None
            raise

    async def __aenter__(self) -> StreamReader[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following."""
        self._events = iter(())
        if self._chunks is not None:
            await self._chunks.aclose()  # type: ignore[attr-defined]

    async def _follow(self) -> AsyncIterator[Iterator[Event[T]]]:
        stream = self._stream
        await stream.ready()
        database = await stream.context.database()
        if self._at is None:
            # Before the offsets, so that these are not taken for those of a stream that is created again in between.
            record = await streams.find_stream(database, stream.name)
            self._id = None if record is None else record.id
            self._at, self._known = await self._begin()
            self._look_at = asyncio.get_running_loop().time() + GROWN_EVERY_S
        at, known = self._at, self._known
        # One read returns at most this many bytes of each partition.
        most_bytes = max(_MOST_BYTES // max(len(at), 1), 65_536)
        polling = polling_for_events(stream.context.settings.poll_interval.total_seconds())
        channel = f"penstock_{secrets.token_hex(8)}"
        announce = partial(streams.wait_for_events, database, stream.name, channel)
        listening = asyncio.create_task(Listener(database, [channel], lambda _: polling.wake()).run(), name="penstock-listener")
        try:
            while True:
                polling.begin()
                try:
                    if self._partitions is None and asyncio.get_running_loop().time() > self._look_at:
                        self._look_at = asyncio.get_running_loop().time() + GROWN_EVERY_S
                        there = await stream.bounds()
                        at.update({partition: there[partition].first for partition in there.keys() - known})
                        known |= there.keys()
                    try:
                        chunks = await streams.read_chunks(database, stream.name, at, _LIMIT, most_bytes, id=self._id)
                    except OffsetGone:
                        await self._skip(at)
                        continue
                except DatabaseUnavailable as error:
                    log.warning("read_failed", stream=stream.name, error=error)
                    await polling.back_off()
                    continue
                for chunk in chunks:
                    yield stream.encoding.each(chunk, at[chunk.partition])
                    at[chunk.partition] = chunk.next_offset
                if chunks:
                    polling.found()
                    continue
                self._idle.found_nothing()
                with suppress(DatabaseUnavailable):
                    await polling.rest(announce)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            with suppress(PenstockError):
                await streams.stop_waiting(database, channel)

    async def _begin(self) -> tuple[dict[int, int], set[int]]:
        """The starting offset of each partition, and all existing partitions."""
        stream = self._stream
        offsets = await stream.offsets_at(self._start)
        there = await stream.bounds()
        if unknown := (offsets.keys() | set(self._partitions or ())) - there.keys():
            raise NotFound(f"stream {stream.name} has no partition {min(unknown)}", hint=f"It has {len(there)}, from 0.")
        for partition, offset in offsets.items():
            if not 0 <= offset <= there[partition].next:
                raise InvalidInput(
                    f"partition {partition} of stream {stream.name} has no offset {offset}",
                    hint=f"The next event gets offset {there[partition].next}.",
                )
        wanted = offsets.keys() if self._partitions is None else set(self._partitions)
        return {at: offset for at, offset in offsets.items() if at in wanted}, set(there)

    async def _skip(self, at: dict[int, int]) -> None:
        """Apply `auto_offset_reset` to partitions of which retention dropped the next events."""
        bounds = await self._stream.bounds()
        for partition, offset in at.items():
            first, last = bounds[partition].first, bounds[partition].next
            if offset < first:
                if self._auto_offset_reset is OffsetReset.ERROR:
                    raise OffsetGone(
                        f"offset {offset} of partition {partition} of stream {self._stream.name} is gone",
                        hint=f"The first stored offset is {first}, and the next event gets {last}.",
                    )
                at[partition] = first if self._auto_offset_reset is OffsetReset.EARLIEST else last
                log.warning("events_skipped", stream=self._stream.name, partition=partition, wanted=offset, at=at[partition])
