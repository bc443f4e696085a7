"""The load of pools, from which advice is made: what lacks a worker, and how many workers could be busy."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"


@pytest.fixture(autouse=True)
async def work(sql: Sql) -> None:
    await sql.execute("select penstock.declare_pool('work', '{\"slots\": 16}', '{\"backoff_base\": \"1 hour\"}')")
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")


async def enqueue(sql: Sql, *keys: str) -> None:
    for key in keys:
        await sql.execute("select penstock.enqueue('work', '1', p_key => $1)", key)


async def claim(sql: Sql) -> list[asyncpg.Record]:
    rows = await sql.fetch(
        "select * from penstock.claim_keys('m', 'work', (select array_agg(n) from generate_series(0, 15) as n),"
        " array_fill(1::bigint, array[16]), 100)"
    )
    return rows[:-1]


async def load(sql: Sql) -> tuple[int, bool, int]:
    """Jobs that are ready, whether any lacks a worker, and how many workers could be busy."""
    row = await sql.fetchrow("select * from penstock.load_of_types() where name = 'work'")
    return row["ready"], row["oldest_ready_s"] is not None, row["most_workers"]


async def test_a_job_behind_another_of_its_key_does_not_lack_a_worker(sql: Sql) -> None:
    await enqueue(sql, "a", "a", "a")
    assert await load(sql) == (3, True, 1)
    (job,) = await claim(sql)
    assert await load(sql) == (2, False, 1)
    await enqueue(sql, "b")
    assert await load(sql) == (3, True, 2)
    # While it waits for its retry it holds up its key, and no worker would help.
    await claim(sql)
    await sql.fetch("select penstock.settle($1, $2, $3, '{failed}')", [job["id"]], [job["attempt"]], [job["lease"]])
    assert (await load(sql))[1:] == (False, 2)


async def test_with_several_at_once_for_a_key_those_behind_lack_a_worker(sql: Sql) -> None:
    await sql.execute("select penstock.change_pool('work', '{\"key_concurrency\": 2}')")
    await enqueue(sql, "a", "a", "a")
    assert len(await claim(sql)) == 2
    assert await load(sql) == (1, True, 1)


async def test_jobs_of_a_paused_type_lack_no_worker(sql: Sql) -> None:
    await enqueue(sql, "a", "b")
    await sql.execute("select penstock.create_job_type('mail'), penstock.create_job_type('off', '{\"concurrency\": 0}')")
    await sql.execute("select penstock.enqueue(name, '1') from unnest(array['mail', 'off']) as name")
    await sql.execute("select penstock.pause('work'), penstock.pause('mail')")
    paused = await sql.fetch("select name, ready, oldest_ready_s from penstock.load_of_types()")
    assert [tuple(row) for row in paused] == [("mail", 0, None), ("off", 0, None), ("work", 0, None)]
    await sql.execute("select penstock.resume('work'), penstock.resume('mail')")
    rows = await sql.fetch("select name, ready, oldest_ready_s is not null as lacks from penstock.load_of_types()")
    assert [tuple(row) for row in rows] == [("mail", 1, True), ("off", 0, False), ("work", 2, True)]


async def test_no_more_workers_than_jobs_that_may_run_at_once_could_be_busy(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('mail', '{\"concurrency\": 3}'), penstock.create_job_type('free')")
    await enqueue(sql, "a", "b", "c", "d", "e")
    await sql.execute("select penstock.change_job_type('work', '{\"concurrency\": 2}')")
    rows = await sql.fetch("select name, most_workers from penstock.load_of_types()")
    assert [tuple(row) for row in rows] == [("free", None), ("mail", 3), ("work", 2)]


async def test_no_more_workers_than_slots_with_work_could_be_busy(sql: Sql) -> None:
    await enqueue(sql, *["a"] * 50)
    await sql.execute("select penstock.start_standing('work', 'b', '{}'), penstock.start_standing('work', 'c', '{}')")
    slots = await sql.fetchval("select count(distinct slot) from penstock.standing_jobs")
    assert await load(sql) == (50, True, slots)


async def test_no_more_workers_help_a_type_at_its_rate_limit(sql: Sql) -> None:
    await sql.execute('select penstock.create_job_type(\'mail\', \'{"rate_limit": 4, "rate_period": "2 minutes"}\')')
    await sql.execute("select penstock.enqueue('mail', '1') from generate_series(1, 10)")
    busy = "select most_workers from penstock.load_of_types('1 minute') where name = 'mail'"
    for workers in (None, 1):
        assert await sql.fetchval(busy) == workers
        jobs = await sql.fetch("select id, attempt, lease from penstock.claim('m', array['mail'], 2)")
        outcomes = ["succeeded"] * len(jobs)
        columns = [[job[name] for job in jobs] for name in ("id", "attempt", "lease")]
        await sql.execute("select penstock.settle($1, $2, $3, $4)", *columns, outcomes)
