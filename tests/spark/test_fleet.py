"""A fleet on executors: it works, shows its metrics at the driver, notices that it is drained, and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import Penstock
from penstock.errors import Conflict, NotFound
from penstock.spark import fleet
from penstock.worker import fleets
from tests.http.http_server import free_port
from tests.measured_worker import value_of
from tests.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Ask = Callable[..., list[Any]]


async def test_a_fleet_works_until_it_is_drained(spark: SparkSession, app: Penstock, url: str) -> None:
    ended: list[BaseException | None] = []
    address = "127.0.0.1", free_port()

    def serve() -> None:
        try:
            fleet.run(spark, url, "fleet_app:app", workers=2, fleet="f", ship=Path(__file__).parent, metrics=address)
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    await app.enqueue_many(app.job_type("count", int), range(200))
    database = await app.database()
    thread = threading.Thread(target=serve)
    thread.start()
    try:

        async def worked() -> bool:
            assert not ended, ended
            (count,) = [c for c in await app.counts() if c.name == "count"]
            return count.succeeded_last_hour == 200

        await eventually(worked, "the jobs", timeout=90)

        async def both() -> bool:
            return [(record.wanted, record.present) for record in await fleets.fleets(database)] == [(2, 2)]

        await eventually(both, "both workers", timeout=60)
        with pytest.raises(Conflict, match="runs already"):
            await fleets.start(database, "f", "x:y", 1)
        # The driver shows the metrics of both.
        shown = f"http://{address[0]}:{address[1]}"
        settled = 'penstock_jobs_settled_total{outcome="succeeded",type="count"}'

        def counted() -> bool:
            text = httpx.get(f"{shown}/metrics", timeout=60).text
            return (value_of(text, settled), value_of(text, 'penstock_places{kind="async"}')) == (200, 200)

        await eventually(counted, "the reports of both workers", timeout=60)
        assert httpx.get(f"{shown}/readyz", timeout=60).text == "ready\n"
        known = await fleets.workers(database)
        assert [(w.fleet, w.state, w.alive, w.names) for w in known] == [("f", "running", True, ["count"])] * 2
        # One of them is told to stop; the other stays.
        assert await fleets.drain_worker(database, known[0].id) == "f"

        async def one_left() -> bool:
            return [w.id for w in await fleets.workers(database)] == [known[1].id]

        await eventually(one_left, "the end of one worker", timeout=60)

        def one_place_less() -> bool:
            text = httpx.get(f"{shown}/metrics", timeout=60).text
            return (value_of(text, settled), value_of(text, 'penstock_places{kind="async"}')) == (200, 100)

        await eventually(one_place_less, "the metrics of one worker, with the counts of both", timeout=60)
    finally:
        await fleets.drain(database, "f")
    await eventually(lambda: ended, "the end of the fleet", timeout=60)
    assert ended == [None]
    assert await database.fetch("select * from penstock.workers") == []
    assert await fleets.fleets(database) == []
    with pytest.raises(NotFound, match="no such fleet"):
        await fleets.drain(database, "f")
