"""One look says what an idle process has to do for the whole database: everything that is due, and nothing when nothing is."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
WAITING = "select penstock.enqueue('mail', '{}', p_after => array[penstock.enqueue('mail', '{}')])"
DUE = {
    "a worker that is silent": (
        "select penstock.register_worker('w', '{mail}'); update penstock.workers set seen_at = now() - interval '7 s'",
        {"recover"},
    ),
    "a worker whose leases were locked when it was recovered": (
        "select penstock.register_worker('w', '{mail}'); update penstock.workers set state = 'dead'",
        {"recover"},
    ),
    "a process whose supervisor saw it end": (
        "select penstock.register_worker('w', '{mail}', p_supervisor => 's'); update penstock.workers set ended_at = now()",
        {"recover"},
    ),
    "suspects for which no worker is free": (
        "select penstock.enqueue('mail', '{}') from generate_series(1, 2);"
        "update penstock.queued_jobs set crashes = 2, trial = 1, seq = null, run_after = penstock.isolation_time(),"
        " updated_at = now() - interval '1 minute'",
        {"recover", "apart"},
    ),
    "a suspect that waits until it can be alone": (
        "select penstock.enqueue('mail', '{}');"
        "update penstock.queued_jobs set crashes = 2, seq = null, run_after = penstock.isolation_time(),"
        " updated_at = now() - interval '1 minute'",
        {"apart"},
    ),
    "a lease that has ended": (
        "select penstock.enqueue('mail', '{}'); select penstock.claim('w', '{mail}', 1);"
        "update penstock.leases set expires_at = now() - interval '1 s'",
        {"recover"},
    ),
    "a job that its handler has finished": (
        "insert into penstock.finished_jobs (id, lease) values (gen_random_uuid(), 1)",
        {"recover"},
    ),
    "a unique key whose period is over": (
        "select penstock.enqueue('mail', '{}', p_unique_key => 'u', p_unique_for => '1 h');"
        "update penstock.unique_periods set look_at = now() - interval '1 s'",
        {"recover"},
    ),
    "a type that was dropped": ("select penstock.drop_job_type('mail', true)", {"recover"}),
    "a job that has expired": (
        "select penstock.enqueue('mail', '{}', p_expires_at => now() + interval '1 h');"
        "update penstock.queued_jobs set expires_at = now() - interval '1 s'",
        {"expire"},
    ),
    "a job that has expired while it waits for another": (
        f"{WAITING}; update penstock.waiting_jobs set expires_at = now() - interval '1 s'",
        {"expire"},
    ),
    "a job that waits for another": (
        f"{WAITING}; update penstock.job_dependencies set linked = false",
        {"workflows"},
    ),
    "an end for which a job waits": (
        f"{WAITING};select penstock.cancel(id) from penstock.queued_jobs",
        {"workflows"},
    ),
    "an operation": ("select penstock.start_operation('cancel', '{\"name\": \"mail\"}')", {"operations"}),
    "an erasure that waits for a vacuum": (
        "select penstock.start_erasure('{\"key\": \"acme\"}'); update penstock.operations set phase = 'vacuum'",
        {"vacuum"},
    ),
    "a subscription that is to be renewed": (
        "select penstock.declare_topic('t'); select penstock.subscribe('t', 'c', p_ttl => '1 minute')",
        {"topics"},
    ),
    "a queue of an ended subscription": (
        "select penstock.declare_topic('t'); select penstock.subscribe('t', 'c'); select penstock.unsubscribe('t', 'c', true);"
        "insert into penstock.ended_queues (queue, topic, dropped, ended_at, look_at) values ('q', 't', true, now(), now())"
        " on conflict do nothing; update penstock.ended_queues set look_at = now() - interval '1 s'",
        {"topics"},
    ),
    "a job that waits to run alone": (
        "select penstock.enqueue('mail', '{}'); update penstock.queued_jobs set run_after = penstock.isolation_time()",
        {"apart"},
    ),
    "a stream": ("select penstock.declare_stream('s')", {"streams"}),
    "a segment that is retired": (
        "insert into penstock.retired_segments (table_name, retired_at) values ('events_1', now())",
        {"retired"},
    ),
}


@pytest.fixture(autouse=True)
async def mail(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('mail')")


async def due(sql: Sql) -> set[str]:
    return set(await sql.fetchval("select due from penstock.due_work()"))


async def test_nothing_is_due_where_there_is_nothing_to_do(sql: Sql) -> None:
    await sql.execute("select penstock.register_worker('w', '{mail}')")
    await sql.execute("select penstock.enqueue('mail', '{}')")
    assert await due(sql) == set()


@pytest.mark.parametrize("what", DUE)
async def test_what_has_to_be_done_is_due(sql: Sql, what: str) -> None:
    arranged, expected = DUE[what]
    await sql.execute(arranged)
    assert await due(sql) == expected


async def test_the_look_promotes_due_jobs_and_knows_when_the_next_one_is_due(sql: Sql) -> None:
    await sql.execute("select penstock.enqueue('mail', '{}', p_run_after => now() + interval '1 hour')")
    promoted, due_in_s = await sql.fetchrow("select promoted, due_in_s from penstock.due_work()")
    assert promoted == 0
    assert 0 < due_in_s <= 3600
    await sql.execute("update penstock.queued_jobs set run_after = now() - interval '1 s'")
    assert tuple(await sql.fetchrow("select promoted, due_in_s from penstock.due_work()")) == (1, None)


@pytest.mark.parametrize("statistics", ["missing", "of empty tables"])
async def test_a_look_reads_a_few_rows_however_many_jobs_leases_and_ticks_there_are(sql: Sql, statistics: str) -> None:
    if statistics == "of empty tables":
        await sql.execute("analyze")
    # Planned, and kept, while the tables are empty.
    for _ in range(8):
        await due(sql)
    await sql.execute("select count(*) from penstock.enqueue_many('mail', array_fill('{}'::jsonb, array[20000]))")
    await sql.execute("select count(*) from penstock.claim('w', '{mail}', 5000)")
    await sql.execute(
        "insert into penstock.leases (id, name, worker, priority, first_seq, last_seq, started_at, expires_at, open_jobs)"
        " select -n, 'mail', 'other', 0, 0, 0, now(), now() + interval '1 h', 1 from generate_series(1, 5000) as n"
    )
    read = "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables where schemaname = 'penstock'"
    await sql.execute("select pg_stat_force_next_flush()")
    before = await sql.fetchval(read)
    assert await due(sql) == set()
    await sql.execute("select pg_stat_force_next_flush()")
    assert await sql.fetchval(read) - before <= 20


async def test_streams_in_which_nothing_can_be_due_are_left_out(sql: Sql) -> None:
    for name, options in [
        ("empty", "{}"),
        ("fresh", "{}"),
        ("old", "{}"),
        ("large", '{"segment_bytes": 8192}'),
        ("short", '{"keep_age": "1 hour"}'),
    ]:
        await sql.execute("select penstock.declare_stream($1, 1, $2::jsonb)", name, options)
    for name in ("fresh", "old", "large", "short"):
        await sql.execute("select penstock.append($1, '{}')", name)
    await sql.execute(
        "update penstock.segments set opened_at = now() - interval '2 days'"
        " where stream in (select id from penstock.streams where name in ('empty', 'old'))"
    )
    named = "select array_agg(name order by name) from penstock.streams_to_maintain() as name"
    assert await sql.fetchval(named) == ["large", "old"]
    await sql.execute("select penstock.roll_segment('short')")
    assert await sql.fetchval(named) == ["large", "old"]
    await sql.execute("update penstock.segments set closed_at = now() - interval '2 hours' where closed_at is not null")
    assert await sql.fetchval(named) == ["large", "old", "short"]
