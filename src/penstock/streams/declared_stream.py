"""A stream as the application has declared it: what appending, reading and consuming share.

It knows how the database has the stream (declared once for each database), how events are encoded, and the accumulator of each
event loop. `Stream` adds the operations that users call; producers, readers and consumptions need only this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from penstock.core.checks import check_flag, check_number
from penstock.core.keys import KeyOf
from penstock.errors import NotFound, PenstockError
from penstock.postgres.translation import lacks_rights
from penstock.streams import queries as streams
from penstock.streams.accumulator import Accumulator
from penstock.streams.checks import check_start
from penstock.streams.codec import Encoding
from penstock.streams.models import Bounds, Start, StreamOptions, StreamRecord
from penstock.streams.queries import Routed

if TYPE_CHECKING:
    from penstock.postgres.context import Context

T = TypeVar("T")


class DeclaredStream(Generic[T]):
    """A declared stream, without the operations of `Stream`."""

    def __init__(
        self,
        context: Context,
        name: str,
        payload: Any,
        partitions: int,
        key: str | KeyOf | None,
        options: StreamOptions,
        key_optional: bool = False,
    ) -> None:
        self.context = context
        self.name = name
        self.partitions = partitions
        self.options = options
        self.encoding: Encoding[T] = Encoding(
            name,
            payload,
            key,
            options.format == "bytes",
            options.compression is not None,
            key_optional,
            context.keyring,
            options.encrypted,
        )
        # One for each event loop: handlers in threads may append through `Penstock.sync`, and loops end.
        self._accumulators: dict[asyncio.AbstractEventLoop, Accumulator] = {}
        # The record of a stream that was looked up, which is used as it is and never declared.
        self._found: StreamRecord | None = None

    async def declare(self) -> StreamRecord:
        """Create the stream in the database, or change its options when this declaration differs from the last one.

        Every call that writes does so implicitly, once for each database: call this to have the stream again that another program
        has dropped. An existing stream keeps its number of partitions: see `grow`. A declaration without options leaves all
        options of an existing stream unchanged.

        Raises:
            Conflict: The stream exists and stores its payloads in another format.
            InvalidInput: The name or an option is not valid.
        """
        if self._found is None:
            # It may have been dropped since, by another program.
            (await self.context.database()).declared.pop(("stream", self.name), None)
        return await self._declared()

    async def _declared(self) -> StreamRecord:
        """The record of the stream, declared once for each database."""
        if self._found is not None:
            return self._found
        database = await self.context.database()
        record: StreamRecord | None = database.declared.get(("stream", self.name))
        if record is None:
            record = await streams.declare_stream(database, self.name, self.partitions, self.options.declaration())
            database.declared["stream", self.name] = record
        self.encoding.refresh(record)
        return record

    async def ready(self) -> StreamRecord:
        """The record of the stream, declared if the role may do so. Raises `NotFound` when it does not exist otherwise."""
        try:
            return await self._declared()
        except PenstockError as error:
            if not lacks_rights(error):
                raise
        record = await streams.find_stream(await self.context.database(), self.name)
        if record is None:
            raise NotFound(f"no such stream: {self.name}", hint="Declare it with a role that may: penstock declare MODULE:APP.")
        return await self._remember(record)

    @classmethod
    async def found(cls, context: Context, name: str, payload: Any = Any) -> Self:
        """An existing stream, with the options that it has. Raises `NotFound`.

        Args:
            context: Open databases and settings.
            name: Name of the stream.
            payload: Type of its payloads.
        """
        record = await streams.find_stream(await context.database(), name)
        if record is None:
            raise NotFound(f"no such stream: {name}", hint=f"Create it first: penstock streams create {name}")
        raw = record.format == "bytes" and payload is Any
        stream = cls(context, name, bytes if raw else payload, record.partitions, None, record.options)
        stream._found = record
        stream.encoding.refresh(record)
        return stream

    async def grow(self, partitions: int) -> StreamRecord:
        """Give the stream more partitions while it is in use.

        The order of each key is kept: a group begins the new partitions when it has finished what the old ones contain now.

        Args:
            partitions: Number of partitions that the stream gets.

        Raises:
            InvalidInput: The stream has more partitions already.
            DatabaseUnavailable: An append in a long transaction blocked the change; try again.
        """
        check_number("partitions", partitions, 1, 1_024)
        await self.ready()
        return await self._remember(await streams.grow_stream(await self.context.database(), self.name, partitions))

    async def change(self, **options: Any) -> StreamRecord:
        """Change options of the stream in the database, by their names in SQL.

        Args:
            options: Options of `StreamOptions` to change.
        """
        await self.ready()
        return await self._remember(await streams.change_stream(await self.context.database(), self.name, options))

    async def drop(self, *, force: bool = False) -> None:
        """Drop the stream with its events, groups and producers.

        Its readers and consumers get `NotFound`. Its dead letters are a separate stream and remain. A later use of this object
        creates the stream again, as does an application that declares it when it starts.

        Args:
            force: Whether to drop the stream also while it has consumers, which then end.

        Raises:
            NotFound: The stream does not exist.
            Conflict: A group has live members.
            DatabaseUnavailable: An append in a long transaction blocked the drop; try again.
        """
        check_flag("force", force)
        database = await self.context.database()
        await streams.drop_stream(database, self.name, force=force)
        database.declared.pop(("stream", self.name), None)
        self._found = None
        self._accumulators.clear()

    async def _know_keys(self) -> None:
        """Find out, in an application with keys, whether a stream that it does not declare as encrypted is."""
        if not self.context.keyring or self.encoding.encrypted or self._found is not None:
            return
        database = await self.context.database()
        if ("stream", self.name) in database.declared:
            return
        if (record := await streams.find_stream(database, self.name)) is not None:
            self.encoding.refresh(record)

    async def _remember(self, record: StreamRecord) -> StreamRecord:
        """Use a changed record of the stream from now on."""
        self.encoding.refresh(record)
        if self._found is not None:
            self._found = record
        (await self.context.database()).declared["stream", self.name] = record
        return record

    # -- what its writers and readers share

    def accumulator(self) -> Accumulator:
        """The accumulator of the appends on this event loop."""
        loop = asyncio.get_running_loop()
        accumulator = self._accumulators.get(loop)
        if accumulator is None:
            for ended in [other for other in self._accumulators.copy() if other.is_closed()]:
                self._accumulators.pop(ended, None)
            accumulator = self._accumulators[loop] = Accumulator(self._send, self._width)
        return accumulator

    async def _send(self, routed: Routed) -> Sequence[Any]:
        return await streams.append_routed(await self.context.database(), self.name, routed)

    async def _width(self) -> int:
        record = await streams.find_stream(await self.context.database(), self.name)
        if record is None:
            raise NotFound(f"no such stream: {self.name}")
        return (await self._remember(record)).partitions

    async def bounds(self) -> dict[int, Bounds]:
        """The stored range of offsets of each partition."""
        return await streams.bounds(await self.context.database(), self.name)

    async def offsets_at(self, start: Start) -> dict[int, int]:
        """The offset in each partition of a starting position.

        Args:
            start: "earliest", "latest", a time, or offsets by partition.
        """
        check_start(start)
        database = await self.context.database()
        if isinstance(start, datetime):
            return await streams.offsets_at(database, self.name, start)
        if isinstance(start, Mapping):
            return dict(start)
        bounds = await streams.bounds(database, self.name)
        if start == "earliest":
            return {partition: found.first for partition, found in bounds.items()}
        return {partition: found.next for partition, found in bounds.items()}
