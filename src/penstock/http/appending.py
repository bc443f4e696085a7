"""Appends to streams: those that come at the same time, for one stream, are one statement and one commit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.appender import Appender
from penstock.errors import NotFound
from penstock.event import Columns
from penstock.postgres import streams
from penstock.postgres.database import Database
from penstock.postgres.streams import Routed

_MOST_STREAMS = 1_000


class Appending:
    """Appends for all requests of this process.

    Args:
        database: Where.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._appenders: OrderedDict[str, Appender] = OrderedDict()

    async def append(
        self, name: str, columns: Columns, producer: str | None, sequence: int | None, user: str
    ) -> tuple[list[tuple[int, int]], bool]:
        """Append events, all or none.

        Args:
            name: The stream.
            columns: The events.
            producer: Name of the producer, whose batches have numbers; None: appended each time.
            sequence: Number of this batch.
            user: Name of the HTTP user, to whom the producer's name belongs.

        Returns:
            Where the first is, as (partition, offset); and whether they are known to be there by this number, False for a batch
            before the producer's last one.
        """
        appender = self._appenders.get(name)
        if appender is None:
            appender = self._appenders[name] = Appender(partial(self._send, name), partial(self._width, name))
        self._appenders.move_to_end(name)
        while len(self._appenders) > _MOST_STREAMS:
            self._appenders.popitem(last=False)
        if producer is None:
            receipts = await appender.append(columns)
        else:

            async def numbered(routed: Routed) -> Sequence[Any]:
                return await streams.append_routed(self._database, name, routed, producer, sequence, user)

            receipts = await appender.append_through(columns, numbered)
        return [(place.partition, place.offset) for place in receipts[:1]], len(receipts) == len(columns)

    async def _send(self, name: str, routed: Routed) -> Sequence[Any]:
        return await streams.append_routed(self._database, name, routed)

    async def _width(self, name: str) -> int:
        record = await streams.find_stream(self._database, name)
        if record is None:
            raise NotFound(f"no such stream: {name}")
        return record.partitions
