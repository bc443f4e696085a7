"""The bridge under load: many jobs at once through one gearmand, and subscribers that no Gearman worker serves."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import gear
import orjson
import pytest

from penstock import Job, Penstock, Settings
from penstock.integrations.gearman.bridge import Bridge
from penstock.testing import running_worker
from tests.gearman.conftest import WITHOUT_GEARMAN, Gearmand, bridging, echoing
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"
pytestmark = pytest.mark.skipif(bool(WITHOUT_GEARMAN), reason=WITHOUT_GEARMAN)


async def test_a_thousand_forwarded_jobs_each_keep_their_own_result(url: str, gearmand: Gearmand, sql: Sql) -> None:
    async with Penstock(url) as app:
        await app.create_job_type("echo", keep_result=True)
        await app.enqueue_many("echo", [{"n": n} for n in range(1_000)])
    with echoing(gearmand, "echo"):
        async with bridging(url, gearmand, forward=["echo"]):
            await eventually(lambda: _count(sql, "select count(*) from penstock.archived_jobs", 1_000), "a thousand results")
    mixed = await sql.fetch(
        "select data, result from penstock.archived_jobs where status <> 'succeeded' or result is distinct from data"
    )
    assert mixed == []


async def test_a_thousand_submits_that_are_under_way_at_once_are_not_mixed_up(url: str, gearmand: Gearmand, sql: Sql) -> None:
    """All of them are with gearmand before the first is answered, so each JOB_CREATED has 999 others to be taken for."""
    async with Penstock(url, settings=Settings(concurrency=1_000)) as app:
        await app.create_job_type("echo", keep_result=True)
        await app.enqueue_many("echo", [{"n": n} for n in range(1_000)])
        bridge = Bridge(app, [gearmand.server], forward=["echo"], timeout=timedelta(minutes=5))
        running = asyncio.create_task(bridge.run())
        await eventually(lambda: _waiting(gearmand, "echo") == 1_000 or running.done(), "a thousand submits", 120)
        with echoing(gearmand, "echo") as echo:
            await eventually(lambda: _count(sql, "select count(*) from penstock.archived_jobs", 1_000), "the results", 120)
        bridge.stop()
        await running
    mixed = await sql.fetch(
        "select data, result from penstock.archived_jobs where status <> 'succeeded' or result is distinct from data"
    )
    assert mixed == []
    assert sorted(orjson.loads(data)["n"] for _, data in echo.given) == list(range(1_000))


async def test_a_thousand_jobs_of_gearman_at_once_each_get_their_own_answer(url: str, gearmand: Gearmand) -> None:
    async with Penstock(url) as app:

        @app.job("double", keep_result=True)
        async def double(job: Job[Any]) -> dict[str, int]:
            return {"n": job.data["n"], "double": 2 * job.data["n"]}

        async with running_worker(app), bridging(url, gearmand, expose=["double"], timeout=timedelta(minutes=5)):
            client = gear.Client("many")
            client.addServer("127.0.0.1", gearmand.port)
            await asyncio.to_thread(client.waitForServer, 10)
            asked = [gear.Job("double", orjson.dumps({"n": n})) for n in range(1_000)]
            try:
                # From one thread: gear's client itself mixes up the answers when several submit.
                await asyncio.to_thread(lambda: [client.submitJob(job) for job in asked])
                await eventually(lambda: all(job.complete for job in asked), "the answers", 120)
            finally:
                client.shutdown()
    answers = [orjson.loads(b"".join(job.data)) for job in asked]
    assert answers == [{"n": n, "double": 2 * n} for n in range(1_000)]


async def test_functions_without_workers_hold_no_places_that_others_need_and_late_workers_get_everything(
    url: str, gearmand: Gearmand, sql: Sql
) -> None:
    idle = [f"idle{n}" for n in range(10)]
    async with Penstock(url) as app, bridging(url, gearmand, timeout=timedelta(minutes=10)):
        crowd, solo = app.topic("crowd"), app.topic("solo")
        for topic, clients in ((crowd, idle), (solo, ["live"])):
            await topic.declare()
            for client in clients:
                await gearmand.client("subscribe_fanout", f'{{"topic": "{topic.name}", "client_id": "{client}"}}')
        for n in range(40):
            await crowd.publish({"n": n})
        with echoing(gearmand, "solo_live") as live:
            for n in range(400):
                await solo.publish({"n": n})
            done = "select count(*) from penstock.archived_jobs where key = 'solo_live' and status = 'succeeded'"
            await eventually(lambda: _count(sql, done, 400), "the deliveries that have a worker")
        # No copy was settled without a worker.
        assert await sql.fetchval("select count(*) from penstock.archived_jobs where key <> 'solo_live'") == 0
        with echoing(gearmand, *(f"crowd_{client}" for client in idle)) as late:
            done = "select count(*) from penstock.archived_jobs where key <> 'solo_live' and status = 'succeeded'"
            await eventually(lambda: _count(sql, done, 400), "the deliveries to late workers")
    assert sorted(data for _, data in live.given) == sorted(b'{"n":%d}' % n for n in range(400))
    assert {(name, data) for name, data in late.given} == {
        (f"crowd_{client}", b'{"n":%d}' % n) for client in idle for n in range(40)
    }
    wrong = """
        select count(*) from penstock.archived_jobs join penstock.topic_messages on number = message
        where result is distinct from topic_messages.data
    """
    assert await sql.fetchval(wrong) == 0


def _waiting(gearmand: Gearmand, function: str) -> int:
    return gearmand.status().get(function, [0])[0]


async def _count(sql: Sql, query: str, wanted: int) -> bool:
    return bool(await sql.fetchval(query) == wanted)
