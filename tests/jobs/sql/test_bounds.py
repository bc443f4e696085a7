"""Numbers, sizes and times are bounded at every entry of the protocol, and what is there nevertheless stops only itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from penstock import Penstock

Sql: TypeAlias = "asyncpg.Connection[Any]"

# Each is small as jsonb: the numbers expand in the text. The last is a text of 2.1 MiB within a jsonb of 1 MiB.
POISON = {
    "large": "[" + ",".join(["1e131071"] * 100) + "]",
    "negative": '{"n": -1e400}',
    "tiny": '{"a": {"n": [1e-16000]}}',
    "digits": json.dumps([10**310]),
    "more than 1 GiB": "[" + ",".join(["1e131071"] * 9000) + "]",
    "long": '["' + "\\u0001" * 400_000 + '"]',
}
SETTLE = (
    "select penstock.settle(array[$2::uuid], array[5::smallint], (select array[lease] from penstock.queued_jobs), array['$3'],"
    " array[$1::jsonb])"
)
ENTRIES = {
    "enqueue": "select penstock.enqueue('ship', $1::jsonb)",
    "enqueue_many": "select penstock.enqueue_many('ship', array['{}', $1::jsonb])",
    "enqueue_many with ids": "select penstock.enqueue_many('ship', array[$1::jsonb], array[gen_random_uuid()])",
    "enqueue_many with unique keys": "select penstock.enqueue_many('ship', array[$1::jsonb], p_unique_keys => array['a'])",
    "enqueue_json": "select penstock.enqueue_json('ship', jsonb_build_array(jsonb_build_object('data', $1::jsonb)))",
    "put_jobs": "select penstock.put_jobs('ship', array[$1::jsonb], array[gen_random_uuid()])",
    "replay": "select penstock.replay((select id from penstock.archived_jobs limit 1), p_data => $1::jsonb, p_force => true)",
    "publish": "select penstock.publish('memos', $1::jsonb)",
    "publish_many": "select penstock.publish_many('memos', array['{}', $1::jsonb])",
    "publish_json": "select penstock.publish_json('memos', jsonb_build_object('data', $1::jsonb))",
    "subscribe": "select penstock.subscribe('memos', 'c9', p_filter => $1::jsonb)",
    "start_standing": "select penstock.start_standing('pool', 'a', $1::jsonb)",
    "notify_standing": "select penstock.notify_standing('pool', 'there', $1::jsonb)",
    "reconcile_standing": "select penstock.reconcile_standing('pool', jsonb_build_object('a', $1::jsonb))",
    "save_standing": "select penstock.save_standing('pool', 'there', 'm', 1, $1::jsonb)",
    "end_standing": "select penstock.end_standing('pool', 'there', 'm', 1, $1::jsonb)",
    "settle with a result": SETTLE.replace("$3", "succeeded"),
    "settle with an error": SETTLE.replace("$3", "failed"),
    "settle_attempts": (
        "select penstock.settle_attempts(array['ship'], array[$2::uuid], array[5::smallint], array['failed'], array[$1::jsonb])"
    ),
    "report_progress": "select penstock.report_progress(array[$2::uuid], array[5::bigint], array[$1::jsonb])",
    "type options": "select penstock.create_job_type('other', jsonb_build_object('max_attempts', $1::jsonb))",
    "topic options": "select penstock.declare_topic('other', jsonb_build_object('catch_up', $1::jsonb))",
    "pool options": "select penstock.declare_pool('other', jsonb_build_object('weights', $1::jsonb))",
    "stream options": "select penstock.create_stream('other', 1, jsonb_build_object('keep_events', $1::jsonb))",
    "metadata": "select penstock.join_group('pool', 'm2', gen_random_uuid(), p_metadata => jsonb_build_object('a', $1::jsonb))",
}
# It takes a second, so not every entry is tried with it.
GIGABYTE = {"enqueue", "publish_many", "settle with an error"}


@pytest.fixture
async def held(sql: Sql) -> AsyncIterator[UUID]:
    """A job in progress, beside a finished one, a topic with a subscriber, and a pool with a standing job."""
    await sql.execute("select penstock.create_job_type('ship', '{\"keep_result\": true}')")
    await sql.execute("select penstock.declare_topic('memos')")
    await sql.execute("select penstock.subscribe('memos', 'c1')")
    await sql.execute("select penstock.declare_pool('pool', '{\"slots\": 1}')")
    await sql.execute("select penstock.start_standing('pool', 'there')")
    await sql.execute("select penstock.enqueue('ship')")
    await sql.execute(
        "select penstock.settle(array[id], array[attempt], array[lease]) from penstock.claim('w', array['ship'], 1)"
    )
    id = await sql.fetchval("select penstock.enqueue('ship')")
    await sql.execute("select penstock.claim('w', array['ship'], 1)")
    yield id


@pytest.mark.parametrize("entry", ENTRIES)
async def test_no_entry_admits_what_expands(sql: Sql, held: UUID, entry: str) -> None:
    for name, poison in POISON.items():
        if name == "more than 1 GiB" and entry not in GIGABYTE:
            continue
        with pytest.raises(asyncpg.PostgresError) as refused:
            await sql.fetch(ENTRIES[entry], poison, *([held] if "$2" in ENTRIES[entry] else []))
        assert refused.value.sqlstate in ("PS400", "PS413"), (name, refused.value)
        assert refused.value.hint, name
        assert len(str(refused.value)) < 500, name


@pytest.mark.parametrize("number", ["1.7976931348623157e308", "-4.94e-324", "0", "18446744073709551617", "1e64", "0.1", "1e-300"])
async def test_numbers_that_a_double_can_hold_come_back(app: Penstock, sql: Sql, number: str) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    id = await sql.fetchval("select penstock.enqueue('ship', jsonb_build_array($1::text::numeric))", number)
    (value,) = (await app.find(id)).data
    stored = await sql.fetchval("select data ->> 0 from penstock.queued_jobs")
    assert (value if isinstance(value, int) else float(value)) == (int(stored) if "." not in stored else float(number))


@pytest.mark.parametrize("time", ["infinity", "-infinity", "20000-01-01", "4000-01-01 BC"])
@pytest.mark.parametrize(
    "call",
    [
        "penstock.enqueue('ship', p_run_after => $1)",
        "penstock.enqueue('ship', p_expires_at => $1)",
        "penstock.publish('memos', p_run_after => $1)",
        "penstock.publish_many('memos', array['{}'::jsonb], p_expires_at => array[$1])",
    ],
)
async def test_no_entry_admits_times_that_clients_cannot_read(sql: Sql, held: UUID, call: str, time: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match="out of range") as refused:
        await sql.fetch(f"select {call.replace('$1', '$1::text::timestamptz')}", time)
    assert refused.value.sqlstate == "PS400"


async def test_staged_rows_are_refused_as_a_whole(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    insert = "insert into penstock.staged_jobs (writer, part, place, name, data) values ('w', 'p', $1, 'ship', $2)"
    await sql.execute(insert, 1, '{"n": 1}')
    await sql.execute(insert, 2, '{"n": 1e131071}')
    with pytest.raises(asyncpg.PostgresError, match="number") as refused:
        await sql.fetch("select * from penstock.commit_staged('w', 1, array['p'], 2, 'job ship')")
    assert refused.value.sqlstate == "PS400"
    assert await sql.fetchval("select count(*) from penstock.queued_jobs") == 0


async def test_a_claim_takes_no_more_than_a_worker_has_room_for(sql: Sql) -> None:
    await sql.execute("select penstock.create_job_type('ship')")
    await sql.execute("select penstock.declare_topic('memos')")
    await sql.execute("select penstock.subscribe('memos', 'c1')")
    await sql.execute("select penstock.declare_pool('pool', '{\"slots\": 1}')")
    for _ in range(60):
        await sql.execute("select penstock.enqueue('ship', to_jsonb(repeat('x', 1000000)))")
        await sql.execute("select penstock.publish('memos', to_jsonb(repeat('x', 1000000)))")
        await sql.execute("select penstock.enqueue('pool', to_jsonb(repeat('x', 1000000)), p_key => 'k')")
    taken = []
    for name in ("ship", "memos_c1"):
        rows = await sql.fetch("select data from penstock.claim('w', array[$1], 1000)", name)
        taken.append(len(rows))
        assert 20 <= len(rows) <= 34, name
        # The rest is there for the next ones.
        left = 60 - len(rows)
        while rows := await sql.fetch("select id, attempt from penstock.claim('w', array[$1], 1000)", name):
            assert len(rows) <= 34
            left -= len(rows)
        assert left == 0, name
    await sql.execute("select penstock.join_group('pool', 'm', gen_random_uuid())")
    await sql.execute("update penstock.slots set owner = 'm', target = 'm', epoch = 1 where group_name = 'pool'")
    rows = await sql.fetch(
        "select data from penstock.claim_keys('m', 'pool', array[0], array[1], 1000, 1000) where id is not null"
    )
    assert 0 < len(rows) <= 16
