"""Subscriptions with a time to live through outages: of the server, and of what lies between it and a worker that lives."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Job, Penstock
from penstock.testing import TemporaryDatabases
from tests.waiting import eventually

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture
def young() -> Iterator[str]:
    """A database on a server that has just been started."""
    with TemporaryDatabases() as databases, databases.database() as url:
        yield url


async def test_the_time_of_a_subscription_does_not_run_while_the_server_is_away(young: str) -> None:
    async with Penstock(young) as app:
        sql = await asyncpg.connect(young)
        news = app.topic("news")
        await news.subscribe("ada", ttl=timedelta(minutes=5))
        await news.publish({})
        # As it is when the server comes back after a long time.
        await sql.execute("update penstock.subscriptions set expires_at = now() - interval '1 hour'")
        await news.publish({})
        ended, removed = await sql.fetchrow("select * from penstock.maintain_topics()")
        assert (ended, removed) == (0, 0)
        assert [subscriber.client_id for subscriber in await news.subscribers()] == ["ada"]
        assert await news.renew("ada")
        assert await sql.fetchval("select count(*) from penstock.queued_jobs where name = 'news_ada'") == 2
        # One whose time has run out since the server started has ended.
        await sql.execute("update penstock.subscriptions set ttl = '1 microsecond', expires_at = now() - interval '1 s'")
        assert not await news.renew("ada")
        assert (await sql.fetchrow("select * from penstock.maintain_topics()"))["ended"] == 1
        await sql.close()


async def test_a_worker_that_was_cut_off_goes_on_where_it_was(app: Penstock, sql: Sql) -> None:
    news = app.topic("news")
    free = asyncio.Event()
    seen: Counter[int] = Counter()

    @news.subscriber("ada", ttl=timedelta(seconds=2), concurrency=1)
    async def read(job: Job[Any]) -> None:
        await free.wait()
        seen[job.data["n"]] += 1

    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    await worker.started()
    await news.publish_many([{"n": n} for n in range(20)])
    expires = "select expires_at from penstock.subscriptions where client_id = 'ada'"
    before = await sql.fetchval(expires)

    async def renewed() -> bool:
        return (await sql.fetchval(expires) or before) > before

    await eventually(renewed, "a renewal after the messages")
    old = "select pg_postmaster_start_time() < now() - interval '3 s'"
    await eventually(lambda: sql.fetchval(old), "the server to be up for longer than the time to live")
    # Others find that it was not renewed in time, and messages come that are not for it.
    async with sql.transaction():
        await sql.execute("update penstock.subscriptions set expires_at = now() - interval '1 hour'")
        await sql.execute(
            "select penstock.publish_many('news', array(select jsonb_build_object('n', n) from generate_series(20, 24) n))"
        )
        assert await sql.fetchval("select count(*) from penstock.subscriptions") == 0
    await sql.execute("select penstock.maintain_topics()")
    await eventually(lambda: sql.fetchval("select count(*) from penstock.subscriptions"), "the worker to subscribe again")
    free.set()
    await eventually(lambda: len(seen) == 25, "all messages")
    worker.stop()
    await running
    assert seen == Counter(range(25))
