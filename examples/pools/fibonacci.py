"""A pool named fibonacci, a worker that pulls its jobs, and a client.

python -m examples.pools.fibonacci
"""

from __future__ import annotations

import asyncio

from penstock import Penstock

app = Penstock()
pool = app.pool("fibonacci", payload=int)


def fib(n: int) -> int:
    """The n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


async def work(jobs: int) -> list[str]:
    """Join the pool, compute so many jobs, and leave. Ids of workers are unique."""
    lines = []
    async with pool.worker("my-worker") as worker:
        async for job in worker.jobs():
            lines.append(f"fib({job.data})={fib(job.data)}")
            await job.ack()
            if len(lines) == jobs:
                break
    return lines


async def main() -> None:
    """Enqueue ten jobs for two keys, and have them computed."""
    async with app:
        await pool.enqueue_many([(key, n) for n in (1, 2, 10, 42, 90) for key in ("key", "another key")])
        for line in await work(10):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
