"""An application whose work leaves words wherever Penstock stores something, encrypted or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import asyncpg

from penstock import Event, Job, OnFailure, Penstock, Retry, Standing
from penstock.testing import running_worker
from tests.encryption.process_app import app as process_app
from tests.waiting import eventually

BEGINNING = "numbat"
WORDS = [
    f"{BEGINNING}{what}"
    for what in (
        "payload", "result", "progress", "error", "logline", "replay", "batched", "batcherror", "finished", "inprocess",
        "event", "eventerror", "load", "message", "copyresult", "copyerror", "standing", "state", "notice", "standingerror",
        "runresult", "runlog",
    )
]  # fmt: skip


class Searched:
    """The application.

    Args:
        app: Application without declarations, of any database.
        encrypted: Whether everything is declared as encrypted.
    """

    def __init__(self, app: Penstock, *, encrypted: bool) -> None:
        self.app = app
        options: dict[str, Any] = {"encrypted": encrypted, "keep_result": True, "max_attempts": 1}

        @app.job("payments", **options)
        async def pay(job: Job[dict[str, Any]]) -> Any:
            job.progress({"at": "numbatprogress"})
            job.log("numbatlogline")
            if job.data.get("wait"):

                async def written() -> bool:
                    return (await app.find(job.id)).progress is not None

                await eventually(written, "the progress")
            if job.data.get("fail"):
                raise Retry("numbaterror")
            return ["numbatresult"]

        @app.job("batches", max_batch_size=10, **options)
        async def in_batches(jobs: list[Job[dict[str, Any]]]) -> list[Any]:
            return [ValueError("numbatbatcherror") if job.data.get("fail") else "numbatbatched" for job in jobs]

        @app.job("finishing", **options)
        async def finishing(job: Job[dict[str, Any]]) -> None:
            connection = await asyncpg.connect(app.database_url())
            try:
                async with connection.transaction():
                    await job.finish(connection, result={"word": "numbatfinished"})
            finally:
                await connection.close()

        handler = process_app.types["in-process"].handler
        assert handler is not None
        app.job("processes", executor="process", **options)(handler)  # type: ignore[call-overload]

        self.orders = app.stream("orders", partitions=1, encrypted=encrypted)

        @self.orders.consumer(group="billing", on_failure=OnFailure(max_attempts=1, then="dead-letter"))
        async def bill(event: Event[dict[str, Any]]) -> None:
            if event.data.get("fail"):
                raise ValueError("numbateventerror")

        self.delays = app.topic("delays", encrypted=encrypted)

        @self.delays.subscriber("JFK", max_attempts=1)
        async def at_jfk(job: Job[dict[str, Any]]) -> str:
            if job.data.get("fail"):
                raise ValueError("numbatcopyerror")
            return "numbatcopyresult"

        self.tenants = app.pool("tenants", encrypted=encrypted)

        @self.tenants.standing
        async def tenant(job: Standing[dict[str, Any]]) -> AsyncIterator[None]:
            if job.data.get("fail"):
                raise ValueError("numbatstandingerror")
            await job.save({"word": "numbatstate"})
            yield

        @app.timer(every=timedelta(milliseconds=200), name="report", **options)
        async def report(job: Job[Any]) -> str:
            job.log("numbatrunlog")
            return "numbatrunresult"

    async def work(self, worker: AbstractAsyncContextManager[object] | None = None) -> None:
        """Let each word pass through each way.

        Args:
            worker: Runs what is enqueued; None: a worker in this process.
        """
        app = self.app
        first = await app.enqueue("payments", {"card": "numbatpayload"})
        await app.enqueue("payments", {"card": "numbatpayload" * 300})
        await app.enqueue("payments", {"fail": True})
        await app.enqueue("payments", {"wait": True})
        await app.enqueue_many("batches", [{"n": n, "fail": n % 2} for n in range(6)])
        await app.enqueue("finishing", {})
        await app.enqueue("processes", {"card": "numbatinprocess"})
        await self.orders.append_many([{"word": "numbatevent"}, {"fail": True}])
        await self.orders.load([{"word": "numbatload"} for _ in range(3)])
        await app.subscribe()
        await self.delays.publish_many([{"word": "numbatmessage"}, {"fail": True}])
        await self.tenants.start("acme", {"word": "numbatstanding"})
        await self.tenants.notify("acme", {"word": "numbatnotice"})
        await self.tenants.start("bolt", {"fail": True})
        async with worker or running_worker(app):
            for condition, what in [
                (self._jobs_done, "the jobs"), (self._events_done, "the events"), (self._standing_failed, "the standing jobs"),
                (self._ran, "a run"),
            ]:  # fmt: skip
                await eventually(condition, what, timeout=120.0)
        await app.replay(first.id, data={"card": "numbatreplay"}, force=True)

    async def _jobs_done(self) -> bool:
        return not any(
            count.ready or count.in_progress for count in await self.app.counts() if count.name not in ("report", "tenants")
        )

    async def _events_done(self) -> bool:
        return [lag.lag for lag in await self.orders.lag()] == [0]

    async def _ran(self) -> bool:
        return bool(await self.app.find_many(name="report", status="succeeded", limit=1))

    async def _standing_failed(self) -> bool:
        acme, bolt = await self.tenants.standing_jobs()
        return acme.state is not None and bolt.error is not None
