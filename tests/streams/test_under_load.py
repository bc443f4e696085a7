"""Retention and growth while producers append and members come and go: nothing that is to be kept is lost or comes twice."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from penstock import Batch, DatabaseUnavailable, NewEvent, Penstock, Position, Retention, Stream
from penstock.streams import queries as streams
from penstock.streams.maintenance import maintain
from tests.waiting import eventually

KEEP = 600
WRITERS = 4
EACH = 1500
GROWTHS = (4, 9)


class Load:
    """Writers that append numbered batches, while the stream is maintained and grows."""

    def __init__(self, app: Penstock, stream: Stream[int]) -> None:
        self.appended: dict[str, list[int]] = defaultdict(list)
        self.where: dict[Position, int] = {}
        self.kept: list[int] = []
        self.done = asyncio.Event()
        self._app = app
        self._stream = stream

    async def run(self) -> None:
        """Append all, then stop maintaining it."""
        maintaining = asyncio.create_task(self._maintain())
        growing = asyncio.create_task(self._grow())
        await asyncio.gather(*(self._write(writer) for writer in range(WRITERS)))
        await growing
        self.done.set()
        await maintaining

    async def _write(self, writer: int) -> None:
        chance = random.Random(writer)
        producer = self._stream.producer(f"writer-{writer}")
        number = 0
        while number < EACH:
            batch = [
                NewEvent(writer * EACH + n, f"{writer}-{chance.randrange(5)}")
                for n in range(number, min(EACH, number + chance.randrange(1, 30)))
            ]
            positions = await producer.append_many(batch)
            if chance.random() < 0.1:
                producer.sequence -= 1  # as if the answer had been lost
                assert list(await producer.append_many(batch)) == list(positions)
            number += len(batch)
            for event, position in zip(batch, positions, strict=True):
                self.where[position] = event.data
                self.appended[str(event.key)].append(event.data)

    async def _grow(self) -> None:
        for place, partitions in enumerate(GROWTHS):
            await eventually(lambda place=place: len(self.where) > WRITERS * EACH * (place + 1) / 4, "half of it", timeout=120)
            async with asyncio.timeout(60):
                while True:
                    try:
                        await self._stream.grow(partitions)
                        break
                    except DatabaseUnavailable:
                        continue

    async def _maintain(self) -> None:
        database = await self._app.database()
        while not self.done.is_set():
            before = len(self.where)
            for name in await streams.to_maintain(database):
                await maintain(database, name)
            await streams.drop_retired(database)
            if before >= KEEP:
                self.kept.append(sum(found.next - found.first for found in (await self._stream.bounds()).values()))


async def contents(stream: Stream[int]) -> dict[Position, int]:
    """What is still there, read through retention's end; offsets are dense."""
    found: dict[Position, int] = {}
    for partition, bounds in (await stream.bounds()).items():
        events = await stream.read(partition, bounds.first, max(1, bounds.next - bounds.first))
        assert [event.offset for event in events] == list(range(bounds.first, bounds.next))
        found |= {Position(partition, event.offset): event.data for event in events}
    return found


@pytest.mark.parametrize("unread", [True, False], ids=["unread is kept", "whatever is read"])
async def test_nothing_that_is_retained_is_lost(app: Penstock, url: str, unread: bool) -> None:
    keep = Retention(events=KEEP, unread=unread)
    stream: Stream[int] = app.stream("events", int, partitions=2, keep=keep, segment_events=150)
    await stream.declare()
    seen: dict[str, list[int]] = defaultdict(list)
    load = Load(app, stream)
    others = [Penstock(url) for _ in range(3)]

    async def consume(other: Penstock, stop: asyncio.Event) -> None:
        worker = await other.worker()
        working = asyncio.create_task(worker.run())
        await stop.wait()
        worker.stop()
        await working

    for other in others:
        theirs: Stream[int] = other.stream("events", int, partitions=2, keep=keep, segment_events=150)

        @theirs.consumer(group="g", max_batch_size=50, auto_offset_reset="earliest")
        async def handle(batch: Batch[int]) -> None:
            for event in batch:
                seen[str(event.key)].append(event.data)

    stops = [asyncio.Event() for _ in others]
    members = [asyncio.create_task(consume(others[0], stops[0]))]
    loading = asyncio.create_task(load.run())
    try:
        for place in (1, 2):
            await eventually(lambda place=place: len(load.where) > EACH * place, "some events", timeout=120)
            members.append(asyncio.create_task(consume(others[place], stops[place])))
        stops[0].set()
        await members[0]
        await loading

        async def caught_up() -> bool:
            lags = await stream.lag("g")
            return len(lags) == GROWTHS[-1] and not any(lag.lag for lag in lags)

        await eventually(caught_up, "the group to catch up", timeout=120)
    finally:
        for stop in stops:
            stop.set()
        await asyncio.gather(*members, return_exceptions=True)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        for other in others:
            await other.close()

    there = await contents(stream)
    assert there == {position: load.where[position] for position in there}, "what is there is not what was acknowledged"
    last = {position.partition: 0 for position in load.where}
    for position in load.where:
        last[position.partition] = max(last[position.partition], position.offset)
    # Whole segments went from the front, and never more than was allowed.
    bounds = await stream.bounds()
    assert {partition: found.next - 1 for partition, found in bounds.items() if found.next} == last
    assert sum(found.first for found in bounds.values()) > 0, "retention dropped nothing"
    assert min(load.kept) >= KEEP
    if unread:
        # Each event once, in the order of its key, through growths, joins and leaves.
        assert seen == load.appended
    else:
        for key, values in seen.items():
            numbers = {value: place for place, value in enumerate(load.appended[key])}
            places = [numbers[value] for value in values]
            assert places == sorted(set(places)), f"the events of {key} came twice or out of order"
