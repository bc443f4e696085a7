"""What people and programs do with streams by their names, declared here or not: a part of `Penstock`."""

from __future__ import annotations

from typing import Any

from penstock.core.checks import check_flag, check_number, check_text
from penstock.streams import queries as streams
from penstock.streams.checks import check_stream_name
from penstock.streams.declarations import StreamDeclarations
from penstock.streams.models import StreamRecord, StreamSummary
from penstock.streams.stream import Stream


class StreamAdministration(StreamDeclarations):
    """Finds, lists, creates and drops streams."""

    async def find_stream(self, name: str, payload: Any = Any) -> Stream[Any]:
        """An existing stream, whether or not this app declares it. Raises `NotFound`.

        Args:
            name: Name of the stream.
            payload: Type of its payloads; the events have values of it.
        """
        check_text("name", name)
        if name in self.streams:
            return self.streams[name]
        return await Stream.found(self.context, name, payload)

    async def list_streams(self) -> list[StreamSummary]:
        """All streams in the database, by name, and how large they are."""
        database = await self.context.database()
        found = []
        for record in await streams.list_streams(database):
            segments = await streams.segments(database, record.name)
            found.append(
                StreamSummary(
                    record.name,
                    record.partitions,
                    sum(segment.events for segment in segments),
                    sum(segment.bytes for segment in segments),
                    len(segments),
                    record.format,
                    record.keep_age,
                    record.compact,
                    record.created_at,
                )
            )
        return found

    async def create_stream(self, name: str, partitions: int = 16, **options: Any) -> StreamRecord:
        """Create a stream in the database, options by their names in SQL. Raises `Conflict`, `InvalidInput`.

        Args:
            name: Name of the stream.
            partitions: Number of its partitions.
            options: Options of `StreamOptions`.
        """
        check_stream_name(name)
        check_number("partitions", partitions, 1, 1_024)
        return await streams.create_stream(await self.context.database(), name, partitions, options)

    async def drop_stream(self, name: str, *, force: bool = False) -> None:
        """Drop a stream with its events and groups, whether or not this app declares it. See `Stream.drop`.

        Args:
            name: Name of the stream.
            force: Whether to drop it also while consumers are at work.
        """
        check_flag("force", force)
        await (await self.find_stream(name)).drop(force=force)
