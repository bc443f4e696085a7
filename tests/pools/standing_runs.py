"""What the handler of a standing job sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from penstock import Standing
from penstock.pools.pool import Pool


class Runs:
    """What a handler saw: how many run of each key, how often each was started, and messages."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.starts: Counter[str] = Counter()
        self.states: list[tuple[str, Any]] = []
        self.messages: list[tuple[str, Any]] = []
        self.data: dict[str, Any] = {}

    def on(self, pool: Pool[Any]) -> Runs:
        @pool.standing
        async def run(job: Standing[Any]) -> AsyncIterator[None]:
            self.begin(job)
            listening = asyncio.create_task(self.listen(job))
            try:
                yield
            finally:
                listening.cancel()
                self.running[job.key] -= 1
            job.state = {"runs": self.starts[job.key]}

        return self

    def begin(self, job: Standing[Any]) -> None:
        self.starts[job.key] += 1
        self.running[job.key] += 1
        self.most[job.key] = max(self.most[job.key], self.running[job.key])
        self.states.append((job.key, job.state))
        self.data[job.key] = job.data

    async def listen(self, job: Standing[Any]) -> None:
        async for message in job.messages():
            self.messages.append((job.key, message))

    @property
    def now(self) -> set[str]:
        return {key for key, count in self.running.items() if count}
