"""SAQ on Redis: hiredis, orjson, uvloop, no results kept (`ttl=-1` deletes a job when it is finished)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import uvloop
from saq import Queue, Worker

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

CONCURRENCY = 20


class SaqPeer(Peer):
    packages: tuple[str, ...] = ("saq", "redis", "hiredis", "uvloop")

    def queue(self, url: str) -> Queue:
        # Here, since its environment for PostgreSQL has no Redis; and `Queue.from_url` does not know Unix sockets.
        from redis.asyncio import Redis
        from saq.queue.redis import RedisQueue

        return RedisQueue(Redis.from_url(url), dump=orjson.dumps, load=orjson.loads, max_concurrent_ops=CONCURRENCY * 2)

    def prepare(self, url: str) -> None:
        async def run() -> None:
            queue = self.queue(url)
            await queue.connect()
            await queue.disconnect()

        uvloop.run(run())

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            queue = self.queue(url)
            await queue.connect()
            started = time.perf_counter()
            for at in range(0, jobs, 1_000):
                await asyncio.gather(*(queue.enqueue("noop", value=value, ttl=-1) for value in range(at, min(at + 1_000, jobs))))
            seconds = time.perf_counter() - started
            await queue.disconnect()
            return seconds

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            queue = self.queue(url)
            await queue.connect()
            async for stamp in stamps_in_loop(count):
                await queue.enqueue("noop", value=stamp, ttl=-1)
            await queue.disconnect()

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            queue = self.queue(url)
            await queue.connect()
            worker = Worker(queue, functions=[noop], concurrency=CONCURRENCY)
            working = asyncio.create_task(worker.start())
            await SEEN.all()
            await worker.stop()
            await working
            await queue.disconnect()

        uvloop.run(run())


async def noop(_context: Any, *, value: int) -> None:
    SEEN.note(value)


if __name__ == "__main__":
    main(SaqPeer())
