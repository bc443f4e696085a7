"""Producers: writers of a stream whose appends can be repeated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.errors import Conflict, DatabaseUnavailable, PenstockError
from penstock.event import Appended, Columns, NewEvent, Position
from penstock.postgres import streams
from penstock.postgres.streams import Routed

if TYPE_CHECKING:
    from penstock.streams import Stream

T = TypeVar("T")


class Producer(Generic[T]):
    """Appends batches under numbers of their own, so that a batch whose answer was lost can be sent again safely.

    Not for several tasks at once: each writer has its own producer.

    Attributes:
        sequence: Number of its last batch; None: not yet asked for.
    """

    def __init__(self, stream: Stream[T], id: str, sequence: int | None) -> None:
        self.stream = stream
        self.id = id
        self.sequence = sequence
        self._open: Columns | None = None

    async def append(
        self,
        data: T,
        *,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        time: datetime | None = None,
    ) -> Position | None:
        """Append one event, again and again until the database has answered. See `Stream.append`.

        Returns:
            Where it is; None when it is a batch before the last one under this name: it is there, and nobody knows where.
        """
        receipts = await self.append_many([NewEvent(data, key, headers, time)])
        return receipts[0] if receipts else None

    async def append_many(self, items: Iterable[NewEvent[T] | T], *, retry: bool = True) -> Appended:
        """Append events, all or none, exactly once.

        Args:
            items: At most 1,000 events for each partition.
            retry: Repeat until the database has answered; otherwise repeat the call with the same events after an error.

        Returns:
            Where they are; nothing when they are a batch before the last one under this name, and so there already.

        Raises:
            Conflict: Another writer uses this id; or the call before was cancelled, so that nobody knows whether its events are
                there, and these are others.
        """
        columns = self.stream.encoding.columns(items)
        if not columns.payloads:
            return Appended([], [])
        if self._open is not None and columns != self._open:
            raise Conflict(
                f"whether the last batch of producer {self.id} was appended is not known",
                hint="Append the same events once more before others, or make a new producer.",
            )
        database = await self.stream.app.database()

        async def send(routed: Routed) -> Sequence[Any]:
            return await streams.append_routed(database, self.stream.name, routed, self.id, await self._number())

        async def once() -> Appended:
            await self.stream.ready()
            return await self.stream.appender().append_through(columns, send)

        before, self._open = self._open, columns
        try:
            receipts = await (database.retrying(once) if retry else once())
        except DatabaseUnavailable:
            raise
        except PenstockError:
            self._open = before  # refused, so it is not there
            raise
        self.sequence, self._open = await self._number(), None
        return receipts

    async def _number(self) -> int:
        """Of the next batch."""
        if self.sequence is None:
            self.sequence = await streams.last_sequence(await self.stream.app.database(), self.stream.name, self.id)
        return self.sequence + 1
