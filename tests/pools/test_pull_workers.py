"""Workers that pull maintain the database together, at the pace of one worker; otherwise they are workers like any other."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from penstock import Penstock
from penstock.jobs import worker_queries
from penstock.worker import fleets
from tests.waiting import eventually


async def test_many_pull_workers_of_a_process_maintain_as_one(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        call = getattr(worker_queries, name)

        async def counting(*arguments: Any) -> Any:
            calls[name] += 1
            return await call(*arguments)

        monkeypatch.setattr(worker_queries, name, counting)

    for name in ("due_work", "recover", "promote", "due_in"):
        counted(name)
    pool = app.pool("work", int, slots=64)
    async with AsyncExitStack() as stack:
        started = time.monotonic()
        for number in range(12):
            await stack.enter_async_context(pool.worker(f"w{number}"))
        await eventually(lambda: calls["due_work"] >= 3, "looks at what is due")
        # Once a second at most, with the jitter of a worker; sometimes one more promotion, after a notification.
        most = (time.monotonic() - started) / 0.7 + 2
        assert calls["due_work"] <= most
        assert calls["recover"] <= calls["due_work"]
        assert calls["promote"] + calls["due_in"] <= 2 * most
        # A job that becomes due is pulled without waiting for the maintenance of another process.
        await pool.enqueue("a", 1, run_after=timedelta(milliseconds=200))
        await eventually(lambda: app.find_many(name="work", status="in-progress"), "the claim of the due job")
    before = calls.total()
    # The last one ended it; the next one begins it again.
    async with pool.worker("next"):
        await eventually(lambda: calls.total() > before, "the maintenance of the next one")


async def test_pull_workers_are_workers_that_are_kept_alive_and_leave(app: Penstock) -> None:
    pool = app.pool("work", int)
    database = await app.database()
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(pool.worker()) for _ in range(3)]
        listed = {worker.id: worker.seen_at for worker in await fleets.workers(database)}
        # The ids of a process begin alike.
        assert listed.keys() == {worker.id.removesuffix(".p1") for worker in workers}

        async def all_seen_again() -> bool:
            now = {worker.id: worker.seen_at for worker in await fleets.workers(database)}
            return all(now[id] > seen_at for id, seen_at in listed.items())

        await eventually(all_seen_again, "a heartbeat of each")
    assert await fleets.workers(database) == []
