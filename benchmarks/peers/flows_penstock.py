"""Penstock itself: a job with three durable steps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvloop

from benchmarks.peers.flows_protocol import ENDED, STEPS, Flows, main
from penstock import Job, Penstock


class OnPenstock(Flows):
    packages = ("penstock", "asyncpg", "uvloop")

    def prepare(self, url: str) -> None:
        async def declare() -> None:
            async with _app(url) as app:
                await app.declare()

        uvloop.run(declare())

    def start(self, url: str, orders: int) -> float:
        async def enqueue() -> float:
            async with _app(url) as app:
                started = time.perf_counter()
                await app.enqueue_many("order", range(orders))
                return time.perf_counter() - started

        return uvloop.run(enqueue())

    def work(self, url: str) -> None:
        async def run() -> None:
            async with _app(url) as app:
                worker = await app.worker()
                await asyncio.gather(worker.run(), asyncio.to_thread(ENDED.done.wait))

        uvloop.run(run())


def _app(url: str) -> Penstock:
    app = Penstock(url)

    async def do(order: int, step: str) -> dict[str, Any]:
        return ENDED.step(order, step)

    @app.job("order", keep_result=True)
    async def order(job: Job[int]) -> dict[str, Any]:
        for step in STEPS:
            await job.step(step, do, job.data, step)
        ENDED.order(job.data)
        return {"order": job.data}

    return app


if __name__ == "__main__":
    main(OnPenstock())
