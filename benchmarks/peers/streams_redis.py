"""Redis Streams through redis-py (with hiredis), with a consumer group, for the comparison of logs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import redis
import redis.asyncio

from benchmarks.peers.streams_protocol import KEYS, Task, print_waits, timed, trickle, waited


def append(server: Any, task: Task) -> int:
    """One pipeline for each batch, one batch after another."""
    payload = task.payload
    for _ in range(task.batches):
        pipeline = server.pipeline(transaction=False)
        for n in range(task.batch):
            pipeline.xadd("bench", {"key": str(n % KEYS), "data": payload})
        pipeline.execute()
    return task.batches * task.batch


async def append_many(task: Task) -> int:
    """The same by as many writers as batches are to be under way, each with a connection of its own."""
    payload = task.payload
    left = iter(range(task.batches))
    async with redis.asyncio.Redis.from_url(task.url, max_connections=task.under_way) as server:

        async def write() -> None:
            for _ in left:
                pipeline = server.pipeline(transaction=False)
                for n in range(task.batch):
                    pipeline.xadd("bench", {"key": str(n % KEYS), "data": payload})
                await pipeline.execute()

        await asyncio.gather(*(write() for _ in range(task.under_way)))
    return task.batches * task.batch


def group(server: Any) -> None:
    """Make the group."""
    server.xgroup_create("bench", "bench", "0", mkstream=True)


def consume(server: Any, task: Task) -> int:
    """Read and acknowledge batch after batch."""
    seen = 0
    while seen < task.events:
        ((_, events),) = server.xreadgroup("bench", "consumer", {"bench": ">"}, count=task.batch)
        server.xack("bench", "bench", *[event[0] for event in events])
        seen += len(events)
    return seen


async def main() -> None:
    """Do what the arguments say."""
    task = Task.of_arguments()
    server = redis.Redis.from_url(task.url)

    async def work() -> int:
        if task.under_way > 1:
            return await append_many(task)
        return consume(server, task) if task.command == "consume" else append(server, task)

    if task.command == "latency":
        group(server)
        waits: list[float] = []

        def read() -> None:
            reader = redis.Redis.from_url(task.url)
            while len(waits) < task.events:
                for _, events in reader.xreadgroup("bench", "consumer", {"bench": ">"}, count=100, block=1000):
                    waits.extend(waited(event[1][b"data"]) for event in events)
                    reader.xack("bench", "bench", *[event[0] for event in events])

        thread = threading.Thread(target=read)
        thread.start()
        async for payload in trickle(task.events):
            server.xadd("bench", {"key": "k", "data": payload})
        thread.join()
        print_waits(waits[10:])
        return
    if task.command == "consume":
        group(server)
    await timed(work)


if __name__ == "__main__":
    asyncio.run(main())
