"""Following a stream without a group: nobody remembers where this reader is but itself."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from penstock.encoding import Undecodable, unreadable
from penstock.errors import DatabaseUnavailable, InvalidInput, NotFound, OffsetGone, PenstockError
from penstock.event import Event, Gone
from penstock.logs import get_logger
from penstock.postgres import streams
from penstock.postgres.listener import Listener
from penstock.waiting import happens

if TYPE_CHECKING:
    from penstock.streams import Stream

log = get_logger("penstock.streams")
T = TypeVar("T")
Start: TypeAlias = Literal["earliest", "latest"] | datetime | Mapping[int, int]
_LIMIT = 500
_GROWN_EVERY_S = 5.0
_MOST_BYTES = 32 << 20


class Tail(Generic[T]):
    """Follows a stream. Made by `Stream.tail`; iterate over it, and close it (`aclose`, or `async with`).

    An event that cannot be read raises `Unreadable`; whoever asks for the next one goes on past it.
    """

    def __init__(self, stream: Stream[T], start: Start, partitions: list[int] | None, gone: Gone) -> None:
        self._stream = stream
        self._start = start
        self._partitions = partitions
        self._gone = gone
        self._events: AsyncIterator[Event[T]] | None = None

    def __aiter__(self) -> AsyncIterator[Event[T]]:
        return self

    async def __anext__(self) -> Event[T]:
        if self._events is None:
            self._events = self._follow()
        event = await self._events.__anext__()
        if isinstance(event.data, Undecodable):
            raise unreadable(self._stream.name, event)
        return event

    async def __aenter__(self) -> Tail[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following."""
        if self._events is not None:
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _follow(self) -> AsyncIterator[Event[T]]:
        stream = self._stream
        await stream.ready()
        database = await stream.app.database()
        at, known = await self._begin()
        # One read brings so much of each partition.
        most_bytes = max(_MOST_BYTES // max(len(at), 1), 65_536)
        look_at = asyncio.get_running_loop().time() + _GROWN_EVERY_S
        came = asyncio.Event()
        channel = f"penstock_{secrets.token_hex(8)}"
        listening = asyncio.create_task(Listener(database, [channel], lambda _: came.set()).run(), name="penstock-listener")
        idle = 0
        try:
            while True:
                came.clear()
                try:
                    if self._partitions is None and asyncio.get_running_loop().time() > look_at:
                        look_at = asyncio.get_running_loop().time() + _GROWN_EVERY_S
                        there = await stream.bounds()
                        at.update({partition: there[partition].first for partition in there.keys() - known})
                        known |= there.keys()
                    chunks = await streams.read_chunks(database, stream.name, at, _LIMIT, most_bytes)
                except OffsetGone:
                    await self._skip(at)
                    continue
                except DatabaseUnavailable as error:
                    log.warning("read_failed", stream=stream.name, error=error)
                    await asyncio.sleep(random.uniform(0.2, 0.6))
                    continue
                for chunk in chunks:
                    for event in stream.encoding.each(chunk, at[chunk.partition]):
                        yield event
                    at[chunk.partition] = chunk.next_offset
                if chunks:
                    idle = 0
                    continue
                # Looks again at once after it said that it waits, and soon after: what is committed just now notified nobody.
                if idle == 0:
                    with suppress(DatabaseUnavailable):
                        await streams.wait_for_events(database, stream.name, channel)
                elif await happens(came, (0.005, 0.05)[idle - 1] if idle < 3 else self._pause()):
                    idle = 0
                    continue
                idle = idle + 1 if idle < 20 else 0
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            with suppress(PenstockError):
                await streams.stop_waiting(database, channel)

    async def _begin(self) -> tuple[dict[int, int], set[int]]:
        """Where to start in each partition; and all partitions that there are."""
        stream = self._stream
        places = await stream.places(self._start)
        there = await stream.bounds()
        if unknown := (places.keys() | set(self._partitions or ())) - there.keys():
            raise NotFound(f"stream {stream.name} has no partition {min(unknown)}", hint=f"It has {len(there)}, from 0.")
        for partition, offset in places.items():
            if not 0 <= offset <= there[partition].next:
                raise InvalidInput(
                    f"partition {partition} of stream {stream.name} has no offset {offset}",
                    hint=f"The next to come is {there[partition].next}.",
                )
        wanted = places.keys() if self._partitions is None else set(self._partitions)
        return {at: offset for at, offset in places.items() if at in wanted}, set(there)

    async def _skip(self, at: dict[int, int]) -> None:
        """Retention dropped what was next in some partition: do what was asked for."""
        bounds = await self._stream.bounds()
        for partition, offset in at.items():
            first, last = bounds[partition].first, bounds[partition].next
            if offset < first:
                if self._gone is Gone.ERROR:
                    raise OffsetGone(
                        f"offset {offset} of partition {partition} of stream {self._stream.name} is gone",
                        hint=f"The first that is there is {first}, the next to come {last}.",
                    )
                at[partition] = first if self._gone is Gone.EARLIEST else last
                log.warning("events_skipped", stream=self._stream.name, partition=partition, wanted=offset, at=at[partition])

    def _pause(self) -> float:
        return self._stream.app.settings.poll_interval.total_seconds() * random.uniform(0.7, 1.0)
