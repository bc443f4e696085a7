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
        ("penstock.top('keys', p_limit => 10001)", "invalid limit: 10001"),
    ],
)
async def test_a_top_that_does_not_exist_is_refused(sql: Sql, call: str, said: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=said) as refused:
        await sql.fetch(f"select * from {call}")
    assert refused.value.sqlstate == "PS400"


INSERT = (
    "insert into penstock.queued_jobs"
    " (id, seq, name, key, run_after, created_at, updated_at, attempt, max_attempts, data)"
    " select gen_random_uuid(), case when $3 then nextval('penstock.job_seq') end, $1, $1 || '-key', now(), now(), now(), 1, 5,"
    " '{}'"
    " from generate_series(1, $2::integer)"
)


async def pages_of(sql: Sql) -> int:
    pages: int = await sql.fetchval("select pg_relation_size('penstock.queued_jobs') / current_setting('block_size')::integer")
    return pages


async def test_a_large_queue_is_looked_at_in_part(sql: Sql) -> None:
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    for name, jobs in (("many", 90_000), ("some", 9_000), ("few", 1_000)):
        await sql.execute("select penstock.create_job_type($1)", name)
        await sql.execute(INSERT, name, jobs, True)
    await sql.execute(
        "insert into penstock.archived_jobs"
        " (id, finished_at, created_at, run_after, status, attempt, max_attempts, priority, name, data)"
        " select gen_random_uuid(), now(), now(), now(), 'succeeded', 1, 5, 0, 'many', '{}' from generate_series(1, 20000)"
    )
    pages = await pages_of(sql)
    assert pages > 1.5 * MOST_PAGES
    for by in ("types", "keys"):
        rows = await sql.fetch("select * from penstock.top($1)", by)
        assert [row["name"] for row in rows] == ["many", "some", "few"]
        assert [row["looked_at"] for row in rows] == [pytest.approx(MOST_PAGES / pages)] * 3
        assert rows[0]["ready"] == pytest.approx(90_000, rel=0.2)
        assert [row["finished"] for row in rows] == ([10_000, 0, 0] if by == "types" else [0, 0, 0])
    # Of a type with few jobs all are counted, whatever else waits.
    few = await sql.fetchrow("select * from penstock.top('keys', 'ready', '{few}')")
    assert (few["key"], few["ready"], few["looked_at"]) == ("few-key", 1_000, 1.0)

    variables = {
        "p_by": "'types'::text", "p_order": "'ready'::text", "p_names": "null::text[]", "p_limit": "20",
        "share": f"({MOST_PAGES}::double precision / {pages})", "by_index": "true", "most_jobs": "50000",
    }  # fmt: skip
    plan = await explain(sql, "top", "with placed as", ";\nend", variables)
    (sample,) = (node for node in nodes(plan) if node.get("Relation Name") == "queued_jobs")
    assert sample["Node Type"] == "Sample Scan"
    # The number of pages is random, with a standard deviation below 50.
    assert sample["Shared Hit Blocks"] + sample["Shared Read Blocks"] < MOST_PAGES + 500
    assert seq_scans(plan) == []
    ended = [node for node in nodes(plan) if str(node.get("Relation Name", "")).startswith("archived_jobs")]
    assert sum(node["Actual Rows"] for node in ended) <= 10_000 + len(ended)


