"""Enqueueing from Python: many at once, mixed, with spans of time."""

from __future__ import annotations

import asyncio
import gc
import weakref
from datetime import timedelta
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import InvalidInput, NewJob, Penstock
from penstock.jobs.models import Enqueued, EnqueueOutcome

Sql: TypeAlias = "asyncpg.Connection[Any]"


async def test_spans_count_from_the_databases_clock(app: Penstock, sql: Sql) -> None:
    ship = app.job_type("ship")
    later = NewJob({"n": 1}, run_after=timedelta(hours=1), expires_at=timedelta(hours=2), key="acme", priority=3)
    before = await sql.fetchval("select penstock.clock()")
    receipts = await ship.enqueue_many([NewJob({"n": 0}), later])
    through_own = await ship.options(run_after=timedelta(seconds=-5), connection=sql).enqueue({"n": 2})
    after = await sql.fetchval("select penstock.clock()")
    first, second = [await app.find(receipt.id) for receipt in receipts]
    assert (second.key, second.priority, second.data) == ("acme", 3, {"n": 1})
    assert before <= second.run_after - timedelta(hours=1) <= after
    assert second.expires_at is not None and before <= second.expires_at - timedelta(hours=2) <= after
    assert first.run_after <= after
    assert (await app.find(through_own.id)).run_after < before


async def test_batches_of_mixed_items_keep_their_order(app: Penstock) -> None:
    ship = app.job_type("ship")
    items: list[Any] = [{"n": n} for n in range(11_500)]
    items[1_200] = NewJob({"n": 1_200}, key="acme", unique="u")
    items[10_700] = NewJob({"n": 10_700}, unique="u")
    receipts = await ship.enqueue_many(items)
    assert len(receipts) == 11_500
    assert receipts[10_700] == Enqueued(receipts[1_200].id, EnqueueOutcome.COALESCED)
    for place in (0, 1_200, 1_201, 9_999, 10_000, 11_499):
        assert (await app.find(receipts[place].id)).data == {"n": place}
    with pytest.raises(InvalidInput, match="not JSON"):
        await ship.enqueue_many([*({"n": n} for n in range(10_500)), {"n": object()}])
    assert (await app.counts())[0].ready == 11_499 + 10_000


def test_loops_that_ended_are_forgotten(url: str) -> None:
    app = Penstock(url)
    ship = app.job_type("ship")
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def enqueue(number: int) -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await ship.enqueue({"n": number})

    for number in range(3):
        asyncio.run(enqueue(number))

    async def last() -> int:
        async with app:
            gc.collect()
            assert [loop() for loop in loops] == [None] * 3
            return (await app.counts())[0].ready

    assert asyncio.run(last()) == 3


async def test_the_row_of_a_new_job_is_written_out_by_the_planner(sql: Sql) -> None:
    await sql.execute("select penstock.declare_job_type('mail'), penstock.declare_topic('news'), penstock.declare_topic('again')")
    await sql.execute("select count(*) from penstock.subscribe_many('news', '{a,b}')")
    await sql.execute("set track_functions = 'all'")
    await sql.execute("select count(*) from penstock.enqueue_many('mail', '{1,2}')")
    # With a unique key that is there: one by one.
    await sql.execute("select penstock.enqueue('mail', '1', p_unique_key => 'u')")
    await sql.execute("select penstock.enqueue('mail', '1', p_unique_key => 'u')")
    await sql.execute("select penstock.publish('news', '1')")
    await sql.execute("select penstock.publish('news', '1', p_unique_key => 'u')")
    await sql.execute("select count(*) from penstock.publish_many('news', '{1,2}')")
    await sql.execute("select penstock.publish('again', '1')")
    await sql.execute("select count(*) from penstock.subscribe_many('again', '{c}', p_since => 0)")
    await sql.execute("insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', 'p', 1, 'mail', '{}')")
    await sql.execute("select penstock.insert_staged('w', '{p}', now())")
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where seq is not null") == 13
    await sql.execute("select pg_stat_force_next_flush()")
    called = {row[0] for row in await sql.fetch("select funcname from pg_stat_user_functions where schemaname = 'penstock'")}
    assert called >= {
        "insert_jobs",
        "enqueue_one_by_one",
        "insert_copies",
        "insert_coalescing_copies",
        "insert_many_copies",
        "insert_staged",
    }
    assert not called & {"new_job", "is_odd_job", "is_odd", "is_key"}


