"""Taskiq on its stream broker for Redis, which acknowledges; msgpack, uvloop, no result backend.

The broker on PostgreSQL (taskiq-pg) hands out only what is enqueued while a worker listens, so that it has nothing to drain.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import uvloop
from taskiq.receiver import Receiver
from taskiq.serializers import ORJSONSerializer
from taskiq_redis import RedisStreamBroker

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

CONCURRENCY = 50
PREFETCH = 100


class TaskiqPeer(Peer):
    packages = ("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop")

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            broker = _broker(url)
            await broker.startup()
            task = broker.find_task("noop")
            started = time.perf_counter()
            for at in range(0, jobs, 100):
                await asyncio.gather(*(task.kiq(value) for value in range(at, min(at + 100, jobs))))
            seconds = time.perf_counter() - started
            await broker.shutdown()
            return seconds

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            broker = _broker(url)
            await broker.startup()
            async for stamp in stamps_in_loop(count):
                await broker.find_task("noop").kiq(stamp)
            await broker.shutdown()

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            broker = _broker(url)
            broker.is_worker_process = True
            await broker.startup()
            enough = asyncio.Event()
            with ThreadPoolExecutor(1) as executor:
                receiver = Receiver(
                    broker, executor, max_async_tasks=CONCURRENCY, max_prefetch=PREFETCH, validate_params=False, run_startup=False
                )
                listening = asyncio.create_task(receiver.listen(enough))
                await SEEN.all()
                enough.set()
                await listening
            await broker.shutdown()

        uvloop.run(run())


def _broker(url: str) -> RedisStreamBroker:
    # Every concurrent task holds a connection while it acknowledges, and the reader one for good.
    broker = RedisStreamBroker(url, max_connection_pool_size=CONCURRENCY + 10, xread_count=CONCURRENCY)
    broker = broker.with_serializer(ORJSONSerializer())

    @broker.task(task_name="noop")
    async def noop(value: int) -> None:
        SEEN.note(value)

    return broker


if __name__ == "__main__":
    main(TaskiqPeer())
