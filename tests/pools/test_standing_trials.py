"""Standing jobs that end their workers: they start one by one, and are quarantined."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from penstock.groups import trials
from penstock.pools.pool import Pool
from tests.pools.standing_runs import Runs
from tests.waiting import eventually
from tests.workers import Workers

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def lose(sql: Sql, tried: dict[str, int | None]) -> dict[str, tuple[int, bool]]:
    """A worker is lost while it runs these, on trial with so many; returns the crashes, and whether they are quarantined."""
    for key, with_others in tried.items():
        await sql.execute(
            "update penstock.standing_jobs set running_by = 'm', running_epoch = 1, started_at = now(), tried_with = $2"
            " where key = $1", key, with_others,
        )  # fmt: skip
    await sql.execute("select penstock.end_slots('tenants', 'm', null, '{}')")
    rows = await sql.fetch("select key, crashes, quarantined_at, running_by from penstock.standing_jobs")
    assert {row["running_by"] for row in rows} == {None}
    return {row["key"]: (row["crashes"], row["quarantined_at"] is not None) for row in rows}


async def test_only_what_ends_its_workers_alone_is_set_aside(pool: Pool[Any], sql: Sql) -> None:
    for key in ("a", "b", "c"):
        await pool.start(key)
    assert await lose(sql, {"a": None, "b": None}) == {"a": (1, False), "b": (1, False), "c": (0, False)}
    # Only standing jobs on trial get the blame.
    assert await lose(sql, {"a": 2, "b": 2, "c": None}) == {"a": (2, False), "b": (2, False), "c": (0, False)}
    # Alone on trial, but it may have been a job beside it: once more.
    assert await lose(sql, {"a": 1}) == {"a": (3, False), "b": (2, False), "c": (0, False)}
    # A trial that it survives says that it was.
    await sql.execute("update penstock.standing_jobs set running_by = 'm' where key = 'a'")
    await sql.execute("select penstock.acquit_standing('tenants', 'm', '{a}')")
    assert await lose(sql, {"a": 1}) == {"a": (4, False), "b": (2, False), "c": (0, False)}
    assert await lose(sql, {"a": 1, "c": None}) == {"a": (5, False), "b": (2, False), "c": (0, False)}
    assert await lose(sql, {"a": 1, "c": None}) == {"a": (6, True), "b": (2, False), "c": (0, False)}
    assert await sql.fetchval("select error ->> 'type' from penstock.standing_jobs where key = 'a'") == "Quarantined"
    # Slots that move are no crash.
    await sql.execute("update penstock.standing_jobs set running_by = 'm' where key = 'b'")
    await sql.execute("select penstock.end_slots('tenants', 'm', array[slot], '{}') from penstock.standing_jobs where key = 'b'")
    assert await sql.fetchval("select crashes from penstock.standing_jobs where key = 'b'") == 2
    # Crashes that lie far apart are no series.
    await sql.execute(
        "update penstock.standing_jobs set running_by = 'm', started_at = now() - interval '11 minutes' where key = 'b'"
    )
    assert (await lose(sql, {}))["b"] == (1, False)
    # Reconciling leaves it alone; starting it frees it.
    assert await pool.reconcile({"a": {}, "b": {}, "c": {}}) == (0, 0, 0)
    assert await pool.start("a") == "starting"
    row = await sql.fetchrow("select crashes, quarantined_at, error from penstock.standing_jobs where key = 'a'")
    assert tuple(row) == (0, None, None)


async def test_a_standing_job_whose_worker_is_killed_now_and_then_is_not_quarantined(pool: Pool[Any], sql: Sql) -> None:
    await pool.start("a")
    for with_others in (None, None, 2, None, None):
        assert await lose(sql, {"a": with_others}) != {}
    # A process that is killed takes with it what is on trial alone.
    assert await lose(sql, {"a": 1}) == {"a": (6, False)}


async def trials_of(app: Penstock, pool: Pool[Any], sql: Sql, crashes: dict[str, int]) -> list[tuple[int, int | None]]:
    """Run standing jobs that have crashed so often. Returns the crashes of each that began, and with how many it was on trial."""
    runs = Runs().on(pool)
    await pool.reconcile(dict.fromkeys(crashes, 0))
    for key, times in crashes.items():
        await sql.execute("update penstock.standing_jobs set crashes = $2 where key = $1", key, times)
    await sql.execute(
        """
        create table public.trials (nth bigint generated always as identity, crashes integer, tried_with integer);
        create function begun() returns trigger language plpgsql as
            $$ begin insert into public.trials (crashes, tried_with) values (new.crashes, new.tried_with); return null; end $$;
        create trigger begun after update on penstock.standing_jobs
            for each row when (old.running_by is null and new.running_by is not null) execute function begun();
        """
    )
    async with Workers(app):
        await eventually(lambda: runs.now == set(crashes), "all runs")
        acquitted = "select count(*) = 0 from penstock.standing_jobs where tried_with is not null"
        await eventually(lambda: sql.fetchval(acquitted), "the end of the last trial")
    return [tuple(row) for row in await sql.fetch("select crashes, tried_with from public.trials order by nth")]


async def test_suspects_start_one_by_one_and_more_as_they_survive(
    app: Penstock, pool: Pool[Any], sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_S", 0.2)
    begun = await trials_of(app, pool, sql, {f"t{n}": 2 for n in range(7)} | {"fresh": 0})
    assert sorted(tried_with for _, tried_with in begun if tried_with is not None) == [1, 2, 2, 4, 4, 4, 4]
    assert [crashes for crashes, tried_with in begun if tried_with is None] == [0]


async def test_a_suspect_does_not_wait_for_those_that_have_crashed_more_often(
    app: Penstock, pool: Pool[Any], sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "FIRST_S", 0.1)
    begun = await trials_of(app, pool, sql, {"a": 4, "b": 2, "c": 3, "d": 2, "e": 4, "f": 2, "g": 3})
    # Those with as many crashes are on trial together, one at first.
    assert begun == [(2, 1), (2, 2), (2, 2), (3, 1), (3, 1), (4, 1), (4, 1)]
