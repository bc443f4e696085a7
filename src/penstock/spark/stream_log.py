"""Streams for one reader: `stream_offsets` with a database. Needs no JVM.

Every call is one short transaction. Ends come from one snapshot, so that of a transaction which appended to several
partitions all or nothing is read.
"""

from __future__ import annotations

from datetime import datetime

import structlog

from penstock.errors import InvalidInput
from penstock.postgres import streams
from penstock.postgres.database import Database
from penstock.spark.stream_offsets import (
    EARLIEST,
    LATEST,
    Extent,
    Growth,
    Offsets,
    Place,
    Run,
    begins,
    count,
    limited,
    resolve,
    ripe,
    runs,
)
from penstock.spark.stream_options import StreamReadOptions, Where

log = structlog.get_logger("penstock.spark")


class StreamLog:
    """What a reader subscribed to, in one database."""

    def __init__(self, database: Database, options: StreamReadOptions) -> None:
        self._database = database
        self._options = options

    async def names(self) -> list[str]:
        """The streams, of a pattern those that match it now."""
        if self._options.names is not None:
            return list(self._options.names)
        pattern = self._options.pattern
        assert pattern is not None  # noqa: S101
        return [stream.name for stream in await streams.list_streams(self._database) if pattern.fullmatch(stream.name)]

    async def extents(self) -> dict[Place, Extent]:
        """What is there of each partition. Raises `NotFound` for a stream or an assigned partition that is not there."""
        names = await self.names()
        found = {
            place: Extent(bounds.first, bounds.next, compressed)
            for place, (bounds, compressed) in (await streams.bounds_of(self._database, names)).items()
        }
        assigned = self._options.assigned
        if assigned is None:
            return found
        if missing := sorted(assigned - found.keys()):
            stream, partition = missing[0]
            raise InvalidInput(f"stream {stream} has no partition {partition}", hint="Change the option assign.")
        return {place: extent for place, extent in found.items() if place in assigned}

    async def at(self, where: Where, name: str, otherwise: int, extents: dict[Place, Extent] | None = None) -> Offsets:
        """The offsets that an option names."""
        extents = await self.extents() if extents is None else extents
        if isinstance(where, datetime):
            found: Offsets = {}
            for stream in sorted({stream for stream, _ in extents}):
                for partition, offset in (await streams.offsets_at(self._database, stream, where)).items():
                    if extent := extents.get((stream, partition)):
                        found[stream, partition] = min(max(offset, extent.first), extent.next)
            return found
        if isinstance(where, str):
            return resolve({}, extents, name, EARLIEST if where == "earliest" else LATEST)
        return resolve(where, extents, name, otherwise)

    async def plan(self, start: Offsets, end: Offsets) -> list[Run]:
        """What lies between two offsets, less what is lost. Raises `OffsetGone`."""
        extents = await self.extents()
        return self._runs(start, end, extents)

    async def whole(self) -> list[Run]:
        """What a batch read reads, all of it from one snapshot."""
        extents = await self.extents()
        start = await self.at(self._options.starting or "earliest", "startingOffsets", EARLIEST, extents)
        end = await self.at(self._options.ending or "latest", "endingOffsets", LATEST, extents)
        if beyond := [place for place, offset in end.items() if offset > extents[place].next]:
            stream, partition = beyond[0]
            raise InvalidInput(
                f"endingOffsets is behind the end of partition {partition} of {stream}, {extents[beyond[0]].next}",
                hint="Offsets that do not exist yet cannot be read.",
            )
        return self._runs(start, end, extents)

    async def next(self, start: Offsets, limit: int | None, until: Offsets | None) -> Offsets:
        """The end of the next batch: at most `limit` events behind `start`, and nothing behind `until`."""
        extents = await self.extents()
        begin, _ = begins(start, extents, fail=self._options.fail_on_data_loss)
        ends = {place: extent.next for place, extent in extents.items()}
        if until is not None:
            ends = {place: max(begin[place], min(end, until.get(place, 0))) for place, end in ends.items()}
        growths = [Growth(stream, width, tuple(old)) for stream, width, old in await streams.growths(self._database)]
        return limited(begin, ripe(begin, ends, growths), limit)

    async def lag(self, start: Offsets) -> int:
        """How many events are behind `start`."""
        return count(start, {place: extent.next for place, extent in (await self.extents()).items()})

    def _runs(self, start: Offsets, end: Offsets, extents: dict[Place, Extent]) -> list[Run]:
        known = {place: offset for place, offset in start.items() if place in end}
        begin, lost = begins(known, {p: e for p, e in extents.items() if p in end}, fail=self._options.fail_on_data_loss)
        for words in lost:
            log.warning("data_lost", lost=words)
        return runs(begin, {place: offset for place, offset in end.items() if place in extents}, extents)
