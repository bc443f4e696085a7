"""absurd: a task with three steps. A client has one connection, so several work in one process, each in a thread."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import Absurd

from benchmarks.peers.flows_protocol import ENDED, STEPS, UNDER_WAY, Flows, main


class OnAbsurd(Flows):
    packages = ("absurd-sdk", "psycopg")

    def prepare(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(absurdctl.BUNDLED_SCHEMA_SQL)
            connection.execute("select absurd.create_queue('default')")

    def start(self, url: str, orders: int) -> float:
        apps = [_app(url) for _ in range(UNDER_WAY)]

        def spawn(place: int) -> None:
            for number in range(place, orders, UNDER_WAY):
                apps[place].spawn("order", {"order": number})

        started = time.perf_counter()
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            list(pool.map(spawn, range(UNDER_WAY)))
        return time.perf_counter() - started

    def work(self, url: str) -> None:
        for place in range(UNDER_WAY):
            app = _app(url)
            threading.Thread(
                target=app.start_worker, kwargs={"worker_id": f"w{place}", "batch_size": 10, "poll_interval": 0.05}, daemon=True
            ).start()


def _app(url: str) -> Any:
    app = Absurd(url, queue_name="default")

    @app.register_task("order")
    def order(params: dict[str, Any], ctx: Any) -> dict[str, Any]:
        for step in STEPS:
            ctx.step(step, lambda step=step: ENDED.step(params["order"], step))
        ENDED.order(params["order"])
        return {"order": params["order"]}

    return app


if __name__ == "__main__":
    main(OnAbsurd())
