"""Penstock itself, by the same protocol. It has no pin file: it runs in the environment of the repository."""

from __future__ import annotations

import asyncio
import time

import uvloop

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop
from penstock import Job, Penstock


class Itself(Peer):
    packages = ("penstock", "asyncpg", "uvloop")

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            async with Penstock(url) as app:
                noop = app.job_type("noop", int)
                await noop.enqueue_many([])
                started = time.perf_counter()
                await noop.enqueue_many(range(jobs))
                return time.perf_counter() - started

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            async with Penstock(url) as app:
                noop = app.job_type("noop", int)
                await noop.enqueue_many([])
                async for stamp in stamps_in_loop(count):
                    await noop.enqueue(stamp)

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            app = Penstock(url)

            @app.job("noop")
            async def noop(job: Job[int]) -> None:
                SEEN.note(job.data)

            async with app:
                worker = await app.worker()
                task = asyncio.create_task(worker.run())
                await SEEN.all()
                worker.stop()
                await task

        uvloop.run(run())


if __name__ == "__main__":
    main(Itself())