@pytest.mark.parametrize(
    ("column", "wrong", "problem"),
    [
        ("data", "null", "data is null"),
        ("data", "'1e400'", "data has a number that no double can hold"),
        ("data", "to_jsonb(repeat('x', 1048577))", "data is larger than 1 MiB"),
        ("id", "null", "id is null"),
        ("id", "'fffffff0-0000-7000-8000-000000000000'", "is a UUIDv7 from the future"),
        ("key", "''", "invalid key ''"),
        ("key", "repeat('k', 256)", "invalid key 'kkk"),
        ("key", "e'line\\nbreak'", "invalid key"),
        ("priority", "101", "priority 101 is out of range"),
        ("unique_key", "e'\\x01'", "invalid unique key"),
    ],
)
@pytest.mark.parametrize("queued_before", [False, True])
async def test_one_job_that_is_refused_refuses_its_batch(
    sql: Sql, column: str, wrong: str, problem: str, queued_before: bool
) -> None:
    """Also when another job of the batch is queued already, so that the jobs go one by one."""
    await sql.execute("select penstock.declare_job_type('mail')")
    first = await sql.fetchval("select gen_random_uuid()")
    if queued_before:
        await sql.execute("select penstock.enqueue('mail', '{}', $1)", first)
    good = {"data": "'{}'", "id": "gen_random_uuid()", "key": "'acme'", "priority": "1", "unique_key": "null"}
    bad = good | {column: wrong}
    columns = (f"array[{good[name]}, {good[name]}, {bad[name]}, {bad[name]}]" for name in good if name != "id")
    data, keys, priorities, unique_keys = columns
    ids = f"array[$1, {good['id']}, {bad['id']}, {bad['id']}]"
    unique = f", p_unique_keys => {unique_keys}::text[]" if column == "unique_key" else ""
    with pytest.raises(asyncpg.PostgresError, match=problem) as refused:
        await sql.fetch(
            f"select * from penstock.enqueue_many('mail', {data}::jsonb[], {ids}::uuid[], p_keys => {keys}::text[],"
            f" p_priorities => {priorities}::smallint[]{unique})",
            first,
        )
    assert refused.value.sqlstate in ("PS400", "PS413")
    assert "job 3 of 4 for mail" in str(refused.value)
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == int(queued_before)


async def test_a_batch_with_a_large_job_keeps_its_order(sql: Sql) -> None:
    await sql.execute("select penstock.declare_job_type('mail')")
    await sql.execute(
        "select count(*) from penstock.enqueue_many('mail', array["
        " '1', to_jsonb((select string_agg(md5(n::text), '') from generate_series(1, 1000) as n)), '3'])"
    )
    assert await sql.fetchval("select array_agg(left(data::text, 1) order by seq) from penstock.queued_jobs") == ["1", '"', "3"]
    assert await sql.fetchval("select count(*) from penstock.large_payloads where name = 'mail'") == 1


async def test_an_option_that_a_job_may_have_is_never_dropped(app: Penstock, sql: Sql) -> None:
    """An option that is added gets its name into `own_options`; from then on it is stored."""
    await app.job_type("ship").declare()
    transaction = sql.transaction()
    await transaction.start()
    try:
        await sql.execute(
            "create or replace function penstock.own_options() returns text[] language sql immutable parallel safe as "
            "$$ select array['max_attempts', 'time_limit', 'unique_for', 'colour'] $$"
        )
        given = [
            '{"colour": "red", "max_attempts": 2, "time_limit": null}',
            None,
            '{"colour": null}',
            "null",
            '{"max_attempts": 3}',
        ]
        await sql.execute(
            "select penstock.enqueue_many('ship', array_fill('{}'::jsonb, array[5]), p_options => $1::text[]::jsonb[])", given
        )
        stored = await sql.fetch(
            "select options ->> 'colour' as colour, options::text as text from penstock.queued_jobs order by seq"
        )
        assert [row["colour"] for row in stored] == ["red", None, None, None, None]
        assert [row["text"] for row in stored[1:4]] == [None] * 3
        assert stored[0]["text"] == '{"colour": "red", "max_attempts": 2}'
    finally:
        await transaction.rollback()
