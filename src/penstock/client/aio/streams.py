"""Streams on a server, and memberships in their consumer groups."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import httpx

from penstock.client import stream_calls
from penstock.client.aio.sse import follow
from penstock.client.call import AsyncSend
from penstock.client.following import Following
from penstock.client.stream_calls import MemberCalls
from penstock.core.checks import check_time
from penstock.core.iteration import lasting
from penstock.errors import InvalidInput
from penstock.streams.group_models import HeldPartitions, Lag, MemberBatch, Reading
from penstock.streams.models import Event, NewEvent, OffsetReset, Position, Start, StreamDetails, StreamRecord


class AsyncStream:
    """A stream on the server. Made by `AsyncClient.stream`."""

    def __init__(self, send: AsyncSend, http: httpx.AsyncClient, name: str, retry_for_s: float) -> None:
        self.name = name
        self._send = send
        self._http = http
        self._retry_for_s = retry_for_s

    async def create(self, partitions: int = 16, **options: Any) -> StreamRecord:
        """Create the stream, with the options of `POST /v1/streams`. Raises `Conflict` when it exists."""
        return await self._send(stream_calls.create(self.name, partitions, options))

    async def change(self, **options: Any) -> StreamRecord:
        """Change options, named as in `create`; the others stay as they are. Raises `NotFound`, `InvalidInput`."""
        return await self._send(stream_calls.change(self.name, None, options))

    async def grow(self, partitions: int) -> StreamRecord:
        """Give the stream more partitions while it is in use. Raises `NotFound`, `InvalidInput` for fewer than it has."""
        return await self._send(stream_calls.change(self.name, partitions, {}))

    async def drop(self, *, force: bool = False) -> None:
        """Drop the stream with its events and groups. Raises `NotFound`, `Conflict` while a group has live members."""
        await self._send(stream_calls.drop(self.name, force))

    async def describe(self) -> StreamDetails:
        """Partitions, what is there of each, retention, size, which growth is held back. Raises `NotFound`."""
        return await self._send(stream_calls.describe(self.name))

    async def append(
        self, data: Any, *, key: str | None = None, headers: Mapping[str, Any] | None = None, time: datetime | None = None,
        producer: str | None = None, sequence: int | None = None,
    ) -> Position | None:  # fmt: skip
        """Append one event; bytes to a stream of bytes. See `penstock.Stream.append`.

        With `producer` and `sequence`, one more with each call, it is repeated while the server is away, and there once. None: an
        older number, whose place is not known any more.
        """
        return await self._send(stream_calls.append(self.name, NewEvent(data, key, headers, time), producer, sequence))

    async def append_many(
        self, events: Iterable[NewEvent[Any] | Any], *, producer: str | None = None, sequence: int | None = None
    ) -> int | None:
        """Append events, payloads or `NewEvent`, in parts of 1,000. Returns the number of the producer's last part.

        Raises:
            InvalidInput: One is refused, and the error says which; all others are appended (with `producer`: those of the parts
                before it).
        """
        return await self._send(stream_calls.append_many(self.name, events, producer, sequence))

    async def read(
        self, partition: int, offset: int = 0, limit: int = 100, *, wait: timedelta = timedelta(0)
    ) -> list[Event[Any]]:
        """Events of a partition from an offset on, waiting for the first one. Raises `OffsetGone`, `NotFound`."""
        return await self._send(stream_calls.read(self.name, partition, offset, limit, wait.total_seconds()))

    @lasting
    async def tail(self, start: Start = "latest", *, partitions: Iterable[int] | None = None) -> AsyncGenerator[Event[Any], None]:
        """Events as they come, for ever; goes on where it was when the connection breaks. Raises `OffsetGone`."""
        following = Following(stream_calls.path_of(self.name, "events", "follow"), _start(start, partitions), self._retry_for_s)
        async for event in follow(self._http, following):
            yield stream_calls.event_of(event)

    async def offsets_at(self, start: Start) -> dict[int, int]:
        """The offset of each partition for a start. Raises `InvalidInput` for a time: a server moves to it, see `seek`."""
        if isinstance(start, Mapping):
            return dict(start)
        if start not in ("earliest", "latest"):
            raise InvalidInput(f"a server does not tell the offsets of {start!s}", hint="Use earliest, latest or offsets.")
        ends = (await self.describe()).ends
        return {end.partition: end.first if start == "earliest" else end.next for end in ends}

    async def lag(self, group: str | None = None) -> list[Lag]:
        """How far a group (None: each) is in each partition."""
        return await self._send(stream_calls.lag(self.name, group))

    async def seek(self, group: str, to: Start) -> int:
        """Move a group to "earliest", "latest", a time, or to offsets by partition. Raises `NotFound`, `InvalidInput`."""
        return await self._send(stream_calls.seek(self.name, group, to))

    async def pause(self, group: str, partitions: Collection[int] | None = None, *, reason: str | None = None) -> int:
        """Give a group no more events of partitions (None: any). Returns how many were not paused."""
        return await self._send(stream_calls.pause(self.name, group, "pause", partitions, reason))

    async def resume(self, group: str, partitions: Collection[int] | None = None) -> int:
        """End a pause or quarantine. Returns how many were paused."""
        return await self._send(stream_calls.pause(self.name, group, "resume", partitions, None))

    async def replay_dead(self, *, offsets: Mapping[int, int] | None = None, limit: int = 1_000) -> int:
        """Append dead letters to the stream again. Returns how many. See `penstock.Stream.replay_dead`."""
        return await self._send(stream_calls.replay_dead(self.name, offsets, limit))

    async def drop_group(self, group: str) -> None:
        """Forget a group. Raises `Conflict` while it has members."""
        await self._send(stream_calls.drop_group(self.name, group))

    async def join(
        self, group: str, id: str | None = None, *, start: str = "earliest", dead_after: timedelta = timedelta(seconds=30),
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncMembership:  # fmt: skip
        """Join a group, which is made when there is none. Raises `Conflict` when a living member has that id."""
        calls = MemberCalls.new(self.name, group, id)
        await self._send(calls.join(start, dead_after.total_seconds(), metadata))
        return AsyncMembership(self._send, calls)


class AsyncMembership:
    """A member of a consumer group. Made by `AsyncStream.join`."""

    def __init__(self, send: AsyncSend, calls: MemberCalls) -> None:
        self.id = calls.id
        self._send = send
        self._calls = calls

    async def read(
        self, limit: int = 100, *, wait: timedelta = timedelta(0), busy: Collection[int] = (),
        ahead: Mapping[int, int] | None = None, auto_offset_reset: OffsetReset | str = OffsetReset.ERROR,
    ) -> Reading:  # fmt: skip
        """Read the events behind the committed offsets, and release revoked partitions, except those in `busy`.

        Raises:
            NotFound: The member was evicted: join again.
            OffsetGone: Retention dropped what comes next.
        """
        call = self._calls.read(limit, wait.total_seconds(), busy, ahead or {}, str(auto_offset_reset))
        return await self._send(call)

    async def commit(self, *batches: MemberBatch) -> dict[int, bool]:
        """Say what is done. By partition: False when it is no longer this member's, or the group was moved."""
        return await self._send(self._calls.commit(batches))

    async def fail(self, batch: MemberBatch, error: str, *, attempt: int = 1) -> bool:
        """Say that a batch cannot be handled, and is to be tried again: the group's lag shows it until its first event is done.

        Say it at the first failure, and then seldom. False: the partition is no longer this member's, or the event is done.
        """
        return await self._send(self._calls.fail(batch, error, attempt))

    async def heartbeat(self) -> HeldPartitions:
        """Keep the member alive during a long batch. Raises `NotFound` when it was evicted."""
        return await self._send(self._calls.heartbeat())

    async def leave(self) -> None:
        """Leave; the partitions go to the others at once. Raises `NotFound` when it is no member."""
        await self._send(self._calls.leave())


def _start(start: Start, partitions: Iterable[int] | None) -> dict[str, Any]:
    if isinstance(start, datetime):
        given = check_time("the position to start at", start).isoformat()
    elif isinstance(start, Mapping):
        given = ",".join(f"{partition}:{offset}" for partition, offset in start.items())
    else:
        given = start
    return {"from": given} | ({} if partitions is None else {"partition": list(partitions)})
