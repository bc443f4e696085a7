"""Trace contexts in SQL: given with a job, an event or a message, or said once for a transaction."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import asyncpg
import pytest

Sql: TypeAlias = "asyncpg.Connection[Any]"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN, OTHER = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE[::-1]}-{SPAN}-00"

TEXTS = [
    (GIVEN, GIVEN),
    (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
    (f"01-{TRACE}-{SPAN}-01", GIVEN),
    (f"cc-{TRACE}-{SPAN}-01-what-comes", GIVEN),
    (f"cc-{TRACE}-{SPAN}-01.what", None),
    (f"00-{TRACE}-{SPAN}-01-more", None),
    (f"ff-{TRACE}-{SPAN}-01", None),
    (f"00-{'0' * 32}-{SPAN}-01", None),
    (f"00-{TRACE}-{'0' * 16}-01", None),
    (f"00-{TRACE.upper()}-{SPAN}-01", None),
    (f" {GIVEN}", None),
    (f"{GIVEN}\n", None),
    (f"x\n{GIVEN}", None),
    ("", None),
    ("x" * 10_000, None),
]


@pytest.fixture
async def ship(app: object, sql: Sql) -> None:
    await sql.execute("select penstock.declare_job_type('ship')")


async def stored(sql: Sql) -> list[str | None]:
    return [row[0] for row in await sql.fetch("select options ->> 'traceparent' from penstock.queued_jobs order by seq")]


async def test_only_a_valid_traceparent_counts(ship: None, sql: Sql) -> None:
    rows = await sql.fetch(
        "select penstock.valid_traceparent(text) from unnest($1::text[]) as text", [given for given, _ in TEXTS]
    )
    assert [row[0] for row in rows] == [valid for _, valid in TEXTS]


async def test_what_is_not_valid_is_left_out_and_never_an_error(ship: None, sql: Sql) -> None:
    await sql.execute("begin; set local penstock.traceparent = 'nonsense'; select penstock.enqueue('ship', '1'); commit")
    wrong = ["nonsense", 17, None, True, {}, [], [GIVEN], "x" * 10_000]
    for given in wrong:
        await sql.execute(
            "select count(*) from penstock.enqueue_json('ship', $1::jsonb)", json.dumps([{"data": 2, "traceparent": given}])
        )
    assert await stored(sql) == [None] * (1 + len(wrong))
    assert await sql.fetchval("select count(*) from penstock.queued_jobs where options is not null") == 0


async def test_the_context_of_a_transaction_is_that_of_what_it_enqueues_and_of_nothing_after_it(ship: None, sql: Sql) -> None:
    async with sql.transaction():
        await sql.execute(f"set local penstock.traceparent = '{GIVEN}'")
        await sql.execute("select penstock.enqueue('ship', '1')")
        await sql.execute("select count(*) from penstock.enqueue_many('ship', array['2', '3']::jsonb[])")
        # Its own comes first.
        await sql.execute(
            "select count(*) from penstock.enqueue_many('ship', array['4', '5']::jsonb[],"
            ' p_options => array[\'{"max_attempts": 2, "traceparent": "' + OTHER + "\"}', null]::jsonb[])"
        )
    await sql.execute("select penstock.enqueue('ship', '6')")
    assert await stored(sql) == [GIVEN, GIVEN, GIVEN, OTHER, GIVEN, None]
    assert await sql.fetchval("select max_attempts from penstock.queued_jobs where data = '4'") == 2


async def test_a_worker_gets_it_with_its_claim_and_the_archive_keeps_it(ship: None, sql: Sql) -> None:
    await sql.execute(
        "select count(*) from penstock.enqueue_many("
        "'ship', array['1', '2']::jsonb[], p_options => array_fill($1::text::jsonb, array[2]))",
        json.dumps({"traceparent": GIVEN, "time_limit": 3}),
    )
    await sql.execute("select penstock.enqueue('ship', '3')")
    claimed = await sql.fetch("select * from penstock.claim('w', '{ship}', 10) order by seq")
    assert [(row["traceparent"], row["time_limit_s"]) for row in claimed] == [(GIVEN, 3), (GIVEN, 3), (None, None)]
    await sql.fetch("select * from penstock.settle($1, $2::smallint[], $3::bigint[])", *zip(*[
        (row["id"], row["attempt"], row["lease"]) for row in claimed
    ], strict=True))  # fmt: skip
    assert await sql.fetchval("select count(*) from penstock.archived_jobs where options ->> 'traceparent' = $1", GIVEN) == 2


async def test_a_replay_belongs_to_the_trace_of_who_replays(ship: None, sql: Sql) -> None:
    await sql.execute(
        "select penstock.enqueue_many('ship', array['1']::jsonb[], p_options => array[$1::text::jsonb])",
        json.dumps({"traceparent": GIVEN, "max_attempts": 3}),
    )
    (job,) = await sql.fetch("select * from penstock.claim('w', '{ship}', 10)")
    await sql.fetch(
        "select * from penstock.settle($1, $2::smallint[], $3::bigint[])", [job["id"]], [job["attempt"]], [job["lease"]]
    )
    await sql.execute("select penstock.replay($1)", job["id"])
    async with sql.transaction():
        await sql.execute(f"set local penstock.traceparent = '{OTHER}'")
        await sql.execute("select penstock.replay($1, p_force => true)", job["id"])
    assert await stored(sql) == [None, OTHER]
    assert await sql.fetchval("select array_agg(distinct max_attempts) from penstock.queued_jobs") == [3]


async def test_a_keyed_job_has_it_too(app: object, sql: Sql) -> None:
    await sql.execute("select penstock.declare_pool('tenants')")
    await sql.execute(f"begin; set local penstock.traceparent = '{GIVEN}'")
    await sql.execute("select penstock.enqueue_many('tenants', array['1']::jsonb[], p_keys => array['acme'])")
    await sql.execute("commit")
    assert await stored(sql) == [GIVEN]


async def test_each_copy_of_a_message_has_the_context_of_its_publisher(app: object, sql: Sql) -> None:
    await sql.execute("select penstock.declare_topic('delays')")
    await sql.execute("select penstock.subscribe('delays', 'a'); select penstock.subscribe('delays', 'b')")
    async with sql.transaction():
        await sql.execute(f"set local penstock.traceparent = '{GIVEN}'")
        await sql.execute("select penstock.publish('delays', '1')")
        await sql.execute("select penstock.publish('delays', '2', p_traceparent => $1)", OTHER)
        await sql.execute("select penstock.publish('delays', '3', p_unique_key => 'u')")
        await sql.execute(
            "select penstock.publish_many('delays', array['4', '5']::jsonb[], p_traceparents => array[$1, 'x'])", OTHER
        )
    documents = [{"data": 6, "traceparent": OTHER}, {"data": 7, "traceparent": "x"}]
    await sql.execute("select count(*) from penstock.publish_json('delays', $1::jsonb)", json.dumps(documents))
    await sql.execute("select penstock.publish_json('delays', $1::jsonb)", json.dumps({"data": 8, "traceparent": GIVEN}))
    found = await sql.fetch(
        "select message.data::text as data, array_agg(distinct job.options ->> 'traceparent') as contexts, count(*) as copies"
        " from penstock.queued_jobs as job join penstock.topic_messages as message on message.number = job.message"
        " group by 1 order by 1"
    )
    assert [(row["data"], row["contexts"], row["copies"]) for row in found] == [
        ("1", [GIVEN], 2), ("2", [OTHER], 2), ("3", [GIVEN], 2), ("4", [OTHER], 2), ("5", [GIVEN], 2), ("6", [OTHER], 2),
        ("7", [None], 2), ("8", [GIVEN], 2),
    ]  # fmt: skip


async def test_an_event_has_it_in_its_headers(app: object, sql: Sql) -> None:
    await sql.execute("select penstock.declare_stream('orders', 1)")
    headers = ['{"a": 1}', None, " { } ", f'{{"traceparent": "{OTHER}"}}', "null", ' {"n": 1e400, "z": "\\u0000"}']
    async with sql.transaction():
        await sql.execute(f"set local penstock.traceparent = '{GIVEN}'")
        await sql.execute("select penstock.append('orders', '0')")
        await sql.execute(
            "select count(*) from penstock.append_many("
            "'orders', array_fill('1'::json, array[6]), p_headers => $1::text[]::json[])",
            headers,
        )
        await sql.execute("select count(*) from penstock.append_many('orders', '{}')")
    await sql.execute("select penstock.append('orders', '2')")
    found = [
        text
        for row in await sql.fetch("select headers from penstock.read_chunks('orders', '{0}', '{0}', 100)")
        for text in row[0] or [None]
    ]
    assert [None if text is None else json.loads(text).get("traceparent") for text in found] == [
        GIVEN, GIVEN, GIVEN, GIVEN, OTHER, GIVEN, GIVEN, None,
    ]  # fmt: skip
    assert json.loads(found[1])["a"] == 1
    assert found[6].endswith('"n": 1e400, "z": "\\u0000"}')


async def test_a_batch_of_a_producer_is_the_same_when_it_is_sent_again_in_another_trace(app: object, sql: Sql) -> None:
    await sql.execute("select penstock.declare_stream('orders', 1)")
    for context in (GIVEN, OTHER, None):
        async with sql.transaction():
            await sql.execute("select set_config('penstock.traceparent', $1, true)", context or "")
            await sql.execute("select penstock.append_many('orders', array['1']::json[], p_producer => 'p', p_sequence => 1)")
    assert await sql.fetchval("select sum(events) from penstock.read_chunks('orders', '{0}', '{0}', 100)") == 1
    with pytest.raises(asyncpg.PostgresError, match="p"):
        await sql.execute("select penstock.append_many('orders', array['2']::json[], p_producer => 'p', p_sequence => 1)")
