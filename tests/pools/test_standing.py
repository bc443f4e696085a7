"""Standing jobs: one run a key, from start to stop, with its state and its messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Conflict, InvalidInput, NotFound, Penstock, Standing
from penstock.pools.pool import Pool
from tests.pools.standing_runs import Runs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_it_runs_from_start_to_stop_and_leaves_a_state(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        assert await pool.start("acme", {"interval": 60}) == "starting"
        await eventually(lambda: runs.now == {"acme"})
        assert await pool.start("acme", {"interval": 60}) == "unchanged"
        with pytest.raises(Conflict, match="another payload"):
            await pool.start("acme", {"interval": 1})
        assert await pool.start("acme", {"interval": 1}, replace=True) == "replaced"
        await eventually(lambda: runs.data["acme"] == {"interval": 1})
        assert runs.states == [("acme", None), ("acme", {"runs": 1})]
        assert await pool.stop("acme")
        await eventually(lambda: runs.now == set())
        assert not await pool.stop("acme")
    assert runs.most["acme"] == 1


async def test_it_moves_with_its_state_when_workers_come_and_go(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    keys = {f"t{n}" for n in range(20)}
    async with Workers(app) as working:
        for key in keys:
            await pool.start(key)
        await eventually(lambda: runs.now == keys)
        assert sum(runs.starts.values()) == 20
        await working.add()
        await eventually(lambda: sum(runs.starts.values()) > 20, "a move")
        await eventually(lambda: runs.now == keys)
        moved = sum(runs.starts.values()) - 20
        await working.remove(working.workers[0][0])
        await eventually(lambda: runs.now == keys and sum(runs.starts.values()) == 40, "the return of those that stayed")
    assert 0 < moved < 20
    assert set(runs.most.values()) == {1}
    assert all(state == {"runs": 1} for key, state in runs.states[20 : 20 + moved])


async def test_standing_jobs_move_when_the_pool_grows(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    keys = {f"t{n}" for n in range(20)}
    async with Workers(app) as working:
        await working.add()
        await pool.reconcile(dict.fromkeys(keys, 0))
        await eventually(lambda: runs.now == keys)
        await pool.resize(64)
        await eventually(lambda: sum(runs.starts.values()) > 20, "a move")
        await eventually(lambda: runs.now == keys)
    assert set(runs.most.values()) == {1}


async def test_a_large_set_is_reconciled_as_a_whole(app: Penstock, pool: Pool[Any], sql: Any) -> None:
    await pool.declare()
    # A call for each key would take longer than this.
    await sql.execute("set statement_timeout = '15s'")
    reconcile = "select * from penstock.reconcile_standing($1, $2::jsonb)"

    async def become(wanted: dict[str, int]) -> tuple[int, ...]:
        return tuple(await sql.fetchrow(reconcile, pool.name, json.dumps(wanted)))

    many = {f"tenant-{n}": n for n in range(30_000)}
    assert await become(many) == (30_000, 0, 0)
    assert await become(many) == (0, 0, 0)
    # One of them runs: it is not gone before it has stopped, and is started again when it is wanted again.
    await sql.execute(
        "update penstock.standing_jobs set running_by = 'w', state = '1', failures = 3 where key in ('tenant-1', 'tenant-2')"
    )
    assert await become({key: data + 1 for key, data in many.items() if key != "tenant-1"}) == (0, 29_999, 1)
    rows = {row["key"]: row for row in await sql.fetch("select * from penstock.standing_jobs where running_by is not null")}
    assert (rows["tenant-1"]["wanted"], rows["tenant-1"]["version"]) == (False, 1)
    of_second = rows["tenant-2"]
    assert (of_second["wanted"], of_second["version"], of_second["state"], of_second["failures"]) == (True, 2, "1", 0)
    assert await become({"tenant-1": 1, "tenant-2": 3}) == (1, 0, 29_998)
    rows = {row["key"]: row for row in await sql.fetch("select * from penstock.standing_jobs")}
    assert set(rows) == {"tenant-1", "tenant-2"}
    assert (rows["tenant-1"]["wanted"], rows["tenant-1"]["version"], rows["tenant-1"]["state"]) == (True, 2, None)
    for wrong in ({".": 1}, {"": 1}, {"a\nb": 1}):
        with pytest.raises(asyncpg.PostgresError, match="key"):
            await become(wrong)
    assert await sql.fetchval("select count(*) from penstock.standing_jobs where wanted") == 2


async def test_reconcile_makes_the_set_equal_in_one_transaction(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    async with Workers(app):
        assert await pool.reconcile({"a": 1, "b": 2, "c": 3}) == (3, 0, 0)
        await eventually(lambda: runs.now == {"a", "b", "c"})
        assert await pool.reconcile({"b": 2, "c": 4, "d": 5}) == (1, 1, 1)
        assert await pool.reconcile({"b": 2, "c": 4, "d": 5}) == (0, 0, 0)
        await eventually(lambda: runs.now == {"b", "c", "d"} and runs.data["c"] == 4)
        assert runs.starts == {"a": 1, "b": 1, "c": 2, "d": 1}
        results = await asyncio.gather(*[pool.reconcile({"x": n}) for n in range(4)])
        await eventually(lambda: runs.now == {"x"})
        assert sum(started for started, _, _ in results) == 1


async def test_messages_reach_the_run_wherever_it_is(app: Penstock, pool: Pool[Any]) -> None:
    runs = Runs().on(pool)
    await pool.start("acme")
    await pool.notify("acme", "before it runs")
    async with Workers(app):
        await eventually(lambda: runs.messages == [("acme", "before it runs")])
        await pool.notify("acme", {"n": 2})
        await eventually(lambda: runs.messages[1:] == [("acme", {"n": 2})])
    with pytest.raises(NotFound):
        await pool.notify("nobody", 1)


async def test_who_reads_slowly_gets_all_messages_in_order(app: Penstock, pool: Pool[Any], sql: Sql) -> None:
    read, got = asyncio.Event(), []

    @pool.standing
    async def run(job: Standing[Any]) -> None:
        await read.wait()
        async for message in job.messages():
            got.append(message)

    fill = """
        insert into penstock.standing_messages (name, key, data, sent_at)
        select 'tenants', 'acme', to_jsonb(n), now() from generate_series(1, $1::integer) as n
    """
    await pool.start("acme")
    await sql.execute(fill, 2_500)
    async with Workers(app):
        few = "select count(*) <= 1500 from penstock.standing_messages"
        await eventually(lambda: sql.fetchval(few), "the first messages to be taken")
        # What it has not read waits where it is safe.
        assert await sql.fetchval("select count(*) from penstock.standing_messages") == 1_500
        read.set()
        await eventually(lambda: len(got) == 2_500)
    assert got == list(range(1, 2_501))
    await sql.execute(fill, 10_000)
    with pytest.raises(Conflict, match="wait already"):
        await pool.notify("acme", 1)


async def test_a_context_manager_is_a_handler_too(app: Penstock, pool: Pool[Any]) -> None:
    entered: list[str] = []

    @pool.standing
    @asynccontextmanager
    async def run(job: Standing[Any]) -> AsyncIterator[None]:
        entered.append(job.key)
        yield
        entered.append(f"not {job.key}")

    async with Workers(app):
        await pool.start("acme")
        await eventually(lambda: entered == ["acme"])
    assert entered == ["acme", "not acme"]


async def test_a_second_handler_is_refused(pool: Pool[Any]) -> None:
    Runs().on(pool)
    with pytest.raises(InvalidInput, match="already"):
        Runs().on(pool)
