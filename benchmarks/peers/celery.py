"""Celery on Redis: hiredis, one producer's connection kept, results ignored, a larger prefetch, no events, one worker process."""

from __future__ import annotations

import threading
import time

from celery import Celery

from benchmarks.peers.protocol import SEEN, Peer, main, stamps

POOL = "solo"
"""One process and the fastest for jobs that do nothing: threads and a forked child cost a hand-over for each."""
PREFETCH = 1_000


class CeleryPeer(Peer):
    packages = ("celery", "kombu", "redis", "hiredis")

    def enqueue(self, url: str, jobs: int) -> float:
        app = _app(url)
        noop = app.tasks["noop"]
        with app.producer_or_acquire() as producer:
            started = time.perf_counter()
            for value in range(jobs):
                noop.apply_async((value,), producer=producer)
            return time.perf_counter() - started

    def trickle(self, url: str, count: int) -> None:
        app = _app(url)
        with app.producer_or_acquire() as producer:
            for stamp in stamps(count):
                app.tasks["noop"].apply_async((stamp,), producer=producer)

    def work(self, url: str) -> None:
        worker = _app(url).Worker(
            pool=POOL, concurrency=1, prefetch_multiplier=PREFETCH, loglevel="WARNING", quiet=True,
            without_gossip=True, without_mingle=True, without_heartbeat=True,
        )  # fmt: skip

        def stop() -> None:
            SEEN.done.wait()
            worker.stop()

        threading.Thread(target=stop, daemon=True).start()
        worker.start()


def _app(url: str) -> Celery:
    app = Celery("noop", broker=url.replace("unix://", "redis+socket://", 1))
    app.conf.update(
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        task_create_missing_queues=True,
    )

    @app.task(name="noop", ignore_result=True)
    def noop(value: int) -> None:
        SEEN.note(value)

    return app


if __name__ == "__main__":
    main(CeleryPeer())
