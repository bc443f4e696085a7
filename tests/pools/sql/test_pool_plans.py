"""The claim of a pool stays what it is meant to be: probes of one index, HOT updates, blind to how much waits behind a key."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.postgres.plans import explain, nodes, seq_scans

Sql: TypeAlias = "asyncpg.Connection[Any]"

VARIABLES = {
    "midway": "false",
    "resuming": "false",
    "p_turn_left": "0",
    "p_after_key": "''::text",
    "moment": "now()",
    # No subquery: with one as an argument, the planner would not write the function into the statement.
    "owned": "'{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}'::integer[]",
    "pool.key_concurrency": "1",
    "pool.keys_paused": "false",
    "pool.key_rate_limit": "null::integer",
    "pool.key_rate_period": "null::interval",
    "p_held_keys": "'{}'::jsonb",
    "p_name": "'work'::text",
    "p_member": "'m'::text",
    "p_depth": "1",
    "room": "100",
    "limited": "false",
    "longest_walk": "3000",
    "new_lease": "(-1)::bigint",
    "latest": "'9999-12-31'::timestamptz",
    "earliest": "'0001-01-01'::timestamptz",
    "job_type.visibility_timeout": "interval '5 min'",
    "job_type.keep_succeeded": "null::interval",
    "sealed": "false",
    "p_keys": "null::text[]",
}


@pytest.fixture(autouse=True)
async def work(sql: Sql) -> None:
    await sql.execute("select penstock.declare_pool('work', '{\"slots\": 16}')")
    await sql.execute("select penstock.join_group('work', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1")
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")


async def fill(sql: Sql, jobs: int, keys: int) -> None:
    await sql.execute(
        "select count(*) from penstock.enqueue_many('work', array_fill('{}'::jsonb, array[$1::integer]), null,"
        " (select array_agg('k' || n % $2) from generate_series(1, $1) as n))",
        jobs,
        keys,
    )


async def explain_claim(sql: Sql, changed: dict[str, str] | None = None) -> dict[str, Any]:
    variables = VARIABLES | (changed or {})
    return await explain(sql, "claim_keys", "with chosen as materialized", ";\n    get diagnostics", variables)


async def claim(sql: Sql, limit: int, depth: int) -> int:
    rows = await sql.fetch(
        "select id from penstock.claim_keys('m', 'work', (select array_agg(n) from generate_series(0, 15) as n),"
        " array_fill(1::bigint, array[16]), $1, $2)",
        limit,
        depth,
    )
    return len(rows) - 1


@pytest.mark.parametrize("statistics", ["missing", "of an empty table", "of an emptied table", "fresh"])
async def test_a_claim_probes_the_line_of_each_key(sql: Sql, statistics: str) -> None:
    if statistics == "of an emptied table":
        # Pages without rows, as a burst leaves them.
        await fill(sql, 5000, 500)
        await sql.execute("delete from penstock.queued_jobs")
    if statistics.startswith("of an"):
        await sql.execute("analyze penstock.queued_jobs")
    await fill(sql, 5000, 500)
    if statistics == "fresh":
        await sql.execute("analyze penstock.queued_jobs")
    plan = await explain_claim(sql)
    assert "queued_jobs_keyed" in {node.get("Index Name") for node in nodes(plan)}
    assert seq_scans(plan) == []
    read = [node["Actual Rows"] * node["Actual Loops"] for node in nodes(plan) if node.get("Relation Name") == "queued_jobs"]
    assert max(read) <= 500


async def test_paused_keys_are_looked_up_one_by_one_and_only_when_there_are_some(sql: Sql) -> None:
    await fill(sql, 5000, 500)
    await sql.execute("select penstock.pause_key('work', 'k' || n) from generate_series(1, 100) as n")

    async def looked_up(some: str) -> tuple[int, list[str]]:
        plan = await explain_claim(sql, {"pool.keys_paused": some})
        probes = [node for node in nodes(plan) if node.get("Relation Name") == "paused_keys"]
        return sum(node["Actual Loops"] for node in probes), seq_scans(plan)

    assert await looked_up("false") == (0, [])
    probes, scans = await looked_up("true")
    assert 100 < probes <= 700 and scans == []


@pytest.mark.parametrize("statistics", ["missing", "fresh"])
async def test_what_is_owned_is_not_compared_slot_by_slot(sql: Sql, statistics: str) -> None:
    if statistics == "fresh":
        await sql.execute("analyze penstock.slots")
    given = {
        "p_slots": "array[1, 2, 3]",
        "p_epochs": "array[1, 1, 1]::bigint[]",
        "p_group": "'work'::text",
        "p_member": "'m'::text",
    }
    plan = await explain(sql, "still_owned", "select array_agg(slots.slot", ");", given)
    kinds = [node["Node Type"] for node in nodes(plan)]
    assert "Hash Join" in kinds
    assert "Nested Loop" not in kinds
    assert seq_scans(plan) == []
    of_the_member = await explain(sql, "still_owned", "select array_agg(mine.slot", ";", {**given, "into own, own_epochs": ""})
    assert seq_scans(of_the_member) == []


async def test_claims_of_keys_are_hot_updates(sql: Sql) -> None:
    await fill(sql, 10_000, 1000)
    assert await claim(sql, 10_000, 10) == 10_000
    await sql.execute("select pg_stat_force_next_flush()")
    updated, hot = await sql.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.queued_jobs'::regclass"
    )
    assert updated == 10_000
    assert hot >= 0.99 * updated


async def test_a_hundred_thousand_jobs_of_one_key_cost_the_others_nothing(sql: Sql) -> None:
    async def pages() -> int:
        plan = await explain_claim(sql)
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])

    await fill(sql, 200, 200)
    before = min([await pages() for _ in range(3)])
    await fill(sql, 100_000, 1)
    after = min([await pages() for _ in range(3)])
    # The index grows by a level; what waits is not looked at.
    assert after <= before * 2, f"a claim of 100 jobs touched {before} pages before and {after} after"
