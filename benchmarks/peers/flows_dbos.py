"""DBOS: a workflow of three steps, on a queue."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dbos import DBOS, DBOSConfig

from benchmarks.peers.flows_protocol import ENDED, STEPS, UNDER_WAY, Flows, main


@DBOS.step()
def do(order: int, step: str) -> dict[str, Any]:
    return ENDED.step(order, step)


@DBOS.workflow()
def process(order: int) -> dict[str, Any]:
    for step in STEPS:
        do(order, step)
    ENDED.order(order)
    return {"order": order}


class OnDbos(Flows):
    packages = ("dbos", "sqlalchemy", "psycopg")

    def prepare(self, url: str) -> None:
        _launch(url)
        DBOS.destroy()

    def start(self, url: str, orders: int) -> float:
        # A process that enqueues and does not work on the queue.
        queue = _launch(url, listens=False)
        started = time.perf_counter()
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            list(pool.map(lambda number: queue.enqueue(process, number), range(orders)))
        seconds = time.perf_counter() - started
        DBOS.destroy()
        return seconds

    def work(self, url: str) -> None:
        _launch(url)


def _launch(url: str, *, listens: bool = True) -> Any:
    config: DBOSConfig = {
        "name": "flows", "system_database_url": url.replace("postgres://", "postgresql://"), "application_version": "1",
        "log_level": "ERROR",
    }  # fmt: skip
    DBOS(config=config)
    if not listens:
        DBOS.listen_queues([])
    DBOS.launch()
    return DBOS.register_queue("orders", worker_concurrency=UNDER_WAY * 4, polling_interval_sec=0.05)


if __name__ == "__main__":
    main(OnDbos())
