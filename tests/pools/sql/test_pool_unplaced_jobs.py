"""Jobs from before their type became a pool are adopted before anything is claimed: no later job of their keys overtakes them."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def enqueue(sql: Sql, *keys: str) -> None:
    await sql.fetch(
        "select penstock.enqueue_many('work', array_fill('1'::jsonb, array[cardinality($1::text[])]), null, $1)", keys
    )


async def become_a_pool(sql: Sql) -> None:
    await sql.execute("select penstock.convert_to_pool('work', '{\"slots\": 16}')")
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")


async def claim(sql: Sql) -> list[str]:
    """The keys of what is claimed, in the order of the line."""
    rows = await sql.fetch(
        "select * from penstock.claim_keys('m', 'work', (select array_agg(n) from generate_series(0, 15) as n),"
        " array_fill(1::bigint, array[16]), 100)"
    )
    return [row["key"] for row in sorted(rows[:-1], key=lambda row: row["seq"])]


async def test_nothing_is_claimed_before_all_old_jobs_are_adopted(sql: Sql) -> None:
    await sql.execute("select penstock.declare_job_type('work')")
    await enqueue(sql, *["old"] * 5_000)
    await enqueue(sql, *["old"] * 5_000)
    await enqueue(sql, "late")
    await become_a_pool(sql)
    await enqueue(sql, "late")
    # One call adopts 10,000, the first ones. Then the last one stands before its younger fellow.
    assert await claim(sql) == []
    left = "select array_agg(key) from penstock.queued_jobs where slot is null"
    assert await sql.fetchval(left) == ["late"]
    claimed = await claim(sql)
    assert claimed.count("late") == 1
    first = "select status = 'in-progress' from penstock.queued_jobs where key = 'late' order by seq"
    assert [row[0] for row in await sql.fetch(first)] == [True, False]


async def test_nothing_is_claimed_while_another_claim_adopts(sql: Sql, url: str) -> None:
    await sql.execute("select penstock.declare_job_type('work')")
    await enqueue(sql, "a")
    await become_a_pool(sql)
    await enqueue(sql, "a")
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            assert await other.fetchval("select penstock.adopt_unplaced('work')") == 1
            assert await claim(sql) == []
    finally:
        await other.close()
    assert await claim(sql) == ["a"]
