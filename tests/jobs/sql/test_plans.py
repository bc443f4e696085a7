"""The hot statements stay what they are meant to be: index scans, HOT updates, and blind to what is deferred."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.postgres.plans import Sql, explain, nodes, seq_scans

FUNCTIONS = Path(penstock.__file__).parent / "postgres" / "schema" / "functions"


# What stands for a function's variables when its statement is explained outside of it.
VARIABLES = {
    "new_lease": "(-1)::bigint",
    "moment": "now()",
    "job_type.name": "'ship'::text",
    "job_type.visibility_timeout": "interval '5 min'",
    "job_type.keep_succeeded": "null::interval",
    "of_priority": "0::smallint",
    "first_seq": "0::bigint",
    "oldest_xid": "0::bigint",
    "room": "100",
    "p_watermarks": "'{}'::jsonb",
    "p_worker": "'w1'::text",
    "p_limit": "1000",
    "latest": "'9999-12-31'::timestamptz",
    "earliest": "'0001-01-01'::timestamptz",
    "sealed": "false",
    "p_keys": "'{a}'::text[]",
}


async def explain_claim(sql: Sql, *, sealed: bool = False) -> dict[str, Any]:
    variables = VARIABLES | {"sealed": str(sealed).lower()}
    return await explain(sql, "claim", "with claimed as", ";\n            get diagnostics", variables)


@pytest.fixture(autouse=True)
async def ship(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")


async def fill(sql: Sql, jobs: int) -> None:
    await sql.execute(
        "select count(*) from penstock.enqueue_many('ship', array_fill('{\"n\": 1}'::jsonb, array[$1::integer]))", jobs
    )


@pytest.mark.parametrize("statistics", ["missing", "of an empty table", "of an emptied table", "fresh"])
async def test_hot_statements_use_their_indexes(sql: Sql, statistics: str) -> None:
    if statistics == "of an emptied table":
        # Pages without rows, as a burst leaves them.
        await fill(sql, 5000)
        await sql.execute("delete from penstock.queued_jobs")
    if statistics.startswith("of an"):
        await sql.execute("analyze penstock.queued_jobs")
    await fill(sql, 5000)
    rows = await sql.fetch("select id, attempt, lease from penstock.claim('w1', '{ship}', 100)")
    if statistics == "fresh":
        await sql.execute("analyze penstock.queued_jobs")

    for sealed in (False, True):
        claim = await explain_claim(sql, sealed=sealed)
        assert "queued_jobs_ready" in {node.get("Index Name") for node in nodes(claim)}
        assert "queued_jobs" not in seq_scans(claim)
        assert sum(node.get("Actual Rows", 0) for node in nodes(claim) if node["Node Type"] == "Limit") == 100

    fitting = await explain(
        sql, "jobs_that_fit", "select\n            octet_length", "\n    loop",
        {"p_name": "'ship'::text", "p_priority": "0::smallint", "p_watermark": "0::bigint", "p_moment": "now()", "p_room": "100",
         "p_sealed": "false", "p_keys": "null::text[]"},
    )  # fmt: skip
    assert "queued_jobs_ready" in {node.get("Index Name") for node in nodes(fitting)}
    assert seq_scans(fitting) == []

    ids = "array[" + ",".join(f"'{row['id']}'" for row in rows) + "]::uuid[]"
    await sql.execute("select penstock.ensure_archive(now())")
    leases = f"array_fill({rows[0]['lease']}::bigint, array[100])"
    settle = await explain(
        sql, "archive_succeeded", "with settled as", "    into ids",
        {
            "p_moment": "now()", "p_ids": ids, "p_attempts": "array_fill(1::smallint, array[100])", "p_leases": leases,
            "p_outcomes": "null::text[]", "p_results": "null::jsonb[]",
        },
        caller="settle",
    )  # fmt: skip
    lookups = [node for node in nodes(settle) if node.get("Index Name") == "queued_jobs_pkey"]
    assert [node["Index Cond"] for node in lookups] == ["(id = given.id)"]
    assert "queued_jobs" not in seq_scans(settle)
    # The leases of a batch, which are few, are looked up once and not for each job.
    assert [node["Actual Loops"] for node in nodes(settle) if node.get("Relation Name") == "leases"] == [1]
    assert "leases" not in seq_scans(settle)
    assert [node["Actual Rows"] for node in nodes(settle) if node["Node Type"] == "ModifyTable" and node["Operation"] == "Insert"]
    ended = await explain(
        sql, "archive_unsuccessful", "with ended as", "    into archived",
        {
            "p_moment": "now()", "p_ids": ids, "p_statuses": "array_fill('failed'::penstock.archived_job_status, array[100])",
            "p_reasons": "null::text[]", "p_errors": "null::jsonb[]",
        },
    )  # fmt: skip
    lookups = [node for node in nodes(ended) if node.get("Index Name") == "queued_jobs_pkey"]
    assert [node["Index Cond"] for node in lookups] == ["(id = given.id)"]
    assert "queued_jobs" not in seq_scans(ended)

    promote = await explain(sql, "promote", "with due as", "\n        loop", {"moment": "now()", "p_limit": "1000"})
    assert "queued_jobs_deferred" in {node.get("Index Name") for node in nodes(promote)}
    assert "queued_jobs" not in seq_scans(promote)


async def test_a_claim_passes_the_jobs_that_are_claimed_once(sql: Sql) -> None:
    await fill(sql, 2_000)
    await sql.execute("select count(*) from penstock.claim('w1', '{ship}', 1000)")
    read = "select sum(idx_tup_read) from pg_stat_user_indexes where indexrelname = 'queued_jobs_ready'"
    await sql.execute("select pg_stat_force_next_flush()")
    before = await sql.fetchval(read)
    assert await sql.fetchval("select count(*) from penstock.claim('w1', '{ship}', 100)") == 100
    await sql.execute("select pg_stat_force_next_flush()")
    assert await sql.fetchval(read) - before < 1_000 + 100 + 20


async def test_claims_are_hot_updates(sql: Sql) -> None:
    await fill(sql, 20_000)
    for _ in range(20):
        await sql.execute("select count(*) from penstock.claim('w1', '{ship}', 1000)")
    await sql.execute("select pg_stat_force_next_flush()")
    updated, hot = await sql.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.queued_jobs'::regclass"
    )
    assert updated == 20_000
    assert hot >= 0.99 * updated


@pytest.mark.parametrize("deferred", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
async def test_deferred_jobs_do_not_slow_a_claim(sql: Sql, deferred: int) -> None:
    async def pages() -> int:
        plan = await explain_claim(sql)
        return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])

    await fill(sql, 1000)
    before = min([await pages() for _ in range(3)])
    await sql.execute(
        "insert into penstock.queued_jobs (id, name, run_after, created_at, updated_at, attempt, max_attempts, data)"
        " select gen_random_uuid(), 'ship', now() + interval '1 day', now(), now(), 5, 5, '{}'"
        " from generate_series(1, $1::integer)",
        deferred,
    )
    after = min([await pages() for _ in range(3)])
    assert before > 0
    assert after <= before * 1.1, f"a claim of 100 jobs touched {before} pages before and {after} after"


@pytest.mark.parametrize("statistics", ["missing", "fresh"])
async def test_a_publish_goes_by_the_indexes_and_its_copies_are_claimed_hot(sql: Sql, statistics: str) -> None:
    await sql.execute("select penstock.declare_topic('t'), penstock.declare_topic('other')")
    clients = "array(select 'c' || n from generate_series(1, $1::integer) as n)"
    await sql.execute(f"select count(*) from penstock.subscribe_many('t', {clients})", 2000)
    await sql.execute(f"select count(*) from penstock.subscribe_many('other', {clients})", 2000)
    if statistics == "fresh":
        await sql.execute("analyze penstock.subscriptions")
        await sql.execute("analyze penstock.jobs")
    publish = await explain(
        sql, "insert_copies", "insert into", "    get diagnostics",
        {
            "prefix": "'01a1fe2e-6b58-7000-'", "rest": "(1::bigint << 63)", "sealed": "false", "is_ready": "true",
            "p_run_after": "null::timestamptz", "p_moment": "now()", "p_expires_at": "null::timestamptz",
            "p_number": "1::bigint", "p_topic": "'t'::text", "p_data": "'{}'::jsonb",
            "p_copy_options": "null::jsonb", "p_key": "null::text",
        },
    )  # fmt: skip
    assert {node.get("Index Name") for node in nodes(publish)} >= {"subscriptions_pkey", "jobs_pkey"}
    assert seq_scans(publish) == []

    await sql.execute("select penstock.publish('t', '{\"n\": 1}')")
    names = "array(select 't_c' || n from generate_series(1, 2000) as n)"
    data = await sql.fetch(f"select data from penstock.claim('w', {names}, 2000)")
    assert [row["data"] for row in data] == ['{"n": 1}'] * 2000
    await sql.execute("select pg_stat_force_next_flush()")
    updated, hot = await sql.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.queued_jobs'::regclass"
    )
    assert (updated, hot) == (2000, 2000)


async def test_many_clients_are_looked_up_one_by_one_though_the_tables_were_small(sql: Sql) -> None:
    await sql.execute("select penstock.declare_topic('t')")
    await sql.execute("select penstock.subscribe('t', 'first')")
    await sql.execute("analyze penstock.subscriptions, penstock.jobs, penstock.type_priorities")
    clients = "array(select 'c' || n from generate_series(1, 5000) as n)"
    calls = [
        f"penstock.subscribe_many('t', {clients}, '1 minute')",
        f"penstock.subscribe_many('t', {clients}, '2 minutes', array_fill('{{}}'::jsonb, array[5000]))",
        f"penstock.renew_subscriptions(array_fill('t'::text, array[5000]), {clients})",
        "penstock.publish('t')",
        "penstock.publish('t', p_unique_key => 'u')",
        "penstock.publish_many('t', array_fill('{}'::jsonb, array[3]))",
        "penstock.list_subscribers('t')",
        f"penstock.unsubscribe_many('t', {clients}, true)",
        "penstock.maintain_topics(1000)",
    ]
    read = "select sum(seq_tup_read + idx_tup_fetch) from pg_stat_user_tables where relname = any ($1)"
    tables = ["subscriptions", "jobs", "type_priorities", "ended_queues", "queued_jobs"]
    await sql.execute("select pg_stat_force_next_flush()")
    before = await sql.fetchval(read, tables)
    for call in calls:
        await sql.execute(f"select count(*) from {call}")
        await sql.execute("select pg_stat_force_next_flush()")
        after = await sql.fetchval(read, tables)
        # A client that goes has five copies waiting, and each reads for how long its type keeps it.
        assert after - before <= 18 * 5001, f"{call} read {after - before} rows"
        before = after


@pytest.mark.parametrize("statistics", ["missing", "fresh"])
async def test_a_claim_of_many_types_tries_only_those_that_have_ready_jobs(sql: Sql, statistics: str) -> None:
    await sql.execute("select penstock.create_job_type('type' || n) from generate_series(1, 300) as n")
    for name, priority in [("type7", 0), ("type7", 5), ("type90", -3), ("type299", 0)]:
        await sql.execute("select penstock.enqueue($1, '{}', p_priority => $2::smallint)", name, priority)
    await sql.execute("select penstock.enqueue('type5', '{}', p_run_after => now() + interval '1 hour')")
    if statistics == "fresh":
        await sql.execute("analyze penstock.queued_jobs, penstock.jobs, penstock.type_priorities")
    names = "array(select 'type' || n from generate_series(1, 300) as n)"
    tried = await explain(
        sql,
        "claim",
        "select wanted.name",
        "\n        ) as with_jobs",
        {"p_names": names, "p_most": "null::integer[]", "p_keys": "null::text[]", "p_watermarks": "'{}'::jsonb"},
    )
    assert tried["Actual Rows"] == 3
    assert seq_scans(tried) == []
    assert {node.get("Index Name") for node in nodes(tried)} >= {"type_priorities_name", "queued_jobs_ready"}
    waiting = await explain(
        sql,
        "claim",
        "select of_type_priorities.priority, waiting.seq",
        "\n        ) as found",
        {"of_type": "'type7'", "p_watermarks": "'{}'::jsonb"},
    )
    assert waiting["Actual Rows"] == 2
    assert seq_scans(waiting) == []
    assert {node.get("Index Name") for node in nodes(waiting)} >= {"type_priorities_name", "queued_jobs_ready"}
    claimed = await sql.fetch(f"select name, priority from penstock.claim('w', {names}, 100)")
    assert [tuple(row) for row in claimed] == [("type7", 0), ("type7", 5), ("type90", -3), ("type299", 0)]
    assert await sql.fetch(f"select name from penstock.claim('w', {names}, 100)") == []
    assert await sql.fetch("select name from penstock.claim('w', null, 100)") == []
    assert await sql.fetchval("select count(*) from penstock.leases") == 4


async def test_the_messages_of_copies_are_looked_up_one_by_one_though_the_tables_were_small(sql: Sql) -> None:
    await sql.execute("select penstock.declare_topic('t')")
    await sql.execute("analyze penstock.topic_messages, penstock.queued_jobs")
    await sql.execute(
        "select count(*) from penstock.subscribe_many('t', array(select 'c' || n from generate_series(1, 1000) as n))"
    )
    await sql.execute("select penstock.publish('t'), penstock.publish('t')")
    ids = [row["id"] for row in await sql.fetch("select id from penstock.queued_jobs")]
    read = "select sum(seq_tup_read + idx_tup_fetch) from pg_stat_user_tables where relname in ('queued_jobs', 'topic_messages')"
    await sql.execute("select pg_stat_force_next_flush()")
    before = await sql.fetchval(read)
    assert await sql.fetchval("select count(distinct seq) from penstock.messages_of($1)", ids) == 2
    await sql.execute("select pg_stat_force_next_flush()")
    assert await sql.fetchval(read) - before <= 2 * len(ids)


async def test_a_claim_of_ordinary_jobs_does_not_look_for_messages(sql: Sql) -> None:
    await fill(sql, 200)
    claim = await explain_claim(sql)
    (messages,) = (node for node in nodes(claim) if node.get("Relation Name") == "topic_messages")
    assert messages["Actual Loops"] == 0


async def test_renewals_are_hot_updates(sql: Sql) -> None:
    await sql.execute("select penstock.declare_topic('t')")
    clients = "array(select 'c' || n from generate_series(1, 500) as n)"
    await sql.execute(f"select count(*) from penstock.subscribe_many('t', {clients}, '1 minute')")
    renewed = await sql.fetchval(
        f"select count(*) from penstock.renew_subscriptions(array_fill('t'::text, array[500]), {clients})"
    )
    await sql.execute("select pg_stat_force_next_flush()")
    hot = await sql.fetchval("select n_tup_hot_upd from pg_stat_user_tables where relid = 'penstock.subscriptions'::regclass")
    assert (renewed, hot) == (500, 500)


def test_every_table_column_and_function_of_the_schema_is_commented_where_it_is_public() -> None:
    text = "".join(file.read_text("utf-8") for file in FUNCTIONS.rglob("*.sql"))
    defined = set(re.findall(r"create or replace function penstock\.(\w+)", text))
    commented = set(re.findall(r"comment on function penstock\.(\w+)", text))
    assert defined == commented


def test_a_function_of_more_than_two_screens_says_why_at_its_head() -> None:
    silent = []
    for file in FUNCTIONS.rglob("*.sql"):
        for found in re.finditer(r"(.*)\n(create or replace function penstock\.(\w+)\((?:.*\n)+?\$\$;\n)", file.read_text()):
            above, text, name = found.groups()
            if text.count("\n") > 100 and not above.startswith("-- "):
                silent.append(name)
    assert not silent, f"split them, or say above them why they are long: {silent}"


@pytest.mark.parametrize("waiting", [2_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(400)])])
async def test_jobs_that_wait_for_others_change_nothing_in_a_claim(sql: Sql, waiting: int) -> None:
    async def claim() -> tuple[int, list[tuple[str, str | None]]]:
        plans = [await explain_claim(sql) for _ in range(3)]
        pages = min(int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"]) for plan in plans)
        return pages, [(node["Node Type"], node.get("Index Name")) for node in nodes(plans[-1])]

    await fill(sql, 1000)
    await sql.execute("analyze penstock.queued_jobs")
    before, plan = await claim()
    group = await sql.fetchval("select penstock.open_group('never sealed')")
    await sql.execute(
        "with waiting as ("
        " insert into penstock.waiting_jobs (id, name, run_after, created_at, updated_at, attempt, max_attempts, data, options)"
        " select gen_random_uuid(), 'ship', now(), now(), now(), 1, 5, '{}', jsonb_build_object('after', array[$2::uuid])"
        " from generate_series(1, $1::integer) returning id)"
        " insert into penstock.job_dependencies (job, after, at_any_end, linked) select id, $2::uuid, false, true from waiting",
        waiting, group, timeout=380,
    )  # fmt: skip
    assert await sql.fetchval("select count(*) from penstock.waiting_jobs") == waiting
    after, plan_after = await claim()
    assert plan_after == plan
    assert before > 0
    assert after <= before * 1.02, f"a claim of 100 jobs touched {before} pages before and {after} after"
