"""Dramatiq on Redis: hiredis, no result backend, more messages fetched at a time than by default."""

from __future__ import annotations

import logging
import os
import time

os.environ["dramatiq_queue_prefetch"] = "1000"  # noqa: SIM112 - its name, read when dramatiq is imported

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from benchmarks.peers.protocol import SEEN, Peer, main, stamps

THREADS = 2


class DramatiqPeer(Peer):
    packages = ("dramatiq", "redis", "hiredis")

    def enqueue(self, url: str, jobs: int) -> float:
        noop = _actor(url)
        started = time.perf_counter()
        for value in range(jobs):
            noop.send(value)
        return time.perf_counter() - started

    def trickle(self, url: str, count: int) -> None:
        noop = _actor(url)
        for stamp in stamps(count):
            noop.send(stamp)

    def work(self, url: str) -> None:
        logging.basicConfig(level=logging.WARNING)
        noop = _actor(url)
        worker = dramatiq.Worker(noop.broker, worker_threads=THREADS, worker_timeout=100)
        worker.start()
        SEEN.done.wait()
        worker.stop()


def _actor(url: str) -> dramatiq.Actor:
    broker = RedisBroker(url=url)
    dramatiq.set_broker(broker)

    @dramatiq.actor(actor_name="noop")
    def noop(value: int) -> None:
        SEEN.note(value)

    return noop


if __name__ == "__main__":
    main(DramatiqPeer())
