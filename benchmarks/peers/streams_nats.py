"""NATS JetStream through nats-py, with a durable pull consumer, for the comparison of logs.

A batch is published as that many messages, whose acknowledgements are awaited together.
"""

from __future__ import annotations

import asyncio
from typing import Any

import nats
import uvloop

from benchmarks.peers.streams_protocol import KEYS, Task, print_waits, timed, trickle, waited


async def append(stream: Any, task: Task) -> int:
    """Publish, each writer one batch after another."""
    payload = task.payload
    left = iter(range(task.batches))

    async def write() -> None:
        for _ in left:
            await asyncio.gather(*(stream.publish(f"bench.{n % KEYS}", payload, timeout=30) for n in range(task.batch)))

    await asyncio.gather(*(write() for _ in range(task.under_way)))
    return task.batches * task.batch


async def consume(stream: Any, task: Task) -> int:
    """Fetch and acknowledge batch after batch."""
    seen = 0
    subscription = await stream.pull_subscribe("bench.*", durable="bench")
    while seen < task.events:
        messages = await subscription.fetch(task.batch, timeout=30)
        for message in messages:
            await message.ack()
        seen += len(messages)
    return seen


async def main() -> None:
    """Do what the arguments say."""
    task = Task.of_arguments()
    connection = await nats.connect(task.url)
    stream = connection.jetstream()
    await stream.add_stream(name="bench", subjects=["bench.*"])
    if task.command == "latency":
        waits: list[float] = []
        done = asyncio.Event()

        async def handle(message: Any) -> None:
            waits.append(waited(message.data))
            await message.ack()
            if len(waits) >= task.events:
                done.set()

        await stream.subscribe("bench.*", durable="idle", cb=handle, manual_ack=True)
        async for payload in trickle(task.events):
            await stream.publish("bench.k", payload)
        await done.wait()
        print_waits(waits[10:])
    elif task.command == "consume":
        await timed(lambda: consume(stream, task))
    else:
        await timed(lambda: append(stream, task))
    await connection.close()


if __name__ == "__main__":
    uvloop.run(main())
