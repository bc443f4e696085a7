"""The rule for encryption: nothing plain reaches an encrypted queue, and only an administrator turns encryption off (P17)."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any, TypeAlias

import asyncpg
import pytest

from penstock import Penstock
from tests.postgres import sql_roles

Sql: TypeAlias = "asyncpg.Connection[Any]"
SEED = random.randrange(2**32)
ENVELOPE = json.dumps({"penstock": {"v": 1, "kid": "AAAAAAAA", "c": "A" * 60}})
ACTS = {
    "topic": "select penstock.declare_topic('delays')",
    "shared queue": "select penstock.declare_job_type('shared')",
    "encrypted queue": "select penstock.declare_job_type('shared', '{\"encrypted\": true}')",
    "encrypted topic": "select penstock.declare_topic('delays', '{\"encrypted\": true}')",
    "shared": "select penstock.subscribe('delays', 'a', p_queue => 'shared')",
    "own": "select penstock.subscribe('delays', 'b')",
    "own, encrypted": "select penstock.subscribe('delays', 'c', p_options => '{\"encrypted\": true}')",
    "own queue encrypted": "select penstock.declare_job_type('delays_b', '{\"encrypted\": true}')",
    "filtered": "select penstock.subscribe('delays', 'd', p_filter => '{\"n\": 1}')",
}


@pytest.fixture
async def roles(app: Penstock, sql: Sql) -> None:
    await sql_roles.prepare(sql)


async def attempted(sql: Sql, statement: str) -> str | None:
    """Run a statement. Returns the SQLSTATE of its error."""
    try:
        await sql.execute(statement)
    except asyncpg.PostgresError as error:
        return str(error.sqlstate)
    return None


async def plain_in_encrypted_queues(sql: Sql) -> int:
    count: int = await sql.fetchval(
        """
        select count(*) from penstock.queued_jobs as job
        join penstock.jobs as type on type.name = job.name
        where type.encrypted and not penstock.is_envelope(coalesce(penstock.payload(job.message), job.data))
        """
    )
    return count


@pytest.mark.parametrize("first", ACTS)
async def test_nothing_plain_is_delivered_into_an_encrypted_queue_in_whatever_order_things_are_declared(
    roles: None, sql: Sql, first: str
) -> None:
    publishes = (
        "select penstock.publish('delays', '{\"n\": 1}')",
        "select penstock.publish('delays', '{\"n\": 1}', p_unique_key => 'k')",
        "select penstock.publish_many('delays', array['{\"n\": 1}'::jsonb])",
        "select penstock.publish_many('delays', array['{\"n\": 1}'::jsonb], p_unique_keys => '{l}')",
    )
    orders = list(itertools.permutations([name for name in ACTS if name != first], 3))
    for order in random.Random(SEED).sample(orders, 80):
        transaction = sql.transaction()
        await transaction.start()
        await sql.execute("set session authorization test_worker")
        for name in (first, *order):
            savepoint = sql.transaction()
            await savepoint.start()
            if await attempted(sql, ACTS[name]) is None:
                await savepoint.commit()
            else:
                await savepoint.rollback()
        for publish in publishes:
            savepoint = sql.transaction()
            await savepoint.start()
            if await attempted(sql, publish) is None:
                await savepoint.commit()
            else:
                await savepoint.rollback()
        await sql.execute("reset session authorization")
        assert await plain_in_encrypted_queues(sql) == 0, (SEED, first, *order)
        await transaction.rollback()


@pytest.mark.parametrize(
    ("before", "refused"),
    [
        (["topic", "encrypted queue"], "shared"),
        (["topic", "shared queue", "shared"], "encrypted queue"),
        (["topic", "own"], "own queue encrypted"),
        (["topic"], "own, encrypted"),
        (["topic", "shared queue", "shared"], "encrypted topic"),
        (["topic", "filtered"], "encrypted topic"),
        (["encrypted topic"], "filtered"),
        (["encrypted topic", "encrypted queue"], "shared"),
    ],
)
async def test_what_would_deliver_plain_messages_into_an_encrypted_queue_is_refused(
    roles: None, sql: Sql, before: list[str], refused: str
) -> None:
    await sql.execute("set session authorization test_worker")
    for name in before:
        assert await attempted(sql, ACTS[name]) is None
    assert await attempted(sql, ACTS[refused]) == "PS409"
    stored = "select queue from penstock.subscriptions where client_id in ('a', 'c', 'd') and topic = 'delays'"
    expected = [row["queue"] for row in await sql.fetch(stored)]
    assert len(expected) == len([name for name in before if name in ("shared", "filtered")])


async def test_a_publish_checks_the_queues_too(app: Penstock, sql: Sql) -> None:
    await sql.execute(ACTS["topic"] + "; " + ACTS["own"])
    # As a hand that changes the tables.
    await sql.execute("update penstock.jobs set encrypted = true where name = 'delays_b'")
    for call in ("publish('delays', '1')", "publish('delays', '1', p_unique_key => 'k')", "publish_many('delays', '{1}')"):
        assert await attempted(sql, f"select penstock.{call}") == "PS409"
    assert await attempted(sql, f"select penstock.publish('delays', '{ENVELOPE}')") is None


async def test_the_queues_of_a_topic_are_encrypted_for_as_long_as_it_is(app: Penstock, sql: Sql) -> None:
    await sql.execute(ACTS["encrypted topic"] + "; " + ACTS["own"])
    encrypted = "select bool_and(encrypted) from penstock.jobs where topic = 'delays'"
    assert await sql.fetchval(encrypted)
    assert await attempted(sql, "select penstock.change_job_type('delays_b', '{\"encrypted\": false}')") == "PS409"
    await sql.execute("select penstock.unsubscribe('delays', 'b')")
    await sql.execute("select penstock.change_topic('delays', '{\"encrypted\": false}')")
    assert not await sql.fetchval("select encrypted from penstock.topics")
    assert await sql.fetchval("select count(*) from penstock.jobs where topic = 'delays' and encrypted") == 0
    await sql.execute(ACTS["own"])
    assert await attempted(sql, "select penstock.publish('delays', '1')") is None
    assert await plain_in_encrypted_queues(sql) == 0


@pytest.mark.parametrize("access", ["producer", "worker", "server", "admin"])
async def test_only_an_administrator_turns_encryption_off(roles: None, sql: Sql, access: str) -> None:
    on, off = '{"encrypted": true}', '{"encrypted": false}'
    await sql.execute(
        f"select penstock.declare_job_type('payments', '{on}'), penstock.declare_pool('ledger', p_type_options => '{on}')"
    )
    await sql.execute(f"select penstock.declare_topic('delays', '{on}'), penstock.declare_stream('orders', 1, '{on}')")
    await sql.execute("select penstock.subscribe('delays', 'b')")
    calls = {
        "job type": [
            f"penstock.declare_job_type('payments', '{off}')",
            "penstock.declare_job_type('payments', '{}')",
            f"penstock.declare_job_type('delays_b', '{off}')",
            f"penstock.change_job_type('payments', '{off}')",
            f"penstock.convert_to_pool('payments', p_type_options => '{off}')",
        ],
        "pool": [
            f"penstock.declare_pool('ledger', p_type_options => '{off}')",
        ],
        "topic": [
            f"penstock.declare_topic('delays', '{off}')",
            f"penstock.change_topic('delays', '{off}')",
            "penstock.declare_topic('delays', '{\"catch_up\": 1}')",
            f"penstock.subscribe('delays', 'b', p_options => '{off}')",
        ],
        "stream": [
            f"penstock.declare_stream('orders', 1, '{off}')",
            "penstock.declare_stream('orders', 1, '{\"keep_events\": 5}')",
            f"penstock.change_stream('orders', '{off}')",
        ],
    }
    encrypted = """
        select array_agg(name order by name) from (
            select name from penstock.jobs where encrypted
            union all select name from penstock.topics where encrypted
            union all select name from penstock.streams where encrypted
        ) as every
    """
    everything = ["delays", "delays_b", "ledger", "orders", "payments"]
    for call in itertools.chain.from_iterable(calls.values()):
        await sql.execute(f"set session authorization test_{access}")
        await attempted(sql, f"select {call}")
        await sql.execute("reset session authorization")
        if access != "admin":
            assert await sql.fetchval(encrypted) == everything, call
    if access == "admin":
        assert await sql.fetchval(encrypted) == ["ledger"]


async def test_dead_letters_of_a_stream_whose_encryption_is_turned_off_are_accepted(app: Penstock, sql: Sql) -> None:
    await sql.execute("select penstock.declare_stream('orders', 1, '{\"encrypted\": true}')")
    await sql.execute("select penstock.declare_stream('orders.dead', 1, '{\"encrypted\": true}')")
    await sql.execute("select penstock.change_stream('orders', '{\"encrypted\": false}')")
    assert await attempted(sql, "select penstock.append('orders.dead', '1')") is None


@pytest.mark.parametrize(
    "call", ["declare_job_type('payments', '{}')", "declare_topic('delays', '{}')", "declare_stream('s', 1, '{}')"]
)
@pytest.mark.parametrize("value", ['"true"', '"false"', "1", "null"])
async def test_encrypted_is_true_or_false(app: Penstock, sql: Sql, call: str, value: str) -> None:
    name = call.split("(")[0]
    await sql.execute(f"select penstock.{call}")
    with pytest.raises(asyncpg.PostgresError, match="encrypted of .* must be true or false") as refused:
        await sql.execute(f"select penstock.{call}".replace("'{}'", f"'{{\"encrypted\": {value}}}'"))
    assert refused.value.sqlstate == "PS400", name


@pytest.mark.parametrize("kid", ["", "AAAAAAA", "AAAAAAAAA", "AAAA AAA", "<b>AAAAA", "AAAAAAA\\n", "ÄAAAAAAA", "A" * 100_000])
async def test_the_id_of_a_key_has_its_form_wherever_it_is_taken(app: Penstock, sql: Sql, kid: str) -> None:
    text = json.loads(f'"{kid}"') if "\\" in kid else kid
    envelope = json.dumps({"penstock": {"v": 1, "kid": text, "c": "A" * 60}})
    await sql.execute("select penstock.declare_job_type('payments', '{\"encrypted\": true}')")
    await sql.execute("select penstock.declare_stream('orders', 1, '{\"encrypted\": true}')")
    for call in ("enqueue('payments', $1::jsonb)", "append('orders', $1::json)"):
        with pytest.raises(asyncpg.PostgresError, match="is encrypted, and") as refused:
            await sql.execute(f"select penstock.{call}", envelope)
        assert refused.value.sqlstate == "PS400"
    with pytest.raises(asyncpg.PostgresError, match="by something else than its id"):
        await sql.execute("select penstock.note_keys('w', array[$1], '{}')", text)
    with pytest.raises(asyncpg.PostgresError, match="by something else than its id"):
        await sql.execute("select penstock.note_keys('w', '{}', jsonb_build_object('payments', $1::text))", text)
