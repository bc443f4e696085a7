"""Appends to streams: those that come at the same time, for one stream, are one statement and one commit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from penstock.errors import NotFound
from penstock.postgres.database import Database
from penstock.streams import queries as streams
from penstock.streams.accumulator import Accumulator
from penstock.streams.models import Appended, Columns
from penstock.streams.queries import Routed

_MOST_STREAMS = 1_000


class Appends:
    """Appends for all requests of this process.

    Args:
        database: Database to append to.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._accumulators: OrderedDict[str, Accumulator] = OrderedDict()

    async def append(self, name: str, columns: Columns, producer: str | None, sequence: int | None, user: str) -> Appended | None:
        """Append events, all or none.

        Args:
            name: The stream.
            columns: The events.
            producer: Name of the producer, whose batches have numbers; None: appended each time.
            sequence: Number of this batch.
            user: Name of the HTTP user, to whom the producer's name belongs.

        Returns:
            Where they are; None for a batch before the producer's last one, of which only that it is there is known.
        """
        accumulator = self._accumulators.get(name)
        if accumulator is None:
            accumulator = self._accumulators[name] = Accumulator(partial(self._send, name), partial(self._width, name))
        self._accumulators.move_to_end(name)
        while len(self._accumulators) > _MOST_STREAMS:
            self._accumulators.popitem(last=False)
        if producer is None:
            receipts = await accumulator.append(columns)
        else:

            async def numbered(routed: Routed) -> Sequence[Any]:
                return await streams.append_routed(self._database, name, routed, producer, sequence, user)

            receipts = await accumulator.append_through(columns, numbered)
        return receipts if len(receipts) == len(columns) else None

    async def _send(self, name: str, routed: Routed) -> Sequence[Any]:
        return await streams.append_routed(self._database, name, routed)

    async def _width(self, name: str) -> int:
        record = await streams.find_stream(self._database, name)
        if record is None:
            raise NotFound(f"no such stream: {name}")
        return record.partitions
