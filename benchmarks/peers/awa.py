"""awa: COPY into its queue storage, and a worker with the settings of its authors' own benchmark of the Python binding."""

from __future__ import annotations

import time
from dataclasses import dataclass

import uvloop
from awa import AsyncClient, Job

from benchmarks.peers.protocol import SEEN, Peer, main, stamps_in_loop

WORKERS = 256
CLAIM = 512
POLL_MS = 50


@dataclass
class Noop:
    value: int


class AwaPeer(Peer):
    packages = ("awa-pg", "uvloop")

    def prepare(self, url: str) -> None:
        async def run() -> None:
            client = AsyncClient(_with_host(url))
            await client.migrate()
            await client.install_queue_storage(schema="awa")  # the engine that `enqueue_many_copy` needs
            await client.close()

        uvloop.run(run())

    def enqueue(self, url: str, jobs: int) -> float:
        async def run() -> float:
            client = AsyncClient(_with_host(url))
            started = time.perf_counter()
            for at in range(0, jobs, 10_000):
                await client.enqueue_many_copy([Noop(value) for value in range(at, min(at + 10_000, jobs))], queue="noop")
            seconds = time.perf_counter() - started
            await client.close()
            return seconds

        return uvloop.run(run())

    def trickle(self, url: str, count: int) -> None:
        async def run() -> None:
            client = AsyncClient(_with_host(url))
            async for stamp in stamps_in_loop(count):
                await client.insert(Noop(stamp), queue="noop")
            await client.close()

        uvloop.run(run())

    def work(self, url: str) -> None:
        async def run() -> None:
            client = AsyncClient(_with_host(url), max_connections=20)

            @client.task(Noop, queue="noop")
            async def noop(job: Job[Noop]) -> None:
                SEEN.note(job.args.value)

            await client.start([{"name": "noop", "max_workers": WORKERS, "claim_batch_size": CLAIM}], poll_interval_ms=POLL_MS)
            await SEEN.all()
            await client.shutdown(timeout_ms=5_000)
            await client.close()

        uvloop.run(run())


def _with_host(url: str) -> str:
    """Its driver wants a host in its place also when a parameter says where the socket is."""
    return url.replace("@/", "@localhost/", 1)


if __name__ == "__main__":
    main(AwaPeer())
