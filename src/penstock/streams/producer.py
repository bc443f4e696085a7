"""Producers: writers of a stream whose appends can be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

from penstock.core.tracing import sending
from penstock.errors import Conflict, DatabaseUnavailable, PenstockError
from penstock.streams import queries as streams
from penstock.streams.declared_stream import DeclaredStream
from penstock.streams.models import Appended, Columns, NewEvent, Position
from penstock.streams.queries import Routed
from penstock.streams.sync import SyncProducer

T = TypeVar("T")


class Producer(Generic[T]):
    """Appends numbered batches, so that a batch whose answer was lost can be sent again safely.

    A producer is not safe for several tasks at once: each writer has its own producer.

    Attributes:
        sequence: Number of its last batch; None: not yet read from the database.
        stream: Stream that it appends to.
        id: Name of the producer, under which a repeated append is recognised.
    """

    def __init__(self, stream: DeclaredStream[T], id: str, sequence: int | None) -> None:
        self.stream = stream
        self.id = id
        self.sequence = sequence
        self._open: Columns | None = None

    @property
    def sync(self) -> SyncProducer[T]:
        """The blocking half, for threads without an event loop."""
        return SyncProducer(self, self.stream.context.background)

    async def append(
        self,
        data: T,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        time: datetime | None = None,
    ) -> Position | None:
        """Append one event, and repeat the call until the database has answered. See `Stream.append`.

        Returns:
            Position of the event; None when it is a batch before the last one under this name: it is appended, at a position
            that is not known.
        """
        receipts = await self.append_many([NewEvent(data, key, headers, time)])
        return receipts[0] if receipts else None

    async def append_many(self, items: Iterable[NewEvent[T] | T], *, retry: bool = True) -> Appended:
        """Append events atomically and exactly once.

        Args:
            items: At most 1,000 events for each partition.
            retry: Whether to repeat until the database has answered. Otherwise repeat the call with the same events after an
                error.

        Returns:
            Positions of the events; none when they are a batch before the last one under this name, which is appended already.

        Raises:
            Conflict: Another writer uses this id; or the call before was cancelled, so that it is not known whether its events
                were appended, and these events are different ones.
        """
        encoding = self.stream.encoding
        # Of an encrypted stream, the same batch has to be the same bytes when it is sent again.
        place = f"{self.id} {await self._number()}" if encoding.seals else None
        columns = encoding.columns(items, place)
        if not columns.payloads:
            return Appended([], [])
        if self._open is not None and columns != self._open:
            raise Conflict(
                f"it is not known whether the last batch of producer {self.id} was appended",
                hint="Append the same events once more before others, or make a new producer.",
            )
        database = await self.stream.context.database()

        async def send(routed: Routed) -> Sequence[Any]:
            return await streams.append_routed(database, self.stream.name, routed, self.id, await self._number())

        async def once() -> Appended:
            await self.stream.ready()
            return await self.stream.accumulator().append_through(traced, send)

        before, self._open = self._open, columns
        try:
            with sending(self.stream.context.tracing, "append", self.stream.name, len(columns)) as traceparent:
                traced = columns.traced(traceparent)
                receipts = await (database.retrying(once) if retry else once())
        except DatabaseUnavailable:
            raise
        except PenstockError:
            self._open = before  # refused, so it was not appended
            raise
        self.sequence, self._open = await self._number(), None
        return receipts

    async def _number(self) -> int:
        """The number of the next batch."""
        if self.sequence is None:
            self.sequence = await streams.last_sequence(await self.stream.context.database(), self.stream.name, self.id)
        return self.sequence + 1
