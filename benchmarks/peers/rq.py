"""RQ: `enqueue_many`, hiredis, and its SimpleWorker, which does not fork for each job; results and finished jobs are not kept."""

from __future__ import annotations

import logging
import time

from redis import Redis
from rq import Queue, SimpleWorker

from benchmarks.peers.protocol import SEEN, Peer, main, stamps


class RqPeer(Peer):
    packages = ("rq", "redis", "hiredis")

    def enqueue(self, url: str, jobs: int) -> float:
        queue = Queue(connection=Redis.from_url(url))
        started = time.perf_counter()
        for at in range(0, jobs, 1_000):
            queue.enqueue_many(
                [
                    Queue.prepare_data(noop, (value,), result_ttl=0, description="noop")
                    for value in range(at, min(at + 1_000, jobs))
                ]
            )
        return time.perf_counter() - started

    def trickle(self, url: str, count: int) -> None:
        queue = Queue(connection=Redis.from_url(url))
        for stamp in stamps(count):
            queue.enqueue(noop, stamp, result_ttl=0, description="noop")

    def work(self, url: str) -> None:
        logging.disable(logging.INFO)
        worker = SimpleWorker([Queue(connection=Redis.from_url(url))], connection=Redis.from_url(url), log_job_description=False)
        worker.log_result_lifespan = False
        # It waits for minutes when there is no job, and only a signal would end that; so it is told how many there are.
        worker.work(max_jobs=SEEN.expected, logging_level="WARNING")


def noop(value: int) -> None:
    SEEN.note(value)


# The worker imports a handler by the name of its module, which is not `__main__` there.
noop.__module__ = "benchmarks.peers.rq"

if __name__ == "__main__":
    main(RqPeer())
