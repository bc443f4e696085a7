"""Standing jobs whose begin or end takes longer than their worker waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock, Settings, Standing
from penstock.pools import queries
from penstock.pools.pool import Pool
from tests.pools.standing_runs import Runs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"
BEGIN = "old.running_by is null and new.running_by is not null"
END = "old.running_by is not null and new.running_by is null"
NONE_LEFT = "select count(*) = 0 from penstock.standing_jobs"
SOON = Settings(handover_grace=timedelta(milliseconds=50))


async def held_up(sql: Sql) -> set[tuple[int, datetime]]:
    """The calls that wait for the lock 7, each by its connection and the time at which it began."""
    rows = await sql.fetch("""
        select activity.pid, activity.query_start
        from pg_locks
        join pg_stat_activity as activity using (pid)
        where locktype = 'advisory' and objid = 7 and not granted and activity.datname = current_database()
    """)
    return {(row["pid"], row["query_start"]) for row in rows}


async def hold_up(sql: Sql, when: str) -> None:
    """Let changes of standing jobs wait for the lock 7, which this connection has."""
    await sql.execute(
        "create function hold_up() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock_shared(7); return new; end $$;"
        "create trigger hold_up before update on penstock.standing_jobs for each row"
        f" when ({when}) execute function hold_up();"
        "select pg_advisory_lock(7)"
    )


async def test_a_run_that_is_lost_while_its_begin_waits_for_the_database_runs_again(
    app: Penstock, pool: Pool[Any], sql: Sql
) -> None:
    runs = Runs().on(pool)
    await pool.declare()
    await hold_up(sql, BEGIN)
    async with Workers(app):
        await pool.start("acme")
        first = await eventually(lambda: held_up(sql), "the begin to wait")
        # Lost and taken again between two heartbeats.
        await sql.execute("update penstock.slots set epoch = epoch + 1 where group_name = 'tenants'")
        await sql.execute("select penstock.tell_member('tenants', id) from penstock.members")

        async def another() -> bool:
            now = await held_up(sql)
            return bool(now) and not now & first

        await eventually(another, "the begin under the next epoch to wait")
        await sql.execute("select pg_advisory_unlock(7)")
        await eventually(lambda: runs.now == {"acme"}, "the run")
        (job,) = await pool.standing_jobs()
        assert (job.running_by, job.failures, job.error) == (job.owner, 0, None)
    assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_run_that_is_cancelled_while_its_begin_waits_for_the_database_starts_where_its_slot_moves(
    url: str, sql: Sql
) -> None:
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        await pool.declare()
        await hold_up(sql, BEGIN)
        async with Workers(app) as workers:
            await pool.start("acme")
            await eventually(lambda: held_up(sql), "the begin to wait")
            (first,) = {slot.owner for slot in await pool.slots()}
            assert first is not None
            await workers.add()
            # All slots of the first move, that of the begin among them.
            await pool.drain(first)

            async def moved() -> bool:
                return first not in {slot.owner for slot in await pool.slots()}

            await eventually(moved, "the slots to have moved")
            await sql.execute("select pg_advisory_unlock(7)")
            await eventually(lambda: runs.now == {"acme"}, "the run")
            (job,) = await pool.standing_jobs()
            assert job.running_by == job.owner != first
        assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_run_whose_end_waits_for_the_database_longer_than_its_grace_ends(url: str, sql: Sql) -> None:
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        await pool.declare()
        await hold_up(sql, END)
        async with Workers(app):
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"}, "the run")
            await pool.stop("acme")
            first = await eventually(lambda: held_up(sql), "the end to wait")

            async def cancelled() -> bool:
                return not await held_up(sql) & first

            await eventually(cancelled, "the end of the call, since the time to stop is over")
            await sql.execute("select pg_advisory_unlock(7)")
            await eventually(lambda: sql.fetchval(NONE_LEFT), "the end of the run, which is not wanted", 20)
        assert (runs.now, runs.starts) == (set(), {"acme": 1})


async def test_a_run_whose_begin_was_not_heard_before_it_was_stopped_ends(
    url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def begin_without_answer(*given: Any) -> Any:
        answer = await begin(*given)
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()
        return answer

    begin = queries.begin_standing
    monkeypatch.setattr(queries, "begin_standing", begin_without_answer)
    async with Penstock(url, settings=SOON) as app:
        pool = app.pool("tenants", slots=16)
        runs = Runs().on(pool)
        async with Workers(app):
            await pool.start("acme")
            await begun.wait()
            assert await pool.stop("acme")
            await eventually(lambda: sql.fetchval(NONE_LEFT), "the end of the run, which is not wanted", 20)
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"}, "the run")
    assert (runs.starts, runs.most) == ({"acme": 1}, {"acme": 1})


async def test_a_stop_side_that_hangs_is_cancelled_after_its_time(url: str, sql: Sql) -> None:
    soon = timedelta(milliseconds=50)
    async with Penstock(url, settings=Settings(handover_grace=soon, shutdown_grace=soon)) as app:
        pool = app.pool("tenants", slots=4)
        runs = Runs()

        @pool.standing
        async def run(job: Standing[Any]) -> AsyncIterator[None]:
            runs.begin(job)
            yield
            try:
                await asyncio.Event().wait()
            finally:
                runs.running[job.key] -= 1

        async with Workers(app):
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"})
            await pool.stop("acme")
            await eventually(lambda: sql.fetchval(NONE_LEFT), "the end of the run")
            assert runs.now == set()
            await pool.start("acme")
            await eventually(lambda: runs.now == {"acme"})
