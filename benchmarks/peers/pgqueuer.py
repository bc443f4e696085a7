"""PgQueuer, as its guide to performance has it: asyncpg, uvloop, larger batches, its own settings for autovacuum; and five
consumers with a connection each in the one process, as in its own benchmark.

Its tables stay logged ("durable", the default), for jobs that are enqueued survive a crash in all other systems on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

BATCH = 200
CONSUMERS = 5


class PgQueuerPeer(Peer):
    packages = ("pgqueuer", "asyncpg", "uvloop")

    def prepare(self, url: str) -> None:
        async def install(queries: Queries) -> None:
            await queries.install()
            await queries.optimize_autovacuum()

        uvloop.run(_with_queries(url, install))

    def enqueue(self, url: str, jobs: int) -> float:
        async def run(queries: Queries) -> float:
            started = time.perf_counter()
            for at in range(0, jobs, 10_000):
                values = range(at, min(at + 10_000, jobs))
                await queries.enqueue(["noop"] * len(values), [b"%d" % value for value in values], [0] * len(values))
            return time.perf_counter() - started

        return uvloop.run(_with_queries(url, run))

    def trickle(self, url: str, count: int) -> None:
        async def run(queries: Queries) -> None:
            async for stamp in stamps_in_loop(count):
                await queries.enqueue("noop", b"%d" % stamp)

        uvloop.run(_with_queries(url, run))

    def work(self, url: str) -> None:
        async def run() -> None:
            consumers = []
            for _ in range(CONSUMERS):
                consumer = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

                @consumer.entrypoint("noop")
                async def noop(job: Job) -> None:
                    SEEN.note(int(job.payload or b""))

                consumers.append(consumer)
            running = [asyncio.create_task(consumer.run(batch_size=BATCH)) for consumer in consumers]
            await SEEN.all()
            for consumer in consumers:
                consumer.shutdown.set()
            await asyncio.gather(*running)

        uvloop.run(run())


async def _with_queries(url: str, use: Callable[[Queries], Awaitable[Any]]) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await use(Queries(AsyncpgDriver(connection)))
    finally:
        await connection.close()


if __name__ == "__main__":
    main(PgQueuerPeer())
