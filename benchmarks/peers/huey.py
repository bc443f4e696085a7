"""Huey on Redis: hiredis, blocking pops, no results, no periodic tasks."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from huey import RedisHuey

from benchmarks.peers.protocol import SEEN, Peer, main, stamps

THREADS = 1


class HueyPeer(Peer):
    packages = ("huey", "redis", "hiredis")

    def enqueue(self, url: str, jobs: int) -> float:
        noop = _task(url)
        started = time.perf_counter()
        for value in range(jobs):
            noop(value)
        return time.perf_counter() - started

    def trickle(self, url: str, count: int) -> None:
        noop = _task(url)
        for stamp in stamps(count):
            noop(stamp)

    def work(self, url: str) -> None:
        logging.basicConfig(level=logging.WARNING)
        consumer = _task(url).huey.create_consumer(
            workers=THREADS, periodic=False, check_worker_health=False, worker_type="thread"
        )

        def stop() -> None:
            SEEN.done.wait()
            consumer.stop(graceful=True)

        threading.Thread(target=stop, daemon=True).start()
        consumer.run()


def _task(url: str) -> Any:
    huey = RedisHuey("noop", url=url, results=False, blocking=True, read_timeout=1)

    @huey.task(name="noop")
    def noop(value: int) -> None:
        SEEN.note(value)

    return noop


if __name__ == "__main__":
    main(HueyPeer())
