"""Penstock's streams, for the comparison of logs. `append-many` has 16 batches under way instead of one."""

from __future__ import annotations

import asyncio
import logging

import structlog
import uvloop

from benchmarks.peers.streams_protocol import KEYS, Task, print_waits, timed, trickle, waited
from penstock import NewEvent, Penstock, Stream

PARTITIONS = 4


async def append(stream: Stream[bytes], task: Task) -> int:
    """Append, each writer one batch after another."""
    items = [NewEvent(task.payload, str(n % KEYS)) for n in range(task.batch)]
    left = iter(range(task.batches))

    async def write() -> None:
        for _ in left:
            await stream.append_many(items)

    await asyncio.gather(*(write() for _ in range(task.under_way)))
    return task.batches * task.batch


async def consume(stream: Stream[bytes], task: Task) -> int:
    """Consume as a group."""
    seen = 0
    async with stream.consume("bench", size=task.batch) as batches:
        async for batch in batches:
            seen += len(batch)
            if seen >= task.events:
                return seen
    return seen


async def latency(stream: Stream[bytes], task: Task) -> None:
    """From before the append to the handler."""
    waits: list[float] = []
    async with stream.consume("bench", max_batch_size=100) as batches:

        async def read() -> None:
            async for batch in batches:
                waits.extend(waited(event.data) for event in batch)
                if len(waits) >= task.events:
                    return

        reading = asyncio.create_task(read())
        async for payload in trickle(task.events):
            await stream.append(payload, key="k")
        await reading
    print_waits(waits[10:])


async def main() -> None:
    """Do what the arguments say."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    task = Task.of_arguments()
    async with Penstock(task.url) as app:
        stream: Stream[bytes] = app.stream("bench", bytes, partitions=PARTITIONS)
        await stream.declare()
        if task.command == "latency":
            await latency(stream, task)
        elif task.command == "consume":
            await timed(lambda: consume(stream, task))
        else:
            await timed(lambda: append(stream, task))


if __name__ == "__main__":
    uvloop.run(main())
