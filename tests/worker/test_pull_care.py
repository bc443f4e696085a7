"""Workers that pull take care of the database together, at the pace of one worker."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from conftest import eventually
from penstock import Penstock
from penstock.postgres import jobs


async def test_many_pull_workers_of_a_process_take_care_as_one(app: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> None:
        call = getattr(jobs, name)

        async def counting(*arguments: Any) -> Any:
            calls[name] += 1
            return await call(*arguments)

        monkeypatch.setattr(jobs, name, counting)

    for name in ("recover", "promote", "due_in"):
        counted(name)
    pool = app.pool("work", int, slots=64)
    async with AsyncExitStack() as stack:
        started = time.monotonic()
        workers = [await stack.enter_async_context(pool.worker(f"w{number}")) for number in range(12)]
        await eventually(lambda: calls["recover"] >= 3, "recovery")
        # Each second at most, with the jitter of a worker's; promotion now and then once more, when somebody heard of a job.
        most = (time.monotonic() - started) / 0.7 + 2
        assert calls["recover"] <= most
        assert calls["promote"] + calls["due_in"] <= 2 * most
        # A job that becomes due is pulled without waiting for anybody else's care.
        await pool.enqueue("a", 1, run_after=timedelta(milliseconds=200))
        await eventually(lambda: any(worker._puller.waiting for worker in workers if worker._puller), "the due job")
    before = calls.total()
    # The last one ended it; the next one begins it anew.
    async with pool.worker("next"):
        await eventually(lambda: calls.total() > before, "the next one's care")
