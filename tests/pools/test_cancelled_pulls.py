"""A program goes on pulling jobs after a request that was cancelled, as by `asyncio.wait_for(anext(jobs), 5)`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading

import pytest

from penstock import Penstock
from tests.cancelling import a_cancelled_request


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
async def test_the_jobs_of_a_pull_worker_go_on_after_requests_that_were_cancelled(app: Penstock, delivery: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    pauses = random.Random(seed)
    pool = app.pool("tenants", delivery=delivery)
    seen: list[int] = []
    async with pool.worker(prefetch=4) as worker:
        jobs = worker.jobs()
        await a_cancelled_request(jobs)
        for number in range(40):
            await pool.enqueue(str(number % 4), number)
        async with asyncio.timeout(120):
            while len(seen) < 40:
                # Some requests are cancelled while a job arrives, or while it is written that it begins.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pauses.choice([0.0, 0.001, 0.003, 30])):
                        job = await anext(jobs)
                        seen.append(job.data)
                        async with asyncio.timeout(None):
                            await asyncio.shield(asyncio.ensure_future(job.ack()))
    assert sorted(seen) == list(range(40))
    assert [[n for n in seen if n % 4 == key] for key in range(4)] == [list(range(key, 40, 4)) for key in range(4)]
    with pytest.raises(StopAsyncIteration):
        await anext(jobs)


class Interrupted(Exception):
    """Raised by the handler of a signal."""


def test_a_thread_goes_on_pulling_after_a_request_that_a_signal_interrupted(url: str) -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    app = Penstock(url)
    try:
        pool = app.pool("tenants").sync
        with pool.worker() as worker:
            jobs = worker.jobs()
            threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
            with pytest.raises(Interrupted):
                next(jobs)
            pool.enqueue("acme", 1)
            job = next(jobs)
            job.ack()
            assert job.data == 1
    finally:
        app.sync.close()
        signal.signal(signal.SIGUSR1, before)
