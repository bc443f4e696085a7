"""arq: hiredis, uvloop, many jobs at a time, no results, a short poll (its default is half a second)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop
from arq import Worker, create_pool, func
from arq.connections import RedisSettings

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

CONCURRENCY = 500
POLL_S = 0.01


class ArqPeer(Peer):
    packages = ("arq", "redis", "hiredis", "uvloop")

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            pool = await create_pool(RedisSettings.from_dsn(url))
            started = time.perf_counter()
            for at in range(0, jobs, 100):
                await asyncio.gather(*(pool.enqueue_job("noop", value) for value in range(at, min(at + 100, jobs))))
            seconds = time.perf_counter() - started
            await pool.aclose()
            return seconds

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            pool = await create_pool(RedisSettings.from_dsn(url))
            async for stamp in stamps_in_loop(count):
                await pool.enqueue_job("noop", stamp)
            await pool.aclose()

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            worker = Worker(
                [func(noop, name="noop", keep_result=0)],
                redis_settings=RedisSettings.from_dsn(url),
                max_jobs=CONCURRENCY,
                poll_delay=POLL_S,
                keep_result=0,
                handle_signals=False,
                log_results=False,
            )
            working = asyncio.create_task(worker.async_run())
            await SEEN.all()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await worker.close()

        uvloop.run(run())


async def noop(_context: Any, value: int) -> None:
    SEEN.note(value)


if __name__ == "__main__":
    main(ArqPeer())