@pytest.mark.parametrize("statistics", ["of an empty table", "fresh"])
async def test_the_indexes_are_walked_up_to_a_bound(sql: Sql, statistics: str) -> None:
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    await sql.execute("select penstock.create_job_type('mail'), penstock.declare_pool('orders', '{\"slots\": 8}')")
    if statistics == "of an empty table":
        await sql.execute("analyze penstock.queued_jobs")
    await sql.execute(INSERT, "mail", 3_000, True)
    await sql.execute(INSERT, "mail", 3_000, False)
    await sql.execute("select penstock.enqueue('orders', '1', p_key => 'key-' || n) from generate_series(1, 3000) as n")
    if statistics == "fresh":
        await sql.execute("analyze penstock.queued_jobs")
    placed, deferred = {"queued_jobs_ready", "queued_jobs_keyed"}, {"queued_jobs_deferred_of_type"}
    for function, names, indexes in (
        ("first_placed", "null", placed), ("first_placed", "'{mail,orders}'", placed),
        ("first_deferred", "null", deferred), ("first_deferred", "'{mail,orders}'", deferred),
    ):  # fmt: skip
        source = await sql.fetchval("select prosrc from pg_proc where proname = $1", function)
        first = source.split("return query")[1 if names == "null" else 2].strip().split(";")[0]
        plan = await explain(sql, function, first, ";", {"p_names": f"{names}::text[]", "p_most": "1000"})
        scans = [node for node in nodes(plan) if node.get("Relation Name") == "queued_jobs"]
        assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}, (function, names, plan)
        assert {node["Index Name"] for node in scans} == indexes, (function, names)
        assert all(node["Actual Rows"] * node["Actual Loops"] <= 1_000 for node in scans), (function, names)
        assert plan["Actual Rows"] == 1_000
        assert [node for node in nodes(plan) if node["Node Type"] == "Sort"] == []


@pytest.mark.parametrize("vacuumed", [True, False])
async def test_one_job_that_waits_is_seen_among_pages_that_a_drain_has_left(sql: Sql, vacuumed: bool) -> None:
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off, fillfactor = 10)")
    await sql.execute("select penstock.create_job_type('drained'), penstock.create_job_type('mail')")
    await sql.execute(INSERT, "drained", 12_500, True)
    # In the middle, so that its page is as good as any.
    await sql.execute("select penstock.enqueue('mail', '1', p_key => 'acme')")
    await sql.execute("select penstock.enqueue('mail', '1', p_key => 'acme', p_run_after => now() + interval '1 day')")
    await sql.execute(INSERT, "drained", 12_500, True)
    await sql.execute("delete from penstock.queued_jobs where name = 'drained'")
    if vacuumed:
        await sql.execute("vacuum penstock.queued_jobs")
    pages = await pages_of(sql)
    assert pages > 1.5 * MOST_PAGES
    for by, names in (("types", None), ("keys", None), ("keys", ["mail"])):
        (row,) = await sql.fetch("select * from penstock.top($1, 'ready', $2)", by, names)
        assert (row["name"], row["ready"], row["deferred"], row["looked_at"]) == ("mail", 1, 1, 1.0)
        assert row["oldest_ready_s"] is not None
    plan = await explain(
        sql, "top", "with placed as", ";\nend",
        {"p_by": "'types'::text", "p_order": "'ready'::text", "p_names": "null::text[]", "p_limit": "20",
         "share": f"({MOST_PAGES}::double precision / {pages})", "by_index": "true", "most_jobs": "50000"},
    )  # fmt: skip
    (sample,) = (node for node in nodes(plan) if node.get("Relation Name") == "queued_jobs")
    assert sample["Actual Loops"] == 0, "no page is sampled"


async def test_more_dead_rows_than_can_be_walked_past_are_not_walked_past(sql: Sql) -> None:
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    definition = await sql.fetchval("select pg_get_functiondef('penstock.top'::regproc)")
    assert "most_dead constant integer := 1000000" in definition
    await sql.execute(definition.replace(":= 1000000", ":= 10000").replace(":= 2000", ":= 200"))
    await sql.execute("select penstock.create_job_type('mail')")
    await sql.execute(INSERT, "mail", 11_000, True)
    await sql.execute("delete from penstock.queued_jobs where seq > (select min(seq) + 100 from penstock.queued_jobs)")
    await sql.execute("select pg_stat_force_next_flush()")
    pages = await pages_of(sql)
    assert pages > 250
    sampled = await sql.fetch("select * from penstock.top('types')")
    assert all(row["looked_at"] == pytest.approx(200 / pages) for row in sampled)
    await sql.execute("vacuum penstock.queued_jobs")
    (row,) = await sql.fetch("select * from penstock.top('types')")
    assert (row["ready"], row["looked_at"]) == (101, 1.0)
