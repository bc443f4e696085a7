"""The search of the dashboard: what it finds, how far it says that it looked, and that its work is bounded."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from penstock import NewJob, Penstock
from penstock.core.signatures import signature_of

Sql = asyncpg.Connection
# What tells the conditions of a search in the model below.
STATUSES = ("succeeded", "failed", "expired", "cancelled")
CONDITIONS = ("p_names", "p_status", "p_key", "p_worker", "p_error", "p_path", "p_value", "p_workflow")
GROUP = UUID("0190b7a0-0000-7000-8000-0000000000bb")


@pytest.fixture
async def types(app: Penstock) -> None:
    for name in ("a", "b", "c"):
        await app.create_job_type(name)


async def archive(sql: Sql, rows: int, values: str) -> None:
    """Archive jobs. `values`: name, status and data of the n-th."""
    await sql.execute(
        f"""
        insert into penstock.archived_jobs
            (id, finished_at, created_at, run_after, started_at, status, attempt, max_attempts, priority, name, worker, key, data,
            signature, errors)
        select
            penstock.new_id(), now() - n * interval '1 millisecond', now(), now(), now(),
            made.status::penstock.archived_job_status, 1, 1, 0,
            made.name, 'w' || n % 3, 'k' || n % 5, made.data::jsonb,
            case when made.status = 'failed' then substr(md5('E' || n % 2), 1, 16) end,
            case when made.status = 'failed' then
                jsonb_build_array(jsonb_build_object('type', 'E' || n % 2, 'message', 'number ' || n))
            end
        from generate_series(1, {rows}) as n
        cross join lateral (select {values}) as made (name, status, data)
        """
    )


async def whole(sql: Sql, function: str, limit: int, most: int, **conditions: Any) -> tuple[list[Any], int]:
    """All that a search finds, by as many calls as that takes; and how many calls it took."""
    found: list[Any] = []
    after = None
    for calls in range(1, 1_000):
        given = {**conditions, "p_after": after, "p_limit": limit, "p_most": most}
        arguments = ", ".join(f"{name} => ${place}" for place, name in enumerate(given, 1))
        rows = await sql.fetch(f"select * from penstock.{function}({arguments})", *given.values())
        found += [row["id"] for row in rows if row["found"]]
        assert len([row for row in rows if not row["found"]]) <= 1
        if not rows or (rows[-1]["found"] and len(rows) < limit):
            return found, calls
        after = rows[-1]["place"]
    pytest.fail("the search does not end")


async def test_a_search_by_parts_finds_what_one_look_at_everything_finds(types: None, sql: Sql) -> None:
    seed = random.randrange(1 << 30)
    made = random.Random(seed)
    await archive(
        sql, 400, "(array['a', 'b'])[1 + n % 2], (array['succeeded', 'failed', 'expired', 'cancelled'])[1 + n % 4], '{\"n\": 1}'"
    )
    await sql.execute(
        """
        update penstock.archived_jobs
        set data = jsonb_build_object('n', key, 'deep', jsonb_build_object('x', worker)),
            workflow = case when key in ('k1', 'k2') then $1::uuid end
        """,
        GROUP,
    )
    for _ in range(40):
        conditions = {
            name: value
            for name, value in {
                "p_names": made.choice([["a"], ["a", "b"], ["c"]]),
                "p_status": made.choice(STATUSES),
                "p_key": made.choice(["k1", "k4"]),
                "p_worker": made.choice(["w0", "w2"]),
                "p_error": made.choice(["E1", "number 1", "none"]),
                "p_workflow": GROUP,
            }.items()
            if made.random() < 0.4
        }
        if made.random() < 0.4:
            conditions |= made.choice([{"p_path": ["n"], "p_value": "k1"}, {"p_path": ["deep", "x"], "p_value": "w2"}])
        found, _ = await whole(sql, "search_finished", made.randrange(1, 60), made.randrange(1, 150), **conditions)
        wanted = await sql.fetch(
            """
            select id from penstock.archived_jobs as job
            where ($1::text[] is null or name = any ($1)) and ($2::text is null or status::text = $2)
                and ($3::text is null or key = $3)
                and ($4::text is null or worker = $4)
                and ($5::text is null or errors -> -1 ->> 'type' = $5 or strpos(errors -> -1 ->> 'message', $5) > 0)
                and ($6::text[] is null or data #>> $6 = $7)
                and ($8::uuid is null or workflow = $8)
            """,
            *(conditions.get(name) for name in CONDITIONS),
        )
        assert len(found) == len(set(found)), f"seed {seed}: {conditions}"
        assert set(found) == {row["id"] for row in wanted}, f"seed {seed}: {conditions}"


async def test_jobs_that_are_not_finished_are_found_by_parts(app: Penstock, types: None, sql: Sql) -> None:
    await app.enqueue_many("a", [{"n": n} for n in range(70)])
    await app.enqueue_many("b", [{"n": n} for n in range(40)])
    first = await app.job_type("a").enqueue({"n": -1})
    await app.job_type("c").options(after=[first.id]).enqueue({"n": 0})
    group = await app.job_group("g", then="c").open()
    await app.enqueue_many("b", [NewJob({"n": 100 + n}, group=group) for n in range(5)])
    await sql.execute("select * from penstock.claim('w1', array['a'], 10)")
    for conditions, number in (
        ({}, 118),
        ({"p_names": ["a"]}, 71),
        ({"p_names": ["b", "c"]}, 47),
        ({"p_status": "in-progress"}, 10),
        ({"p_status": "queued"}, 106),
        ({"p_status": "waiting"}, 2),
        ({"p_worker": "w1"}, 10),
        ({"p_path": ["n"], "p_value": "7"}, 2),
        ({"p_workflow": group.id}, 5),
        ({"p_status": "failed"}, 0),
    ):
        for limit, most in ((200, 10_000), (7, 10_000), (200, 11), (3, 5)):
            found, _ = await whole(sql, "search_waiting", limit, most, **conditions)
            assert len(found) == len(set(found)) == number, (conditions, limit, most)


async def test_a_search_that_looked_at_all_it_may_says_where_it_is(types: None, sql: Sql) -> None:
    await archive(sql, 100, "'a', 'succeeded', jsonb_build_object('n', n)")
    rows = await sql.fetch("select * from penstock.search_finished(array['a'], p_path => '{n}', p_value => '60', p_most => 50)")
    assert [row["found"] for row in rows] == [False]
    more = await sql.fetch(
        "select * from penstock.search_finished(array['a'], p_path => '{n}', p_value => '60', p_most => 50, p_after => $1)",
        rows[0]["place"],
    )
    assert more[0]["found"]


async def test_a_search_in_a_group_looks_only_at_the_children_of_the_status(types: None, sql: Sql) -> None:
    """The first 5 of 100 children failed: the newest that failed are not among the newest children."""
    await archive(sql, 100, "'a', case when n > 95 then 'failed' else 'succeeded' end, '1'")
    await sql.execute("update penstock.archived_jobs set workflow = $1", GROUP)
    rows = await sql.fetch("select * from penstock.search_finished(p_status => 'failed', p_workflow => $1, p_most => 20)", GROUP)
    assert [row["found"] for row in rows] == [True] * 5


async def test_a_signature_is_not_looked_for_in_messages(types: None, sql: Sql) -> None:
    """Who may not see messages may search for a signature, and learns nothing of a number in them."""
    await fail(sql, "a", '{"type": "E", "message": "card 4111111111111111", "signature": "00000000000000aa"}')
    for words, found in (("00000000000000aa", [True]), ("card", [True]), ("4111111111111111", [])):
        rows = await sql.fetch("select found from penstock.search_finished(p_error => $1)", words)
        assert [row["found"] for row in rows] == found, words


async def test_the_fence_after_a_restore_ends_all_sessions(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.open_session($1, 'ann', 'admin', null, null, '1 hour')", b"x" * 32)
    assert await sql.fetch("select * from penstock.find_session($1)", b"x" * 32)
    await sql.execute("select * from penstock.fence_restored()")
    assert not await sql.fetch("select * from penstock.find_session($1)", b"x" * 32)


async def test_an_object_is_not_compared_as_a_whole(types: None, sql: Sql) -> None:
    """Its text may hold a field that the user may not see."""
    await archive(sql, 1, "'a', 'failed', '{\"customer\": {\"iban\": \"DE42\"}}'")
    rows = await sql.fetch("select * from penstock.search_finished(p_path => '{customer}', p_value => $1)", '{"iban": "DE42"}')
    assert not [row for row in rows if row["found"]]


async def test_failures_come_latest_first_and_from_these_types_only(types: None, sql: Sql) -> None:
    await archive(sql, 60, "(array['a', 'b'])[1 + n % 2], (array['succeeded', 'failed', 'expired'])[1 + n % 3], '1'")
    rows = await sql.fetch("select * from penstock.recent_failures(array['b'])")
    assert len(rows) == 10 and {row["name"] for row in rows} == {"b"}
    assert [row["finished_at"] for row in rows] == sorted((row["finished_at"] for row in rows), reverse=True)


async def fail(sql: Sql, name: str, *details: str | None) -> None:
    """Enqueue, claim and settle a job for each of these errors."""
    for detail in details:
        await sql.execute("select penstock.enqueue($1, '1')", name)
        (job,) = await sql.fetch("select id, attempt, lease from penstock.claim('w1', array[$1], 1)", name)
        await sql.fetch(
            "select * from penstock.settle("
            "array[$1::uuid], array[$2::smallint], array[$3::bigint], '{failed-for-good}', array[$4::jsonb])",
            *job, detail,
        )  # fmt: skip


async def test_a_failure_keeps_the_signature_of_its_last_error_and_otherwise_that_of_its_type(types: None, sql: Sql) -> None:
    signature = signature_of("ValueError", "no order 7")
    await fail(sql, "a", f'{{"type": "ValueError", "message": "no order 7", "signature": "{signature}"}}')
    await fail(sql, "a", '{"type": "ValueError", "message": "no order 7"}', '{"type": "ValueError", "signature": "; drop"}', None)
    rows = await sql.fetch("select signature, errors from penstock.archived_jobs order by xid")
    assert [row["signature"] for row in rows] == [
        signature, signature_of("ValueError", ""), signature_of("ValueError", ""), signature_of("Error", ""),
    ]  # fmt: skip
    assert "signature" not in rows[0]["errors"]
    await sql.execute("select penstock.enqueue('a', '1')")
    await sql.fetch("select penstock.cancel(id) from penstock.queued_jobs")
    assert await sql.fetchval("select count(*) from penstock.archived_jobs where signature is null and status = 'cancelled'") == 1


async def test_failures_are_grouped_by_type_and_signature(types: None, sql: Sql) -> None:
    common = '"type": "ValueError", "signature": "00000000000000aa"'
    await fail(sql, "a", *(f'{{{common}, "message": "no order {n}", "version": "v{n % 2}"}}' for n in range(5)))
    await fail(sql, "b", f'{{{common}, "message": "no order 9"}}')
    # The first of them is older than what is looked at.
    await sql.execute(
        """
        update penstock.archived_jobs set finished_at = finished_at - interval '2 hours'
        where id = (select id from penstock.archived_jobs where name = 'a' order by finished_at limit 1)
        """
    )
    groups = await sql.fetch("select * from penstock.failure_groups(p_since => now() - interval '1 hour')")
    assert [(one["name"], one["failures"], sum(one["trend"]), one["message"], one["versions"]) for one in groups] == [
        ("a", 4, 4, "no order 4", ["v0", "v1"]), ("b", 1, 1, "no order 9", None),
    ]  # fmt: skip
    assert groups[0]["last_at"] - groups[0]["first_at"] >= timedelta(hours=2)
    assert len(groups[0]["examples"]) == 3 and groups[0]["looked"] == 5 and groups[0]["until"] is None
    assert len(groups[0]["trend"]) == 24
    assert [one["name"] for one in await sql.fetch("select name from penstock.failure_groups(array['b'])")] == ["b"]
    found = await sql.fetch("select * from penstock.search_finished(p_names => '{b}', p_error => '00000000000000aa')")
    assert [row["found"] for row in found].count(True) == 1


@pytest.mark.parametrize(
    "call",
    [
        "search_finished(p_status => 'gone')", "search_finished(p_limit => 0)", "search_waiting(p_most => 1000001)",
        "search_finished(p_path => array_fill('x'::text, array[21]), p_value => '')", "recent_failures(p_limit => 10001)",
        "failure_groups(p_limit => 1001)",
        "history_of('l', now(), now())", "history_of('l', now() - interval '32 days', now())",
    ],
)  # fmt: skip
async def test_a_search_without_bounds_is_refused(app: Penstock, sql: Sql, call: str) -> None:
    with pytest.raises(asyncpg.PostgresError) as refused:
        await sql.fetch(f"select * from penstock.{call}")
    assert refused.value.sqlstate in ("PS400", "PS413")


async def blocks(sql: Sql, call: str) -> int:
    """The pages that a call looks at."""
    (row,) = await sql.fetch(f"explain (analyze, buffers, timing off, format json) select * from penstock.{call}")
    plan = json.loads(row[0])[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


async def test_the_work_of_each_query_is_bounded_in_a_large_database(app: Penstock, types: None, sql: Sql) -> None:
    """A page of 8 KiB holds about 25 finished or 10 waiting jobs: to look at all would be more than 4,000 and 5,000 pages."""
    await sql.execute("alter table penstock.queued_jobs set (autovacuum_enabled = off)")
    for part in range(120):
        # In many transactions, as workers settle.
        status = "case when n > 980 then 'failed' else 'succeeded' end" if part == 0 else "'succeeded'"
        await archive(sql, 1_000, f"'a', {status}, '{{\"customer\": \"acme\"}}'")
    await archive(sql, 20, "'b', 'succeeded', '1'")
    await sql.execute("select penstock.enqueue_many('a', array_fill('{}'::jsonb, array[50000]))")
    await sql.execute("select penstock.enqueue_many('b', array_fill('{}'::jsonb, array[5]))")
    await sql.execute("select * from penstock.claim('w1', array['a'], 10)")
    # One in two of the groups is in another one.
    await sql.execute(
        """
        insert into penstock.job_groups (id, name, created_at, changed_at, finished_at, on_failure, parent)
        select penstock.new_id(), 'g' || n, now(), now(), now(), 'cancel', case when n % 2 = 0 then $1::uuid end
        from generate_series(1, 60000) as n
        """,
        GROUP,
    )
    await sql.execute("analyze penstock.job_groups")
    most = {
        "search_finished()": 1_500,
        "search_finished(array['a'])": 1_500,
        "search_finished(array['b'])": 1_500,
        "search_finished(array['a', 'b'], 'failed')": 1_500,
        "search_finished(p_status => 'failed')": 1_500,
        "search_finished(array['a'], 'failed')": 1_500,
        "search_finished(array['b'], 'failed')": 1_500,
        "search_finished(array['a'], p_key => 'k1')": 1_500,
        "search_finished(array['a'], p_path => '{customer}', p_value => 'nobody', p_most => 1000)": 2_500,
        "search_waiting()": 1_500,
        "search_waiting(array['b'])": 1_500,
        "search_waiting(p_status => 'in-progress')": 1_500,
        "search_waiting(p_status => 'waiting')": 500,
        "search_waiting(p_path => '{customer}', p_value => 'nobody', p_most => 1000)": 2_500,
        "recent_failures()": 1_500,
        "recent_failures(array['a'], now() - interval '1 hour')": 1_500,
        "failure_groups()": 1_500,
        "failure_groups(array['a'], now() - interval '1 hour')": 1_500,
        "group_list(100)": 1_000,
        "workflow_runs(100)": 500,
        f"job_groups where parent = '{GROUP}' order by created_at, id limit 100": 500,
    }
    looked = {call: await blocks(sql, call) for call in most}
    assert {call: (number, most[call]) for call, number in looked.items() if number > most[call]} == {}
