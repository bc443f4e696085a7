"""Procrastinate: psycopg's pool, `batch_defer_async`, concurrent jobs in one worker, finished jobs deleted."""

from __future__ import annotations

import asyncio
import time

import uvloop
from procrastinate import App, PsycopgConnector

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

CONCURRENCY = 20


class ProcrastinatePeer(Peer):
    packages = ("procrastinate", "psycopg", "uvloop")

    def prepare(self, url: str) -> None:
        async def run() -> None:
            async with _app(url).open_async() as app:
                await app.schema_manager.apply_schema_async()

        uvloop.run(run())

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            async with _app(url).open_async() as app:
                started = time.perf_counter()
                for at in range(0, jobs, 1_000):
                    await app.tasks["noop"].batch_defer_async(*({"value": value} for value in range(at, min(at + 1_000, jobs))))
                return time.perf_counter() - started

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            async with _app(url).open_async() as app:
                async for stamp in stamps_in_loop(count):
                    await app.tasks["noop"].defer_async(value=stamp)

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            async with _app(url).open_async() as app:
                worker = asyncio.create_task(
                    app.run_worker_async(concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False)
                )
                await SEEN.all()
                worker.cancel()  # it stops gracefully, as its documentation says
                await asyncio.gather(worker, return_exceptions=True)

        uvloop.run(run())


def _app(url: str) -> App:
    app = App(connector=PsycopgConnector(conninfo=url, min_size=4, max_size=CONCURRENCY + 4))

    @app.task(name="noop")
    async def noop(value: int) -> None:
        SEEN.note(value)

    return app


if __name__ == "__main__":
    main(ProcrastinatePeer())
