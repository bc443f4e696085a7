"""Streams for one reader: the arithmetic of `offsets` with a database. Needs no JVM.

Every query is one short transaction. All ends come from one snapshot, so a reader gets all events or none of a transaction that
appended to several partitions.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.logs import get_logger
from penstock.errors import InvalidInput, OffsetGone
from penstock.postgres.database import Database
from penstock.spark.streams.offsets import (
    EARLIEST,
    LATEST,
    ROLLED_BACK,
    Extent,
    Growth,
    Offsets,
    Place,
    Run,
    Since,
    begins,
    count,
    limited,
    resolve,
    ripe,
    rolled_back,
    runs,
    was_recreated,
)
from penstock.spark.streams.options import EventReadOptions, Where
from penstock.streams import queries as streams

log = get_logger("penstock.spark")


class StreamLog:
    """The streams that a reader reads, in one database.

    Args:
        database: The database.
        options: Options of the reader.
        known: The identities of the streams that were read before, by name, as far as they are known.

    Attributes:
        seen: The extents of all partitions when they were last read.
    """

    def __init__(self, database: Database, options: EventReadOptions, known: Mapping[str, str] | None = None) -> None:
        self._database = database
        self._options = options
        self._known = dict(known or {})
        self._growths: list[Growth] = []
        self.seen: dict[Place, Extent] = {}

    @property
    def identities(self) -> dict[str, str]:
        """The identities of the streams when the extents were last read, by name."""
        return {stream: extent.identity for (stream, _), extent in self.seen.items() if extent.identity is not None}

    @property
    def was_recreated(self) -> bool:
        """Whether a stream was dropped and created again since the reader read it."""
        return any(was_recreated(stream, extent, self._known) for (stream, _), extent in self.seen.items())

    async def names(self) -> list[str]:
        """Names of the streams; of a pattern, those that match it now."""
        if self._options.names is not None:
            return list(self._options.names)
        pattern = self._options.pattern
        assert pattern is not None  # noqa: S101
        return [stream.name for stream in await streams.list_streams(self._database) if pattern.fullmatch(stream.name)]

    async def extents(self) -> dict[Place, Extent]:
        """The extent of each partition.

        Raises:
            NotFound: A stream does not exist.
            InvalidInput: An assigned partition does not exist.
        """
        rows = await streams.bounds_of(self._database, await self.names())
        self._growths = [Growth(row.stream, width, tuple(ends)) for row in rows for width, ends in row.growths]
        found = {
            (row.stream, row.partition): Extent(row.first, row.next, row.compressed, row.identity, row.restored) for row in rows
        }
        self.seen = found
        assigned = self._options.assigned
        if assigned is None:
            return found
        if missing := sorted(assigned - found.keys()):
            stream, partition = missing[0]
            raise InvalidInput(f"stream {stream} has no partition {partition}", hint="Change the option assign.")
        self.seen = {place: extent for place, extent in found.items() if place in assigned}
        return self.seen

    async def at(self, where: Where, name: str, otherwise: int, extents: dict[Place, Extent] | None = None) -> Offsets:
        """The offsets that an option names.

        Args:
            where: What the option says.
            name: Name of the option.
            otherwise: Offset of partitions that the option does not name, unless the offsets are of a checkpoint: these name all
                partitions that there were, and the others came later and begin at 0.
            extents: Extents of the partitions; None: they are read.

        Raises:
            InvalidInput: The option names what is not there.
            OffsetGone: The offsets are those of a stream that was dropped and created again, and the options make that an error.
        """
        extents = await self.extents() if extents is None else extents
        if isinstance(where, Since):
            return await self._since(where, f"{name}ByTimestamp", otherwise, extents)
        if isinstance(where, str):
            return resolve({}, extents, name, EARLIEST if where == "earliest" else LATEST)
        recreated = {stream for (stream, _), extent in extents.items() if was_recreated(stream, extent, self._options.identities)}
        if recreated and self._options.fail_on_data_loss:
            raise OffsetGone(
                f"{name} is of a stream {min(recreated)} that was dropped and created again since",
                hint="Leave the stream out, or set failOnDataLoss to false: the new one is read from its beginning.",
            )
        if self._options.fail_on_data_loss and (
            rolled := rolled_back(
                {place: offset for place, offset in where.items() if offset >= 0}, extents, self._options.identities
            )
        ):
            raise OffsetGone(f"{name}: {'; '.join(rolled.values())}", hint=ROLLED_BACK)
        if name in self._options.whole:
            # Not the first offset that is left: what retention has dropped since counts as lost.
            otherwise = 0
        return resolve(
            {place: EARLIEST if place[0] in recreated else offset for place, offset in where.items()}, extents, name, otherwise
        )

    async def plan(self, start: Offsets, end: Offsets, ended: Mapping[str, str] | None = None) -> list[Run]:
        """The events between two offsets, without those that are lost.

        Args:
            start: Offsets in the streams that the reader knows from before.
            end: Offsets in the streams of `ended`.
            ended: The identities of the streams of `end`, by name.

        Raises:
            OffsetGone: Events are lost, and the options make that an error.
        """
        extents = await self.extents()
        # The stream that the end belongs to may have been dropped, and another one created under its name.
        other = sorted({stream for (stream, _), extent in extents.items() if was_recreated(stream, extent, ended or {})})
        if other and self._options.fail_on_data_loss:
            raise OffsetGone(
                f"stream {other[0]} was dropped and created again before its events were read",
                hint="Set failOnDataLoss to false to continue without them.",
            )
        rolled = rolled_back(end, extents, ended or {})
        if rolled and self._options.fail_on_data_loss:
            raise OffsetGone(f"events were lost before they were read: {'; '.join(list(rolled.values())[:5])}", hint=ROLLED_BACK)
        left = {place: extent for place, extent in extents.items() if place[0] not in other and place not in rolled}
        return self._runs(start, end, left)

    async def whole(self) -> list[Run]:
        """The events of a batch read, as one snapshot shows them."""
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
        begin, _ = begins(start, extents, fail=self._options.fail_on_data_loss, identities=self._known)
        ends = {place: extent.next for place, extent in extents.items()}
        if until is not None:
            ends = {place: max(begin[place], min(end, until.get(place, 0))) for place, end in ends.items()}
        return limited(begin, ripe(begin, ends, self._growths), limit)

    async def lag(self, start: Offsets) -> int:
        """The number of events behind `start`."""
        return count(start, {place: extent.next for place, extent in (await self.extents()).items()})

    async def _since(self, where: Since, name: str, otherwise: int, extents: dict[Place, Extent]) -> Offsets:
        # Partitions without such an event are read from their end.
        named = where.times if where.time is None else extents
        offsets = resolve(dict.fromkeys(named, LATEST), extents, name, otherwise)
        for stream, time in sorted({(place[0], time) for place in extents if (time := where.of(place)) is not None}):
            for partition, offset in (await streams.offsets_at(self._database, stream, time)).items():
                place = stream, partition
                if (extent := extents.get(place)) and where.of(place) == time:
                    offsets[place] = min(max(offset, extent.first), extent.next)
        if where.strict:
            await self._check_found(where, offsets, name)
        return offsets

    async def _check_found(self, where: Since, offsets: Offsets, name: str) -> None:
        # The extents are read again, since events may have been appended after the ends were determined.
        extents = await self.extents()
        for place, offset in sorted(offsets.items()):
            extent, time = extents.get(place), where.of(place)
            if extent is not None and time is not None and offset >= extent.next:
                raise InvalidInput(
                    f"{name}: partition {place[1]} of {place[0]} has no event of {time.isoformat()} or later",
                    hint="Set startingOffsetsByTimestampStrategy to latest to begin at its end.",
                )

    def _runs(self, start: Offsets, end: Offsets, extents: dict[Place, Extent]) -> list[Run]:
        known = {place: offset for place, offset in start.items() if place in end}
        wanted = {place: extent for place, extent in extents.items() if place in end}
        begin, lost = begins(known, wanted, fail=self._options.fail_on_data_loss, identities=self._known)
        for loss in lost:
            log.warning("data_lost", lost=loss)
        return runs(begin, {place: offset for place, offset in end.items() if place in extents}, extents)
