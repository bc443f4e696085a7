"""The bridge under load: many jobs at once through one gearmand, and subscribers that no Gearman worker serves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from conftest import eventually
from penstock import Penstock

from .conftest import WITHOUT_GEARMAN, Gearmand, bridging, echoing

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


async def _count(sql: Sql, query: str, wanted: int) -> bool:
    return bool(await sql.fetchval(query) == wanted)
