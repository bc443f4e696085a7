"""What fills the queue: exact when the queue is small, bounded work and estimates when it is large."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from tests.postgres.plans import explain, nodes, seq_scans

Sql: TypeAlias = "asyncpg.Connection[Any]"
MOST_PAGES = 2_000


async def names(sql: Sql, by: str, order: str = "ready", *, of: list[str] | None = None, limit: int = 20) -> list[Any]:
    rows = await sql.fetch("select name, key from penstock.top($1, $2, $3, $4)", by, order, of, limit)
    return [row["name"] if by == "types" else (row["name"], row["key"]) for row in rows]


@pytest.fixture
async def three_tenants(sql: Sql) -> None:
    """Of the pool orders: acme has 5 jobs, the newest; bill 2; cora 1, the oldest. The queue mail has 3, one deferred."""
    await sql.execute("select penstock.create_job_type('mail'), penstock.declare_pool('orders', '{\"slots\": 8}')")
    for key, jobs in (("cora", 1), ("bill", 2), ("acme", 5)):
        for _ in range(jobs):
            await sql.execute("select penstock.enqueue('orders', '1', p_key => $1)", key)
    await sql.execute("select penstock.enqueue('mail', '1'), penstock.enqueue('mail', '2')")
    await sql.execute("select penstock.enqueue('mail', '3', p_run_after => now() + interval '1 day')")
    await sql.execute(
        "update penstock.queued_jobs set created_at = created_at - interval '1 hour', run_after = run_after - interval '1 hour'"
        " where key = 'cora'"
    )


async def test_types_and_keys_come_in_the_order_that_is_asked_for(sql: Sql, three_tenants: None) -> None:
    assert await names(sql, "types") == ["orders", "mail"]
    assert await names(sql, "keys") == [("orders", "acme"), ("orders", "bill"), ("orders", "cora")]
    assert await names(sql, "keys", "oldest", limit=1) == [("orders", "cora")]
    assert await names(sql, "types", of=["mail"]) == ["mail"]
    assert await names(sql, "keys", of=["mail"]) == []
    jobs = await sql.fetch("select id, attempt, lease from penstock.claim('w', '{mail}', 1)")
    counted = await sql.fetchrow("select * from penstock.top('types', 'ready', '{mail}')")
    assert tuple(counted)[2:5] == (1, 1, 1)
    assert (counted["finished"], counted["looked_at"]) == (0, 1.0)
    await sql.execute(
        "select penstock.settle($1, $2, $3)", *[[row[column] for row in jobs] for column in ("id", "attempt", "lease")]
    )
    assert await names(sql, "types", "busy") == ["mail", "orders"]
    counted = await sql.fetchrow("select * from penstock.top('types', 'busy')")
    assert (counted["ready"], counted["in_progress"], counted["finished"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("penstock.top('tenants')", "unknown kind: tenants"),
        ("penstock.top(null)", "unknown kind: null"),
        ("penstock.top('keys', 'newest')", "unknown order: newest"),
        ("penstock.top('keys', p_limit => 1001)", "invalid limit: 1001"),
    ],
)
async def test_a_top_that_does_not_exist_is_refused(sql: Sql, call: str, said: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=said) as refused:
        await sql.fetch(f"select * from {call}")
    assert refused.value.sqlstate == "PS400"


async def test_a_large_queue_is_looked_at_in_part(sql: Sql) -> None:
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    for name, jobs in (("many", 90_000), ("some", 9_000), ("few", 1_000)):
        await sql.execute("select penstock.create_job_type($1)", name)
        await sql.execute(
            "insert into penstock.queued_jobs"
            " (id, seq, name, key, run_after, created_at, updated_at, attempt, max_attempts, data)"
            " select gen_random_uuid(), nextval('penstock.job_seq'), $1, $1 || '-key', now(), now(), now(), 1, 5, '{}'"
            " from generate_series(1, $2::integer)",
            name,
            jobs,
        )
    await sql.execute(
        "insert into penstock.archived_jobs"
        " (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority, name, data)"
        " select gen_random_uuid(), now(), now(), now(), 'succeeded', 1, 5, 0, 'many', '{}' from generate_series(1, 20000)"
    )
    pages = await sql.fetchval("select pg_relation_size('penstock.queued_jobs') / current_setting('block_size')::integer")
    assert pages > 1.5 * MOST_PAGES
    for by in ("types", "keys"):
        rows = await sql.fetch("select * from penstock.top($1)", by)
        assert [row["name"] for row in rows] == ["many", "some", "few"]
        assert [row["looked_at"] for row in rows] == [pytest.approx(MOST_PAGES / pages)] * 3
        assert rows[0]["ready"] == pytest.approx(90_000, rel=0.2)
        assert [row["finished"] for row in rows] == ([10_000, 0, 0] if by == "types" else [0, 0, 0])

    plan = await explain(
        sql, "top", "with waiting as", ";\nend",
        {"p_by": "'types'::text", "p_order": "'ready'::text", "p_names": "null::text[]", "p_limit": "20",
         "share": f"({MOST_PAGES}::double precision / {pages})"},
    )  # fmt: skip
    (sample,) = (node for node in nodes(plan) if node.get("Relation Name") == "queued_jobs")
    assert sample["Node Type"] == "Sample Scan"
    # The number of pages is random, with a standard deviation below 50.
    assert sample["Shared Hit Blocks"] + sample["Shared Read Blocks"] < MOST_PAGES + 500
    assert seq_scans(plan) == []
    ended = [node for node in nodes(plan) if str(node.get("Relation Name", "")).startswith("archived_jobs")]
    assert sum(node["Actual Rows"] for node in ended) <= 10_000 + len(ended)
