"""Standing jobs in races: at most one run of each key, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock, Settings, Standing
from penstock.groups import heartbeat
from penstock.pools.pool import Pool
from tests.pools.standing_runs import Runs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_a_stop_and_start_at_once_end_with_one_run(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app) as working:
        await working.add()
        for _ in range(10):
            await asyncio.gather(pool.start("acme"), pool.stop("acme"))
        await pool.start("acme")
        await eventually(lambda: runs.now == {"acme"})
        await pool.stop("acme")
        await eventually(lambda: runs.now == set())
    assert runs.most["acme"] == 1


async def test_it_is_not_lost_when_its_worker_dies_and_others_clean_up_at_once(url: str, sql: Sql) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.4), dead_after=timedelta(seconds=1.5))
    async with Penstock(url, settings=settings) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app) as working:
            await working.add()
            await working.add()
            await pool.reconcile({f"t{n}": n for n in range(12)})
            await eventually(lambda: len(runs.now) == 12)
            _, task = working.workers.pop(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert len(runs.now) < 12, "it had none"
            await eventually(lambda: len(runs.now) == 12, "all again")
            rows = await sql.fetch("select key, running_by from penstock.standing_jobs")
            assert {row["running_by"] for row in rows} <= {member.id for member in await pool.workers()}
        assert set(runs.most.values()) == {1}


async def test_a_member_that_is_cut_off_stops_its_runs_before_others_start_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(heartbeat_interval=timedelta(seconds=0.4), dead_after=timedelta(seconds=2))
    runs = Runs()
    async with Penstock(url, settings=settings) as first, Penstock(url, settings=settings) as second:
        pools = [app.pool("tenants", slots=8) for app in (first, second)]
        for pool in pools:
            runs.on(pool)
        async with Workers(second):
            await pools[0].reconcile({f"t{n}": n for n in range(8)})
            await eventually(lambda: len(runs.now) == 8, "their start at the one that is there")
            async with Workers(first):
                await eventually(lambda: len(runs.now) == 8 and sum(runs.starts.values()) > 8, "a move to the other")
                before = sum(runs.starts.values())

                def unreachable() -> Any:
                    raise OSError("cut off")

                database = await first.database()
                monkeypatch.setattr(database, "_acquire", unreachable)
                # The heartbeat beside the loop has a connection of its own.
                beside = heartbeat.of(database, first.settings)
                monkeypatch.setattr(beside, "_beat", lambda _: unreachable())
                await eventually(lambda: sum(runs.starts.values()) > before, "the start of its jobs elsewhere")
                await eventually(lambda: len(runs.now) == 8)
                monkeypatch.undo()
                await eventually(lambda: len(runs.now) == 8)
    assert set(runs.most.values()) == {1}, "two at once"


async def test_a_start_under_an_old_epoch_or_version_is_refused(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    await pool.declare()
    await sql.execute("select penstock.join_group('tenants', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set target = 'm', owner = 'm', epoch = 7")
    await pool.start("acme")
    slot = pool.slot_of("acme")
    begin = "select count(*) from penstock.begin_standing('tenants', 'acme', $1, $2, $3, $4)"
    assert await sql.fetchval(begin, "m", slot, 6, 1) == 0
    assert await sql.fetchval(begin, "n", slot, 7, 1) == 0
    assert await sql.fetchval(begin, "m", slot, 7, 2) == 0
    assert await sql.fetchval(begin, "m", slot, 7, 1) == 1
    assert await sql.fetchval(begin, "m", slot, 7, 1) == 0, "a second run"
    assert not await sql.fetchval("select penstock.end_standing('tenants', 'acme', 'm', 6)")
    assert await sql.fetchval("select penstock.end_standing('tenants', 'acme', 'm', 7)")


async def test_a_message_that_comes_while_it_starts_is_not_lost(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    begun, go_on, got = asyncio.Event(), asyncio.Event(), []

    async def listen(job: Standing[Any]) -> None:
        async for message in job.messages():
            got.append(message)

    @pool.standing
    async def start_slowly(job: Standing[Any]) -> AsyncIterator[None]:
        begun.set()
        await go_on.wait()
        listening = asyncio.create_task(listen(job))
        yield
        listening.cancel()

    async with Workers(app):
        await pool.start("acme")
        await begun.wait()
        await pool.notify("acme", "early")
        await eventually(lambda: sql.fetchval("select count(*) = 0 from penstock.standing_messages"), "the message to be taken")
        go_on.set()
        await eventually(lambda: got == ["early"])


async def test_a_begin_whose_answer_was_lost_does_not_block_the_key(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        await pool.start("other")
        await eventually(lambda: runs.now == {"other"})
        # The state after a begin whose answer was lost, or after an end that was not written.
        async with sql.transaction():
            await pool_start(sql, "acme")
            await sql.execute("""
                update penstock.standing_jobs as standing
                set running_by = slots.owner, running_epoch = slots.epoch
                from penstock.slots
                where standing.key = 'acme' and slots.group_name = 'tenants' and slots.slot = standing.slot
            """)
        await eventually(lambda: runs.now == {"acme", "other"})
    assert runs.starts == {"acme": 1, "other": 1}


async def pool_start(sql: Sql, key: str) -> None:
    await sql.execute("select penstock.start_standing('tenants', $1)", key)


async def test_a_key_that_comes_back_waits_for_the_run_that_still_ends(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    runs, ending, may_end = Runs(), asyncio.Event(), asyncio.Event()

    @pool.standing
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        runs.begin(job)
        try:
            yield
        finally:
            ending.set()
            # However often it is cancelled.
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()
            runs.running[job.key] -= 1

    async with Workers(app):
        await pool.reconcile({"acme": 0})
        await eventually(lambda: runs.now == {"acme"})
        # Lost and taken again between two heartbeats.
        await sql.execute("update penstock.slots set epoch = epoch + 1 where group_name = 'tenants'")
        await sql.execute("update penstock.standing_jobs set running_by = null, running_epoch = null")
        await sql.execute("select penstock.tell_member('tenants', id) from penstock.members")
        await ending.wait()
        await pool.start("other")
        await eventually(lambda: "other" in runs.now)
        assert runs.starts["acme"] == 1
        may_end.set()
        await eventually(lambda: runs.starts["acme"] == 2)
    assert runs.most["acme"] == 1
