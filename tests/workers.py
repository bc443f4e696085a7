"""Workers of an application in the process of a test."""

from __future__ import annotations

import asyncio

from penstock import Penstock
from penstock.worker import Worker


class Workers:
    """Workers of an app in the background of a test."""

    def __init__(self, app: Penstock) -> None:
        self.app = app
        self.workers: list[tuple[Worker, asyncio.Task[None]]] = []

    async def __aenter__(self) -> Workers:
        await self.add()
        return self

    async def add(self) -> Worker:
        worker = await self.app.worker()
        self.workers.append((worker, asyncio.create_task(worker.run())))
        await worker.started()
        return worker

    async def remove(self, worker: Worker) -> None:
        (task,) = [t for w, t in self.workers if w is worker]
        self.workers = [(w, t) for w, t in self.workers if w is not worker]
        worker.stop()
        await task

    async def __aexit__(self, *_: object) -> None:
        for worker, _ in self.workers:
            worker.stop()
        await asyncio.gather(*[task for _, task in self.workers])
