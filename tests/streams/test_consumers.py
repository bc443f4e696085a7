"""Consumers: each event once and each partition in order, handlers in all forms, middleware."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from penstock import Batch, Event, Events, InvalidInput, NewEvent, Penstock, Stream
from penstock.testing import running_worker
from penstock.worker import Worker
from tests.streams.consumer_groups import KEYS, caught_up, in_order
from tests.waiting import eventually

# A handler of single events has no batch size, and a pull consumer has no prefetch.
FORMS = [
    *product(["event", "events"], [1, 50], [1]),
    *product(["batch", "take"], [1, 50], [1, 24]),
    *product(["pull"], [50], [1, 24]),
]


@pytest.mark.parametrize(
    ("partitions", "workers"),
    [(8, 3), *(pytest.param(*case, marks=pytest.mark.soak) for case in [(1, 1), (1, 3), (8, 1)])],
)
@pytest.mark.parametrize(("form", "prefetch", "size"), FORMS)
async def test_every_event_is_seen_once_and_in_order(
    app: Penstock, url: str, form: str, workers: int, partitions: int, prefetch: int, size: int
) -> None:
    """Runnel's own matrix: 333 events over the keys A to J."""
    apps = [Penstock(url) for _ in range(workers)]
    seen: list[tuple[str | None, int]] = []
    streams: list[Stream[Any]] = []
    pulling: list[asyncio.Task[None]] = []
    running: list[tuple[Worker, asyncio.Task[None]]] = []
    for each in apps:
        stream = each.stream("events", int, partitions=partitions)
        streams.append(stream)
        options: dict[str, Any] = {"group": "g", "prefetch": prefetch}
        if form == "event":

            @stream.consumer(**options)
            async def one(event: Event[int]) -> None:
                seen.append((event.key, event.data))

        elif form == "batch":

            @stream.consumer(max_batch_size=size, linger=timedelta(seconds=0.01), **options)
            async def many(batch: Batch[int]) -> None:
                assert len(batch) <= size
                seen.extend((event.key, event.data) for event in batch)

        elif form == "events":

            @stream.consumer(**options)
            async def all_of_them(events: Events[int]) -> None:
                async for event in events:
                    seen.append((event.key, event.data))

        elif form == "take":

            @stream.consumer(**options)
            async def taking(events: Events[int]) -> None:
                async for batch in events.take(size, linger=timedelta(seconds=0.01)):
                    assert 1 <= len(batch) <= size
                    seen.extend((event.key, event.data) for event in batch)

        else:

            async def pull(stream: Stream[Any] = stream) -> None:
                async with stream.consume("g", max_batch_size=size) as batches:
                    async for batch in batches:
                        seen.extend((event.key, event.data) for event in batch)

            pulling.append(asyncio.create_task(pull()))
    if form != "pull":
        for each in apps:
            worker = await each.worker()
            running.append((worker, asyncio.create_task(worker.run())))
    try:
        stream = streams[0]
        for n in range(0, 333, 37):
            await stream.append_many([NewEvent(i, KEYS[i % 10]) for i in range(n, n + 37)])
        await eventually(lambda: len(seen) >= 333, "all events to be seen")
        if form != "pull":
            await eventually(caught_up(stream, "g"), "the group to catch up")
    finally:
        for worker, task in running:
            worker.stop()
            await task
        for task in pulling:
            task.cancel()
        await asyncio.gather(*pulling, return_exceptions=True)
        for each in apps:
            await each.close()
    assert len(seen) == 333
    assert sorted(n for _, n in seen) == list(range(333))
    assert in_order(seen)


async def test_a_reader_that_waits_for_a_batch_only_for_a_while_loses_none(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    await events.declare()
    seen: list[int] = []

    async def write() -> None:
        for n in range(60):
            await events.append(n, key=str(n))

    async with events.consume("g", max_batch_size=3) as batches:
        writing = asyncio.create_task(write())
        async with asyncio.timeout(60):
            while len(seen) < 60:
                # However short the wait, sometimes a batch comes at the very moment at which it ends.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.002):
                        seen += (await anext(batches)).records()
        await writing
    assert sorted(seen) == list(range(60))


async def test_a_slow_key_does_not_stop_other_partitions(app: Penstock) -> None:
    events = app.stream("events", int, partitions=8)
    seen: list[int] = []
    release = asyncio.Event()

    @events.consumer(group="g")
    async def handle(event: Event[int]) -> None:
        if event.key == "slow":
            await release.wait()
        seen.append(event.data)

    slow = await events.append(-1, key="slow")
    await events.append_many([NewEvent(n, str(n)) for n in range(200)])
    others = sum(
        1 for partition, bounds in (await events.bounds()).items() if partition != slow.partition for _ in range(bounds.next)
    )
    async with running_worker(app):
        await eventually(lambda: len(seen) == others, "the other partitions to be consumed")
        assert -1 not in seen
        release.set()
        await eventually(caught_up(events, "g"), "the slow one")
    assert len(seen) == 201


async def test_plain_handlers_run_in_threads(app: Penstock) -> None:
    events = app.stream("events", int, partitions=2)
    seen: list[int] = []

    @events.consumer(group="g")
    def handle(event: Event[int]) -> None:
        asyncio.run(asyncio.sleep(0))  # only possible outside of the loop
        seen.append(event.data)

    await events.append_many([NewEvent(n, str(n)) for n in range(20)])
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert sorted(seen) == list(range(20))


async def test_middleware_is_called_around_each_batch_outermost_first(app: Penstock) -> None:
    events = app.stream("events", int, partitions=1)
    calls: list[Any] = []

    async def outer(batch: Any, call_next: Any) -> None:
        calls.append("outer")
        await call_next(batch)
        calls.append("outer done")

    async def inner(batch: Any, call_next: Any) -> None:
        calls.append("inner")
        await call_next(batch)

    @events.consumer(group="g", max_batch_size=10, middleware=[outer, inner])
    async def handle(batch: Batch[int]) -> None:
        calls.append(batch.records())

    await events.append_many(range(3))
    async with running_worker(app):
        await eventually(caught_up(events, "g"))
    assert calls == ["outer", "inner", [0, 1, 2], "outer done"]


def test_handlers_that_cannot_be_used_are_refused() -> None:
    app = Penstock("postgresql://nowhere")
    events = app.stream("events")
    for bad in (lambda: None, lambda a, b: None):
        with pytest.raises(InvalidInput, match="one argument"):
            events.consumer(group="g")(bad)
    with pytest.raises(InvalidInput, match="unknown policy"):
        events.consumer(group="g", on_failure="pray")(lambda event: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="linger"):
        events.consumer(group="g", linger=timedelta(seconds=5), grace=timedelta(seconds=1))(lambda event: None)

    def iterate(events: Events[int]) -> None: ...

    with pytest.raises(InvalidInput, match="async"):
        events.consumer(group="g")(iterate)
    events.consumer(group="g")(lambda event: None)
    with pytest.raises(InvalidInput, match="twice"):
        events.consumer(group="g")(lambda event: None)
